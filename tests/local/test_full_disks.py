"""Nodes whose disk takes nothing any more: the job goes on, says so once, and they vote again after."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.ckptlessd.state_dir import FORMAT_FILE, STATE_FORMAT

from .localrun import RANKS, Job, read_toy, same_as_reference, toy, wait_until

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts small file systems"),
]

# Of each wait, which ends as soon as what it waits for is there: enough for a machine with much else to do.
DEADLINE_S = 180.0
# A step takes so long at first. A voter may find out only after 10 s that its disk is full.
SLEEP_S = "2"


@contextlib.contextmanager
def small_disks(home: Path, nodes: int) -> Iterator[list[Path]]:
    """State directories for a run, each on a disk of its own; logs are elsewhere, as on a cluster."""
    mounted: list[Path] = []
    state = home / "state"
    for folder in (state, home / "logs"):
        folder.mkdir()
    (state / FORMAT_FILE).write_text(f"{STATE_FORMAT}\n")
    try:
        for node in range(nodes):
            disk = state / f"node-{node}"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", disk], check=True)
            mounted.append(disk)
            (disk / FORMAT_FILE).write_text(f"{STATE_FORMAT}\n")
            logs = home / "logs" / f"node-{node}"
            logs.mkdir()
            (disk / "logs").symlink_to(logs)
            for name in ("daemon.log", "agent.log"):
                (disk / name).symlink_to(logs / name)
        yield [state / f"node-{node}" for node in range(nodes)]
    finally:
        for folder in reversed(mounted):
            subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def free(disk: Path) -> None:
    (disk / "filler").unlink()


def ckptctl(job: Job, *words: str) -> Any:
    program = "from ckptless.daemon.ckptctl.main import main; main()"
    command = [sys.executable, "-c", program, "--state-dir", str(job.state_dir), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return json.loads(done.stdout)


def newest(job: Job) -> tuple[int, int]:
    """(generation, step): the newest step that every rank has made, and the newest generation that trains."""
    found = read_toy(job.home / "out")
    steps = [max((s for r, s in found.losses if r == rank), default=0) for rank in range(RANKS)]
    return max(found.generations, default=0), min(steps)


def trains_on(job: Job, generation: int) -> None:
    wait_until(lambda: newest(job)[0] >= generation, DEADLINE_S, job)
    start = newest(job)[1]
    wait_until(lambda: newest(job)[1] > start, DEADLINE_S, job)


def told(job: Job, kind: str) -> list[str]:
    return [event.text for event in job.ledger().events if event.kind == kind]


def log_of(job: Job, node: int) -> str:
    return (job.home / "logs" / f"node-{node}" / "daemon.log").read_text()


def kill(job: Job, node: int, *what: str) -> None:
    for one in what:
        pid = job.pid_of(node, one)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def kill_rank(job: Job, rank: int) -> Path:
    """Return what of /proc is gone once it is dead, and no zombie either."""
    pid = (job.home / "out" / f"pid-{rank}.txt").read_text().split()[0]
    os.kill(int(pid), signal.SIGKILL)
    return Path("/proc") / pid


@contextlib.contextmanager
def slow_toy(home: Path, spares: int) -> Iterator[tuple[Job, Path]]:
    """Slow for as long as the second is there: the end shall not come before the last fault."""
    slow = home / "slow"
    slow.touch()
    with toy(home, spares=spares, env={"TOY_SLEEP_S": SLEEP_S, "TOY_SLEEP_WHILE": str(slow)}) as job:
        yield job, slow


def full_then_dead(home: Path, full: int, dead: int) -> None:
    """The disk of one node is full, then another node dies; then the disk is freed."""
    with small_disks(home, RANKS + 1) as disks, slow_toy(home, 1) as (job, slow):
        trains_on(job, 1)
        fill(disks[full])
        wait_until(lambda: told(job, "vote-lost"), DEADLINE_S, job)
        (voteless,) = ckptctl(job, "status")["voteless"]
        assert f"node-{full} cannot vote: " in voteless
        assert "database or disk is full" in voteless
        kill(job, dead, "agent", "daemon")
        trains_on(job, 2)
        assert told(job, "vote-again") == []
        free(disks[full])
        wait_until(lambda: told(job, "vote-again"), DEADLINE_S, job)
        assert ckptctl(job, "status")["voteless"] == []
        kill_rank(job, 2)
        trains_on(job, 3)
        slow.unlink()
        job.ended(0, DEADLINE_S)
        ledger = same_as_reference(job, [])
        log = log_of(job, full)
    kinds = [event.kind for event in ledger.events]
    assert (kinds.count("vote-lost"), kinds.count("vote-again")) == (1, 1)
    assert log.count("it is tried again, and until then nothing is voted for here") == 1
    assert log.count("can be written again") == 1
    assert log.count(" vote-lost: ") == log.count(" vote-again: ") == 1
    assert "Traceback" not in log
    assert ledger.generations[-1].places[dead] == (RANKS, 0)


def test_the_leaders_disk_is_full_and_another_node_dies(tmp_path: Path) -> None:
    """Node 0, which is the batch host's place on a cluster, too."""
    full_then_dead(tmp_path, 0, 1)


@pytest.mark.slow
def test_a_followers_disk_is_full_and_the_leader_dies(tmp_path: Path) -> None:
    full_then_dead(tmp_path, 3, 0)


@pytest.mark.slow
def test_all_disks_are_full(tmp_path: Path) -> None:
    """Training goes on; a recovery waits until most of them take votes again."""
    with small_disks(tmp_path, RANKS) as disks, slow_toy(tmp_path, 0) as (job, slow):
        trains_on(job, 1)
        for disk in disks:
            fill(disk)
        for node in range(RANKS):
            wait_until(lambda n=node: " vote-lost: " in log_of(job, n), DEADLINE_S, job)  # type: ignore[misc]
        trains_on(job, 1)
        dead = kill_rank(job, 2)
        wait_until(lambda: not dead.exists(), DEADLINE_S, job)
        wait_until(lambda: any(": died: " in log_of(job, n) for n in range(RANKS)), DEADLINE_S, job)
        assert newest(job)[0] == 1
        for disk in disks[1:]:
            free(disk)
        trains_on(job, 2)
        free(disks[0])
        slow.unlink()
        job.ended(0, DEADLINE_S)
        same_as_reference(job, [])
