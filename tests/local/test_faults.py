"""Every kind of fault at every place: the job goes on, and every loss is that of a run without faults."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .localrun import FAULTY_DEADLINE_S, RANKS, STEPS, Fault, Shape, check, fault, same_as_reference, toy

# A run has dozens of recoveries; the first test also makes the reference run.


def test_processes_at_every_place(tmp_path: Path) -> None:
    places = ("forward", "backward", "update", "commit", "committed")
    faults = [
        # Before anything is committed: in the first build, and in the first step, twice.
        fault("build", "kill", 0, generation=1),
        fault("forward", "kill", 2, 0),
        # Batch norm has counted its first batch; the parameters stand as they were built.
        fault("backward", "kill", 3, 0),
        fault("update", "kill", 1, 0),
        *(fault(place, "kill", n % RANKS, 4 * n + 4) for n, place in enumerate(places)),
        fault("recovered", "kill", 3, after=5),
        fault("forward", "stop", 1, 28),
        fault("backward", "stop", 0, 32),
        fault("committed", "stop", 2, 36),
        fault("forward", "raise", 3, 40),
        fault("backward", "raise", 0, 44),
        fault("update", "raise", 1, 48),
        fault("committed", "raise", 2, 52),
        fault("update", "exit", 3, 56),
        fault("forward", "exit", 0, 60),
        # Two at once, of one kind and of two.
        fault("forward", "kill", 1, 64),
        fault("forward", "kill", 2, 64),
        fault("update", "kill", 0, 68),
        fault("update", "raise", 3, 68),
        # All at once.
        *(fault("commit", "kill", rank, 72) for rank in range(RANKS)),
        fault("finish", "kill", 1, STEPS),
        fault("finish", "raise", 2, STEPS),
    ]
    kinds = check(tmp_path, faults, shape=Shape(overlap="on"))
    assert kinds["died"] >= 12
    assert kinds["hung"] >= 3
    assert kinds["raised"] >= 5
    assert kinds["node-lost"] == 0


PHASES = ("leave", "enter", "build", "restore", "recovered", "forward", "update")


def in_phases(kind: str, phases: tuple[str, ...], first: int) -> list[Fault]:
    """For each phase a rank's death, and a fault of `kind` in the recovery from it."""
    faults: list[Fault] = []
    for n, phase in enumerate(phases):
        victim = n % RANKS
        # Only the process that takes over builds; the other phases are a survivor's.
        struck = victim if phase == "build" else (victim + 1 + n % 3) % RANKS
        faults.append(fault("forward", "kill", victim, first + 7 * n))
        faults.append(fault(phase, kind, struck, after=first_index(faults)))
    return faults


def first_index(faults: list[Fault]) -> int:
    return len(faults) - 1


def offset(faults: list[Fault], by: int) -> list[Fault]:
    """The same faults behind `by` others."""
    return [{**f, "after": f["after"] + by} if "after" in f else f for f in faults]


def test_processes_in_every_phase_of_a_recovery(tmp_path: Path) -> None:
    faults: list[Fault] = []
    for kind in ("kill", "stop", "raise"):
        faults += offset(in_phases(kind, PHASES, 3 + 7 * len(PHASES) * (len(faults) // 14)), len(faults))
    # A newcomer that is struck while it takes its state, and once more in the recovery from that.
    faults.append(fault("forward", "kill", 1, 154))
    faults.append(fault("restore", "kill", 1, after=len(faults) - 1))
    faults.append(fault("restore", "kill", 1, after=len(faults) - 1))
    kinds = check(tmp_path, faults)
    assert kinds["died"] >= 21
    assert kinds["hung"] >= 7
    assert kinds["node-lost"] == 0


def test_a_generation_that_ends_while_its_process_is_forked(tmp_path: Path) -> None:
    faults: list[Fault] = []
    for n in range(10):
        faults.append(fault("forward", "kill", 1, 3 + 4 * n))
        faults.append(fault("enter", "raise", 3, after=first_index(faults)))
    kinds = check(tmp_path, faults)
    assert kinds["died"] == kinds["raised"] == 10


def test_nodes_in_the_phases_stop_and_join(tmp_path: Path) -> None:
    kinds = check(tmp_path, in_phases("node", ("leave", "enter", "build"), 5), spares=3)
    assert kinds["node-lost"] == 3


def test_nodes_in_the_phases_restore_and_first_step(tmp_path: Path) -> None:
    kinds = check(tmp_path, in_phases("node", ("restore", "recovered", "update"), 5), spares=3)
    assert kinds["node-lost"] == 3


def test_nodes_before_the_first_commit_and_two_at_once(tmp_path: Path) -> None:
    faults = [
        # Rank 0 is on the leader's node.
        fault("forward", "node", 0, 0),
        fault("update", "node", 2, 20),
        fault("update", "node", 3, 20),
        # A spare's process dies before it is wanted.
        fault("import", "kill", -1),
    ]
    assert check(tmp_path, faults, spares=3)["node-lost"] == 3


@pytest.mark.slow
def test_more_spares_than_nodes_that_train(tmp_path: Path) -> None:
    faults = [fault("forward", "node", 0, 20), fault("update", "node", 2, 40)]
    shape = Shape(nodes=1, per_node=4, steps=60)
    assert check(tmp_path, faults, spares=2, shape=shape)["node-lost"] == 2


def test_a_rack_with_the_leader_and_the_next_two_nodes_on_the_ring(tmp_path: Path) -> None:
    """Without domains nodes 1 and 2 would have the only copies of rank 0's record."""
    faults = [fault("update", "node", rank, 20) for rank in range(3)]
    options = ("--domains", "a,a,a,b,b,b,b")
    assert check(tmp_path, faults, spares=3, options=options)["node-lost"] >= 1


def test_the_leaders_node_and_nodes_at_the_end(tmp_path: Path) -> None:
    faults = [
        fault("commit", "node", 0, 10),
        fault("committed", "node", 1, 20),
        fault("finish", "node", 3, STEPS),
    ]
    assert check(tmp_path, faults, spares=3)["node-lost"] == 3


def test_two_ranks_on_each_node(tmp_path: Path) -> None:
    faults = [
        fault("update", "kill", 1, 10),
        fault("forward", "kill", 2, 20),
        fault("forward", "kill", 3, 20),
        # Rank 2 writes the tensors of its node.
        fault("commit", "node", 2, 30),
        fault("backward", "kill", 3, 40),
    ]
    with toy(tmp_path, faults, nodes=2, per_node=2, spares=1) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults)
    places = [g.places for g in ledger.generations]
    assert places[0] == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert places[-1] == ((0, 0), (0, 1), (2, 0), (2, 1))


CGROUPS = Path("/sys/fs/cgroup")
# Four ranks, and what starts and watches them, take a third of it.
LIMIT_NBYTES = 4 << 30


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """A cgroup with a limit, in which this process is while it starts others; skips where it may not."""
    old = re.search(r"^\d+:memory:/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    above, limit = (CGROUPS / "memory", "memory.limit_in_bytes") if old else (CGROUPS, "memory.max")
    back = above / (old.group(1) if old else "")
    folder = above / f"ckptless-faults-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        try:
            (folder / limit).write_text(str(LIMIT_NBYTES))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            pytest.skip(f"no cgroup for memory here: {error}")
        try:
            yield
        finally:
            (back / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        folder.rmdir()


def test_a_rank_takes_more_memory_than_there_is(tmp_path: Path) -> None:
    """The kernel ends it, and the event says why."""
    faults = [fault("forward", "eat", 2, 9)]
    with little_memory(), toy(tmp_path, faults) as job:
        job.ended(0)
        ledger = same_as_reference(job, faults)
    (died,) = (event.text for event in ledger.events if event.kind == "died")
    assert died.startswith("rank 2 on node-2 ")
    assert died.endswith(
        "was ended by SIGKILL, out of memory (OOM): the kernel has ended a process of this cgroup for that"
    )
