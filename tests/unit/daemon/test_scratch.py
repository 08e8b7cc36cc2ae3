"""Folders for what ranks leave: made anew, removed, and none where a socket's path would be too long."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ckptless.daemon.agent.ranks import socket_folder
from ckptless.daemon.agent.ranks.socket_folder import (
    MOST_NBYTES,
    NAME_NBYTES,
    RANKS,
    Scratch,
    SocketFolder,
)


def test_one_for_each_and_all_go() -> None:
    with contextlib.closing(SocketFolder("4711")) as folder:
        scratch = Scratch(folder.socket(RANKS))
        assert scratch.root.parent == folder.path
        one, other = scratch.make(), scratch.make()
        assert one is not None
        assert other is not None
        assert one != other
        (one / "listener-x").touch()
        assert one.stat().st_mode & 0o777 == 0o700
        scratch.remove(one)
        assert not one.exists()
        assert other.exists()
        scratch.close()
        assert not scratch.root.exists()


def test_nodes_of_one_machine_have_their_own() -> None:
    assert Scratch("/tmp/x/0-ranks").root != Scratch("/tmp/x/1-ranks").root


def test_the_longest_path_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 4_294_967_294)
    path = f"{socket_folder._prefix('x' * 99)}12345678/1024-{RANKS}"
    longest = Scratch(f"/tmp/{path}").root / "99"
    assert len(bytes(longest)) + NAME_NBYTES <= MOST_NBYTES


def test_a_path_that_is_too_long_or_cannot_be_made(tmp_path: Path) -> None:
    (long := tmp_path / ("x" * 80)).mkdir()
    scratch = Scratch(str(long / RANKS))
    assert scratch.make() is None
    scratch.close()
    (tmp_path / "file").touch()
    assert Scratch(str(tmp_path / "file" / RANKS)).make() is None
