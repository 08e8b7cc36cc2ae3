"""A folder of sockets: its user's alone, never another's, and gone at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.agent.ranks import socket_folder
from ckptless.daemon.agent.ranks.socket_folder import RANKS, SocketFolder, rank_sockets

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


def a_stranger_makes(path: Path) -> None:
    """One of the same name, once its owner's is gone; everybody may write to it."""
    path.mkdir()
    path.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    (path / "theirs").touch()


def test_one_that_is_swept_and_replaced_before_it_is_locked_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start of the same user takes it for unused, and a stranger waits for just that."""
    taken: list[Path] = []

    def late(fd: int, how: int) -> None:
        if not taken and how == fcntl.LOCK_EX:
            taken.extend(root.iterdir())
            taken[0].rmdir()
            a_stranger_makes(taken[0])
        flock(fd, how)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", late)
    with contextlib.closing(SocketFolder("7")) as folder:
        assert folder.path != taken[0]
        assert folder.path.stat().st_uid == os.getuid()
    shutil.rmtree(taken[0])


def link_to(path: Path) -> None:
    path.symlink_to(path.parent)


def private_of_a_stranger(path: Path) -> None:
    path.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        path.chmod(0o777)


@pytest.mark.parametrize("then", [None, a_stranger_makes, private_of_a_stranger, link_to, Path.touch])
def test_one_that_is_swept_before_it_is_open_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[Path], None] | None
) -> None:
    taken: list[Path] = []

    def made(**words: Any) -> str:
        path = Path(mkdtemp(**words))
        if not taken:
            taken.append(path)
            path.rmdir()
            if then is not None:
                then(path)
        return str(path)

    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", made)
    fds = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with contextlib.closing(SocketFolder("7")) as folder:
        assert folder.path != taken[0]
        assert folder.path.is_dir()
        assert folder.path.stat().st_uid == os.getuid()
    assert set(os.listdir("/proc/self/fd")) == fds  # noqa: PTH208
    if taken[0].is_symlink() or taken[0].is_file():
        taken[0].unlink()
    shutil.rmtree(taken[0], ignore_errors=True)


def test_one_that_is_replaced_while_it_is_swept_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there now may be anybody's."""
    left = root / f"ckptless-{os.getuid()}-7-left"
    left.mkdir(mode=0o700)

    def late(fd: int, how: int) -> None:
        if left.exists() and not list(left.iterdir()):
            left.rmdir()
            a_stranger_makes(left)
        flock(fd, how)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", late)
    SocketFolder("8").close()
    assert (left / "theirs").exists()
    shutil.rmtree(left)


def test_what_a_killed_process_left_goes_with_the_next_one(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ckptless.daemon.agent.ranks import socket_folder as s\n"
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
