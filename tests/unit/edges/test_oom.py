"""That the kernel has ended a process for want of memory is read from its cgroup, of either version."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptless.daemon.agent.ranks.rank_processes import oom_kills

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_NBYTES = 48 << 20


def tree(root: Path, cgroup: str, files: dict[str, str]) -> int:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (root / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "cgroup" / name).write_text(text)
    return oom_kills(root / "proc", root / "cgroup")


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        ("0::/job/step\n", {"job/step/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 9\n"}, 2),
        (
            "9:cpu:/x\n4:memory:/job\n0::/\n",
            {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"},
            5,
        ),
        ("4:memory:/job\n", {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0),
        ("0::/job\n", {}, 0),
        ("0::/job\n", {"job/memory.events": "\noom_kill\n"}, 0),
        ("what is this\n", {}, 0),
    ],
)
def test_what_cgroups_say(tmp_path: Path, cgroup: str, files: dict[str, str], kills: int) -> None:
    assert tree(tmp_path, cgroup, files) == kills


def test_where_there_are_no_cgroups(tmp_path: Path) -> None:
    assert oom_kills(tmp_path, tmp_path) == 0


def made() -> tuple[Path, str] | None:
    """A cgroup of 48 MiB, and how /proc names it to a process in it; None where none can be made."""
    name = f"ckptless-test-{os.getpid()}"
    for above, limit, line in (
        (CGROUPS / "memory", "memory.limit_in_bytes", f"4:memory:/{name}\n"),
        (CGROUPS, "memory.max", f"0::/{name}\n"),
    ):
        if not (above / "cgroup.procs").exists():
            continue
        try:
            (above / name).mkdir()
        except OSError:
            continue
        try:
            (above / name / limit).write_text(str(LIMIT_NBYTES))
        except OSError:
            (above / name).rmdir()
            continue
        return above / name, line
    return None


@pytest.fixture
def small_cgroup() -> Iterator[tuple[Path, str]]:
    found = made()
    if found is None:
        pytest.skip("no cgroup for memory can be made here")
    yield found
    found[0].rmdir()


def test_a_process_that_takes_too_much(tmp_path: Path, small_cgroup: tuple[Path, str]) -> None:
    folder, line = small_cgroup
    (tmp_path / "cgroup").symlink_to(CGROUPS)
    assert tree(tmp_path, line, {}) == 0
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            (folder / "cgroup.procs").write_text(str(os.getpid()))
            bytearray(4 * LIMIT_NBYTES)
        os._exit(1)  # nothing of pytest runs in the child
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert oom_kills(tmp_path / "proc", CGROUPS) == 1
