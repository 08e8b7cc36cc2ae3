"""A folder of sockets: its user's alone, never another's, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptless.daemon.agent import socket_folder
from ckptless.daemon.agent.socket_folder import RANKS, SocketFolder, rank_sockets

STRANGER = 65534


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(socket_folder, "ROOT", tmp_path)
    yield tmp_path
    assert not list(tmp_path.iterdir())


def test_it_is_the_users_alone_and_goes() -> None:
    with contextlib.closing(SocketFolder("4711.s3")) as folder:
        found = folder.path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o700
        assert found.st_uid == os.getuid()
        assert rank_sockets("4711.s3") == [folder.socket(RANKS)]
        assert rank_sockets("4711.s") == []


def test_a_path_is_short_enough_whatever_the_job(root: Path) -> None:
    with contextlib.closing(SocketFolder("/a b\n" * 99)) as folder:
        assert len(folder.socket(RANKS)) - len(str(root)) + len("/tmp") < 108
        assert folder.path.parent == root


def test_folders_of_others_are_not_used(root: Path) -> None:
    """Somebody may make one of this name before."""
    for mode, name in ((0o755, "open"), (0o700, "foreign")):
        path = root / f"ckptless-{os.getuid()}-7-{name}"
        path.mkdir()
        path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(root / f"ckptless-{os.getuid()}-7-foreign", STRANGER, STRANGER)
    else:
        (root / f"ckptless-{os.getuid()}-7-foreign").rmdir()
    (root / f"ckptless-{os.getuid()}-7-link").symlink_to(root)
    assert rank_sockets("7") == []
    with contextlib.closing(SocketFolder("7")) as folder:
        assert rank_sockets("7") == [folder.socket(RANKS)]
    for path in root.iterdir():
        path.unlink() if path.is_symlink() else path.rmdir()


def test_what_a_killed_process_left_goes_with_the_next_one(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ckptless.daemon.agent import socket_folder as s\n"
        f"s.ROOT = Path({str(root)!r}); folder = s.SocketFolder('8'); print(folder.path, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        SocketFolder("9").close()
        assert path.exists(), "it is in use"
        other.send_signal(signal.SIGKILL)
        other.wait(30)
    assert path.exists()
    SocketFolder("9").close()
    assert not path.exists()
