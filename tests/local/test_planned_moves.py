"""Whoever dies while ranks are about to move to a spare: the job goes on, and no bit is another."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .localrun import Job, fault, lose_node, read_toy, same_as_reference, toy, wait_until
from .test_evict import DEADLINE_S, evict, told, trains

# The rank that leaves is on node 1, and node 4 is the spare that it goes to.
LEAVES, STAYS, SPARE = 1, 2, 4
STEPS = 100


def slot_of(job: Job, node: int) -> tuple[str, int | None]:
    """The phase of a node's slot, and its process, as the ledger has them."""
    return next(((slot.phase, slot.pid) for slot in job.ledger().slots if slot.node == node), ("", None))


def kill(job: Job, node: int, whole: bool) -> None:
    """Kill the node's process of a rank, or all of the node; return once that is known."""
    before = slot_of(job, node)
    if whole:
        lose_node(job, node)
        wait_until(lambda: told(job, "node-lost"), DEADLINE_S, job)
    else:
        assert before[1] is not None
        os.kill(before[1], signal.SIGKILL)
        wait_until(lambda: slot_of(job, node) != before, DEADLINE_S, job)


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.slow), True], ids=["rank", "node"])
@pytest.mark.parametrize(
    "who", [SPARE, LEAVES, pytest.param(STAYS, marks=pytest.mark.slow)], ids=["spare", "leaves", "stays"]
)
@pytest.mark.parametrize(
    ("where", "phase", "parallel"), [("build", "preparing", "ddp"), ("commit", "prepared", "fsdp")]
)
def test_one_dies_in_the_middle(
    tmp_path: Path, where: str, phase: str, parallel: str, who: int, whole: bool
) -> None:
    """While the spare builds; and once it has, and waits for the commit that it is to be given."""
    slow, hold = tmp_path / "slow", tmp_path / "out" / "hold"
    slow.touch()
    env = {"TOY_SLEEP_S": "0.1", "TOY_SLEEP_WHILE": str(slow), "TOY_PARALLEL": parallel}
    holds = fault(where, "hold", LEAVES, often=True)
    with toy(tmp_path, [holds], spares=2, steps=STEPS, env=env) as job:
        trains(job, 1)
        hold.touch()
        assert evict(job, f"node-{LEAVES}", "--planned")[1]["verdict"] == "accepted"
        wait_until(lambda: slot_of(job, SPARE)[0] == phase, DEADLINE_S, job)
        kill(job, who, whole)
        hold.unlink()
        wait_until(lambda: job.pid_of(LEAVES, "agent") is None, DEADLINE_S, job)
        trains(job, max(read_toy(job.home / "out").generations))
        slow.unlink()
        job.ended(0, 150.0)
        ledger = same_as_reference(job, [], STEPS, parallel=parallel)
    nodes = {node for node, _ in ledger.generations[-1].places}
    assert LEAVES not in nodes
    if who == SPARE:
        # The other spare is prepared in its place.
        assert [text.split()[0] for text in told(job, "prepares")] == ["node-4", "node-5"]
        assert "; where they go there is step" in told(job, "leaves")[0]
    assert not whole or who not in nodes
