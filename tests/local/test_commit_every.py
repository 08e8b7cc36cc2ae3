"""Jobs that do not commit every step: what a fault makes them do again has the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptless.daemon.ledger.merge import Snapshot

from .localrun import FAULTY_DEADLINE_S, RANKS, Fault, fault, recovered, same_as_reference, toy

# A run has several recoveries; the first test of a kind also makes the reference run.
pytestmark = pytest.mark.timeout(400)

STEPS = 120

FAULTS = [
    # Of what was begun anew before the first commit there is only step 0.
    fault("backward", "kill", 2, 0),
    fault("update", "kill", 1, 17),
    fault("forward", "raise", 3, 36),
    fault("commit", "node", 3, 53),
    # Of the leader, and of who writes the plans.
    fault("update", "node", 0, 78),
    fault("recovered", "kill", 1, after=4),
    fault("committed", "kill", 2, 99),
]


def run(home: Path, faults: Sequence[Fault], parallel: str, **env: str) -> Snapshot:
    """Has the losses of a run that commits every step and sees no fault."""
    words = {"TOY_PARALLEL": parallel, **env}
    with toy(home, faults, spares=2, steps=STEPS, env=words) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, STEPS, RANKS, parallel)
    assert recovered(ledger)
    assert not [f for f in ledger.faults if f.kind == "stall"]
    return ledger


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_fixed_interval(tmp_path: Path, parallel: str) -> None:
    ledger = run(tmp_path, FAULTS, parallel, TOY_COMMIT_EVERY="10")
    restored = [one.restore_step for one in ledger.generations if one.restore_step is not None]
    assert len(restored) >= 5
    assert all(step % 10 == 0 or step == 1 for step in restored)
    assert {slot.every for slot in ledger.slots if slot.step} == {10}


def test_as_often_as_the_budget_allows(tmp_path: Path) -> None:
    # So little is allowed that it goes to the longest interval as soon as it has measured.
    ledger = run(
        tmp_path, FAULTS, "fsdp", TOY_COMMIT_EVERY="auto", TOY_COMMIT_BUDGET="0.0005", TOY_SLEEP_S="0.01"
    )
    assert len(ledger.generations) >= 5
    made = len((tmp_path / "out" / "loss-2.txt").read_text().splitlines())
    assert made > STEPS + 3 * len(FAULTS), "every step was committed: nothing was agreed on"


def test_ranks_that_are_told_different_intervals(tmp_path: Path) -> None:
    """One sentence names both, before a step is made; and the job does not go on trying."""
    env = {"TOY_COMMIT_EVERY": "2", "TOY_COMMIT_EVERY_1": "3"}
    with toy(tmp_path, nodes=2, steps=10, env=env) as job:
        job.ended(1)
    assert (
        "rank 1 was started with commit_every=3, and rank 0 with commit_every=2: "
        "give ckptless.run the same on every rank"
    ) in job.stderr
    assert not list((tmp_path / "out").glob("final-*.txt"))
    (row,) = job.ledger().jobs
    assert (row.state, row.exit_code) == ("failed", 1)
