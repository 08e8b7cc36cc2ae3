"""A rank that waits for what never comes: it is named, its log has its stacks, and it alone is replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .localrun import HERE, Job

RANKS, STEPS = 3, 12
DEADLINE_S = 90.0


@pytest.mark.parametrize("how", ["event", "spin", pytest.param("backward", marks=pytest.mark.slow)])
def test_the_rank_that_holds_all_up_is_named(tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    options = ["--job", "stuck", "--nodes", RANKS, "--max-stall", 8, "--tee", "none"]
    with Job(tmp_path, options, [HERE / "stuck_script.py", STEPS, out, how]) as job:
        job.ended(0, DEADLINE_S)
        ledger = job.ledger()
    (fault,) = [one for one in ledger.faults if one.kind not in ("broken", "exit")]
    assert (fault.kind, fault.rank) == ("hung", 1), job.story()
    if how != "spin":
        assert "2 other ranks wait in a collective that it has not come to" in fault.detail, job.story()
    pids = [len(set((out / f"pids-{rank}.txt").read_text().split())) for rank in range(RANKS)]
    assert pids == [1, 2, 1], job.story()
    (recovery,) = ledger.recoveries
    assert recovery.rung == "process"
    (log,) = (tmp_path / "state").glob("node-1/logs/rank-00001.log")
    text = log.read_text()
    assert "most recent call first" in text, text
    assert "waits_for_ever" in text, text
    for rank in range(RANKS):
        lines = (out / f"loss-{rank}.txt").read_text().splitlines()
        assert [int(line.split()[0]) for line in dict.fromkeys(lines)] == list(range(STEPS)), lines


def test_it_is_named_by_the_rhythm_of_the_job_long_before(tmp_path: Path) -> None:
    """Nothing is done about it until then: it might be an evaluation."""
    out = tmp_path / "out"
    options = ["--job", "late", "--nodes", RANKS, "--max-stall", 25, "--tee", "none"]
    env = {"STUCK_AT": "35", "STUCK_SLEEP_S": "0.3"}
    with Job(tmp_path, options, [HERE / "stuck_script.py", 40, out, "event"], env=env) as job:
        job.ended(0, DEADLINE_S)
        ledger = job.ledger()
    (late,) = [event for event in ledger.events if event.kind == "late"]
    assert re.fullmatch(
        r"no step in \d+ s, where the longest took \d+\.\d s: rank 1; 2 other ranks wait for it", late.text
    )
    (fault,) = [one for one in ledger.faults if one.kind == "hung"]
    assert fault.rank == 1
    assert fault.seen_s - late.at_s > 5.0, job.story()
