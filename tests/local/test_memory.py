"""The memory that state is kept in: so many versions of each shard and of each of its copies, and no more."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.agent.versions.store import SLOTS
from ckptless.daemon.protocol.version import header_nbytes
from ckptless.daemon.replication.footprint import Load, Shape

from .localrun import HERE, RANKS, Job, lose_node, toy, wait_until

COPIES = 2
# A shard of 69 MB: 96 parameters for each of the width, and two moments of each, on four ranks.
WIDTH = 240_000
WITHIN = 0.05
DEADLINE_S = 240.0
ENV = {"TOY_PARALLEL": "fsdp", "TOY_WIDTH": str(WIDTH)}
# A shard of 11.5 MB; two nodes of two ranks each.
SMALL = {"TOY_PARALLEL": "fsdp", "TOY_WIDTH": "40000"}
NODES, PER_NODE = 2, 2


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
            if pid in agents:
                found |= memfds(pid)
    return Memory(sum(found.values()), frozenset(mapped - found.keys()))


def memfds(pid: int) -> dict[int, int]:
    """Return the bytes that an agent's memfds take, by their numbers."""
    found: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("/memfd:ckptless-"):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * 512
    return found


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


@pytest.mark.parametrize(("nodes", "copies"), [(2, 1), (4, 1), (4, 2)])
def test_an_agent_holds_what_was_planned(tmp_path: Path, nodes: int, copies: int) -> None:
    per_node = RANKS // nodes
    words: dict[str, Any] = {"steps": 100_000, "env": SMALL, "options": ["--replicas", copies]}
    with toy(tmp_path, nodes=nodes, per_node=per_node, **words) as job:
        wait_until(lambda: shard_nbytes(job) > 11e6 and step_of(job) > SLOTS + 2, DEADLINE_S, job)
        version_nbytes = shard_nbytes(job)
        state_nbytes = (version_nbytes - header_nbytes(version_nbytes)) * RANKS
        planned = Shape(RANKS, per_node, RANKS, copies, state_nbytes)
        assert set(planned.loads) == {Load(per_node, copies * per_node, copies * per_node)}

        def ratios() -> list[float]:
            pids = [job.pid_of(node, "agent") or 0 for node in range(nodes)]
            return [sum(memfds(pid).values()) / planned.node_nbytes for pid in pids]

        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(abs(one - 1) <= WITHIN for one in ratios()), DEADLINE_S / 4, job)
        found = ratios()
        print(f"{nodes} nodes, {copies} copies: {[f'{one:.4f}' for one in found]} of the plan on each node")
        assert all(abs(one - 1) <= WITHIN for one in found), job.story()


@pytest.mark.parametrize("left_nbytes", [30_000_000, 100_000_000])
def test_too_little_memory_ends_the_job_with_one_sentence(tmp_path: Path, left_nbytes: int) -> None:
    """Before the first step where the parameters alone are too much, else once the moments are there."""
    launcher = (str(HERE / "poor_launcher.py"), str(left_nbytes))
    with toy(tmp_path, nodes=NODES, per_node=PER_NODE, env=SMALL, launcher=launcher) as job:
        job.ended(2)
        assert step_of(job) == (0 if left_nbytes == 30_000_000 else 1)
        (line,) = [line for line in job.stderr.splitlines() if "too little memory" in line]
        assert "take fewer replicas (--replicas, now 2)" in line
        assert "Traceback" not in job.stderr
        assert [one.generation for one in job.ledger().generations] == [1], job.story()


def test_a_node_with_just_enough_memory_trains(tmp_path: Path) -> None:
    """Three slots of four shards of 11.6 MB."""
    launcher = (str(HERE / "poor_launcher.py"), str(SLOTS * NODES * PER_NODE * 11_700_000))
    with toy(tmp_path, nodes=NODES, per_node=PER_NODE, steps=8, env=SMALL, launcher=launcher) as job:
        job.ended(0)
