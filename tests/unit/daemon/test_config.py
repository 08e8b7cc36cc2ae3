"""Configuration, key files and state directories: every mistake is one sentence that names the file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from ckptless.daemon.ckptlessd.state_dir import STATE_FORMAT, open_state_dir
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.config import LocalConfig, load, read_key

GOOD = """
node: 1
state_dir: /var/lib/ckptless
socket: /run/ckptless/daemon.sock
key_file: /etc/ckptless/key
peers:
  - {node: 0, name: a, address: 10.0.0.1, port: 7000}
  - {node: 1, name: b, address: 10.0.0.2, port: 7000}
"""


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD), LocalConfig)
    assert config.daemon.name == "b"
    # JSON is YAML: what the launcher writes is read the same.
    assert load(write(tmp_path, msgspec.json.encode(config)), LocalConfig) == config


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (GOOD + "colour: blue\n", "colour"),
        (GOOD.replace("node: 1\nstate", "node: one\nstate"), "node"),
        (GOOD.replace("7000}", "70000}", 1), "port"),
        (GOOD + "timers: {beat_s: 0}\n", "beat_s"),
        (GOOD.replace("key_file", "keyfile"), "key"),
        ("- [unclosed", "expected"),
        ("", "Expected"),
        (b"node: \xff\xfe\n", "config"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | bytes, word: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match=word) as caught:
        load(path, LocalConfig)
    assert str(path) in str(caught.value)


def test_a_node_that_is_not_among_its_peers(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("node: 1\nstate", "node: 7\nstate"))
    with pytest.raises(UsageError, match="7"):
        assert load(path, LocalConfig).daemon


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "no.yaml", LocalConfig)


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(UsageError, match="cannot read the key file"):
        read_key(path)
    path.write_bytes(b"k" * 32)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == b"k" * 32
    path.write_bytes(b"short")
    with pytest.raises(UsageError, match="5 bytes"):
        read_key(path)


def test_a_state_directory_is_made_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    open_state_dir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (path / "FORMAT").read_text() == f"{STATE_FORMAT}\n"
    (path / "ledger.db").touch()
    open_state_dir(path)


def test_an_empty_directory_may_be_given(tmp_path: Path) -> None:
    open_state_dir(tmp_path)
    assert (tmp_path / "FORMAT").exists()


@pytest.mark.parametrize("found", [b"2\n", b"0\n", b"one", b"\xff\xfe"])
def test_another_format_is_refused(tmp_path: Path, found: bytes) -> None:
    (tmp_path / "FORMAT").write_bytes(found)
    with pytest.raises(UsageError, match="format") as caught:
        open_state_dir(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert (tmp_path / "FORMAT").read_bytes() == found


def test_one_that_a_full_disk_left_half_made_is_finished(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").touch()
    open_state_dir(tmp_path)
    assert (tmp_path / "FORMAT").read_text() == f"{STATE_FORMAT}\n"
    (tmp_path / "FORMAT").write_bytes(b"")
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(UsageError, match="not empty"):
        open_state_dir(tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_one_that_others_may_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state"
    open_state_dir(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 700"):
        open_state_dir(path)
    path.chmod(0o755)
    open_state_dir(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_one_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to uid 65534, and this is uid 0: chown it"):
        open_state_dir(path)
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize(("mode", "good"), [(0o777, False), (0o757, False), (0o1777, True), (0o775, True)])
def test_a_folder_above_it_that_everybody_may_rename_is_refused(
    tmp_path: Path, mode: int, good: bool, link: bool
) -> None:
    above = tmp_path / "scratch"
    path = above / "site" / "state"
    path.mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    if link:
        (tmp_path / "link").symlink_to(above / "site")
        path = tmp_path / "link" / "state"
    if good:
        open_state_dir(path)
    else:
        with pytest.raises(UsageError, match=f"{above}, above .* by everybody .mode {mode:04o}.: chmod o-w"):
            open_state_dir(path)
    above.chmod(0o700)
    assert list(path.iterdir()) == ([path / "FORMAT"] if good else [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    """He would have it point elsewhere later."""
    there, link = tmp_path / "there", tmp_path / "link"
    there.mkdir(mode=0o700)
    link.symlink_to(there)
    os.lchown(link, 65534, 65534)
    for path in (link, link / "state"):
        with pytest.raises(UsageError, match=f"{link} on the way .* a link of uid 65534"):
            open_state_dir(path)
    assert list(there.iterdir()) == []
    os.lchown(link, 0, 0)
    open_state_dir(link)


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(UsageError, match="not empty"):
        open_state_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_file_in_its_place(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot use the state directory"):
        open_state_dir(tmp_path / "file" / inside)
