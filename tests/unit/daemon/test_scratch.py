"""Folders for what ranks leave: made anew, removed, and none where a socket's path would be too long."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ckptless.daemon.agent.scratch import Scratch


def test_one_for_each_and_all_go() -> None:
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        scratch = Scratch({"TMPDIR": folder}, None)
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
        assert not list(Path(folder).iterdir())


def test_a_path_that_is_too_long_or_not_there(tmp_path: Path) -> None:
    (long := tmp_path / ("x" * 80)).mkdir()
    scratch = Scratch({}, str(long))
    assert scratch.make() is None
    scratch.close()
    assert not list(long.iterdir())
    assert Scratch({"TMPDIR": str(tmp_path / "no")}, None).make() is None
