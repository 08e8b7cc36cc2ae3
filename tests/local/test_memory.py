"""The memory that state is kept in: so many versions of each shard and of each of its copies, and no more."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptless.daemon.agent.versions.store import SLOTS

from .localrun import RANKS, Job, toy, wait_until

COPIES = 2
# A shard of 69 MB: 96 parameters for each of the width, and two moments of each, on four ranks.
WIDTH = 240_000
WITHIN = 0.05
DEADLINE_S = 240.0
ENV = {"TOY_PARALLEL": "fsdp", "TOY_WIDTH": str(WIDTH)}


@dataclass(frozen=True)
class Memory:
    """Bytes of all memfds, and the numbers of those that only a rank still has."""

    nbytes: int
    stray: frozenset[int]


def memory(job: Job, nodes: int) -> Memory:
    """Return what the agents have, and what their ranks map."""
    found: dict[int, int] = {}
    mapped: set[int] = set()
    agents = {pid for node in range(nodes) if (pid := job.pid_of(node, "agent"))}
    for pid in job.processes():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in maps if "/memfd:ckptless-" in line}
            for entry in Path(f"/proc/{pid}/fd").iterdir() if pid in agents else ():
                if str(entry.readlink()).startswith("/memfd:ckptless-"):
                    status = entry.stat()
                    found[status.st_ino] = status.st_blocks * 512
    return Memory(sum(found.values()), frozenset(mapped - found.keys()))


def shard_nbytes(job: Job) -> int:
    """Of one version of the largest shard, as the agents tell."""
    rows = [row for holding in job.ledger().holdings for row in holding.tensors if row[1]]
    return max((nbytes // len(steps) for _shard, steps, nbytes in rows), default=0)


def step_of(job: Job) -> int:
    """Return how far rank 0 is."""
    with contextlib.suppress(OSError, IndexError):
        return int((job.home / "out/loss-0.txt").read_text().splitlines()[-1].split()[0])
    return 0


def as_it_should_be(job: Job, nodes: int, generation: int) -> None:
    """Some steps after a recovery: (own + copies) times the versions of each, times the shard."""
    wait_until(
        lambda: job.ledger().generations[-1:] and job.ledger().generations[-1].generation >= generation,
        DEADLINE_S,
        job,
    )
    begin = step_of(job)
    wait_until(lambda: step_of(job) >= begin + SLOTS + 2, DEADLINE_S, job)

    def ratio() -> float:
        return memory(job, nodes).nbytes / ((1 + COPIES) * SLOTS * RANKS * shard_nbytes(job))

    with contextlib.suppress(AssertionError):
        wait_until(lambda: abs(ratio() - 1) <= WITHIN, DEADLINE_S / 4, job)
    found = memory(job, nodes)
    each = found.nbytes / RANKS / 1e6
    print(f"generation {generation}: {each:.1f} MB for each rank, {ratio():.3f} of the formula")
    assert abs(ratio() - 1) <= WITHIN, job.story()
    assert not found.stray, "ranks keep what their agents have given back"


def lose_node(job: Job, node: int) -> None:
    """The daemon goes first, so that nobody can say goodbye; the agent's death takes its ranks."""
    for what in ("daemon", "agent"):
        pid = job.pid_of(node, what)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def kill_rank(job: Job, rank: int) -> None:
    os.kill(int((job.home / f"out/pid-{rank}.txt").read_text().split()[0]), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_is_what_the_formula_says(tmp_path: Path) -> None:
    nodes = RANKS + 2
    with toy(tmp_path, spares=2, steps=100_000, env=ENV) as job:
        wait_until(lambda: shard_nbytes(job) > 64e6, DEADLINE_S, job)
        as_it_should_be(job, nodes, 1)
        kill_rank(job, 2)
        as_it_should_be(job, nodes, 2)
        for generation, node in ((3, 1), (4, 3)):
            lose_node(job, node)
            as_it_should_be(job, nodes, generation)
        kill_rank(job, 0)
        as_it_should_be(job, nodes, 5)
