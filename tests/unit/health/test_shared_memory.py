"""Shared memory of a node: what /dev/shm has, what is left over in it, and whether memfds can be had."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptless.daemon.ckptlessd.health import shared_memory as module
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe
from ckptless.daemon.ckptlessd.health.shared_memory import SharedMemoryProbe

DEADLINE_S = 30
GIB = 1 << 30
PAGE = 4096
SHM = Path("/dev/shm")


def probe(folder: Path, jobs: bool = True, shm: Path = SHM) -> SharedMemoryProbe:
    return SharedMemoryProbe(lambda: jobs, shm, folder)


def kernel(folder: Path, overcommit: str = "0", noexec: str = "", limit: int = 0, used: int = 0) -> None:
    (folder / "sys/vm").mkdir(parents=True)
    (folder / "sys/vm/overcommit_memory").write_text(f"{overcommit}\n")
    if noexec:
        (folder / "sys/vm/memfd_noexec").write_text(f"{noexec}\n")
    lines = (
        f"MemTotal:  4000000 kB\nHugePages_Total:  0\nCommitLimit:  {limit} kB\nCommitted_AS:  {used} kB\n"
    )
    (folder / "meminfo").write_text(lines)


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What /dev/shm and the node have, in bytes."""
    world = {"size": 32 * GIB, "free": 32 * GIB, "memory": 64 * GIB}

    def statvfs(path: Path) -> SimpleNamespace:
        assert path == SHM
        blocks, free = world["size"] // PAGE, world["free"] // PAGE
        return SimpleNamespace(
            f_frsize=PAGE, f_blocks=blocks, f_bfree=free, f_bavail=free, f_files=9, f_favail=9
        )

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(module, "_memory_nbytes", lambda: world["memory"])
    return world


def test_it_is_a_probe(tmp_path: Path) -> None:
    one: Probe = probe(tmp_path)
    assert (one.interval_s, one.deadline_s, one.missing()) == (60.0, 10.0, "")
    one.close()


@pytest.mark.parametrize(
    ("world", "jobs", "code", "evidence"),
    [
        ({}, False, "", ""),
        ({"size": GIB, "free": GIB}, True, "", ""),
        ({"size": 64 << 20, "free": 64 << 20}, True, "shared-memory-small", "its size is 67.1 MB"),
        # Half of a small node's memory is what the kernel gives.
        ({"size": GIB // 2, "free": GIB // 2, "memory": GIB}, True, "", ""),
        ({"free": 0}, True, "shared-memory", "0 MiB of 32768 MiB are free"),
        # Jobs may use it; what is there without one is nobody's.
        ({"free": 22 * GIB}, True, "", ""),
        ({"free": 26 * GIB}, False, "", ""),
        (
            {"free": 22 * GIB},
            False,
            "shared-memory-left-over",
            "10.7 GB of the memory's 68.7 GB are used",
        ),
    ],
)
def test_the_mount(
    tmp_path: Path, sized: dict[str, int], world: dict[str, int], jobs: bool, code: str, evidence: str
) -> None:
    sized.update(world)
    expected = [Finding(code=code, where="/dev/shm", evidence=evidence)] if code else []
    one = probe(tmp_path, jobs)
    assert [one.look(), one.look()] == [expected, expected]


def test_a_node_without_it(tmp_path: Path) -> None:
    found = probe(tmp_path, shm=tmp_path / "shm").look()
    assert [(one.code, one.evidence) for one in found] == [("shared-memory-small", "it is not there")]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "shm"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "ckptless-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, timeout=DEADLINE_S).returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    assert subprocess.run(["umount", "-l", str(place)], timeout=DEADLINE_S).returncode == 0


def test_a_real_one_of_a_container(tmp_path: Path, small: Path) -> None:
    one = probe(tmp_path, shm=small)
    assert [(f.code, f.evidence) for f in one.look()] == [("shared-memory-small", "its size is 67.1 MB")]
    with pytest.raises(OSError, match="No space left"):
        (small / "nccl-x").write_bytes(bytes(65 << 20))
    assert [f.code for f in one.look()] == ["shared-memory", "shared-memory-small"]


# ------------------------------------------------------------------------------------ memfds


@pytest.mark.parametrize(
    ("overcommit", "used", "found"),
    [("0", 4000000, False), ("1", 4000000, False), ("2", 3600000, False), ("2", 3600001, True)],
)
def test_pages_that_are_counted(
    tmp_path: Path, sized: dict[str, int], overcommit: str, used: int, found: bool
) -> None:
    kernel(tmp_path, overcommit, limit=4000000, used=used)
    seen = probe(tmp_path).look()
    words = "3.7 GB of 4.1 GB are promised, and vm.overcommit_memory is 2"
    assert seen == ([Finding(code="memfd", where="CommitLimit", evidence=words)] if found else [])


@pytest.mark.parametrize(
    ("code", "noexec", "words"),
    [
        (errno.EACCES, "2", "memfd_create: Permission denied (vm.memfd_noexec is 2)"),
        (errno.ENOSYS, "", "memfd_create: Function not implemented"),
    ],
)
def test_a_kernel_that_makes_none(
    tmp_path: Path,
    sized: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    noexec: str,
    words: str,
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(code, os.strerror(code))

    kernel(tmp_path, noexec=noexec)
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert probe(tmp_path).look() == [Finding(code="memfd", evidence=words)]


def test_this_machine_can_be_looked_at_and_nothing_stays_open() -> None:
    one = SharedMemoryProbe(lambda: True)
    one.look()
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert {f.code for f in one.look()} <= {"shared-memory", "shared-memory-small", "memfd"}
    assert len(list(Path("/proc/self/fd").iterdir())) == before
