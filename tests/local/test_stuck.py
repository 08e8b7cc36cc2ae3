"""A rank that hangs: it is named, its log has its stacks, and it alone is replaced."""

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
    assert "2 other ranks wait in a collective that it has not come to" in fault.detail, job.story()
    assert "in waits_for_ever (stuck_script.py, line" in fault.detail
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


def test_one_that_runs_is_named_and_once_it_is_seen_to_spin_replaced(tmp_path: Path) -> None:
    """At first it might be an evaluation. The longest stall would be 300 s."""
    out = tmp_path / "out"
    options = ["--job", "late", "--nodes", RANKS, "--tee", "none"]
    env = {"STUCK_AT": "45", "STUCK_SLEEP_S": "0.05"}
    with Job(tmp_path, options, [HERE / "stuck_script.py", 50, out, "spin"], env=env) as job:
        job.ended(0, DEADLINE_S)
        ledger = job.ledger()
    (late,) = [event for event in ledger.events if event.kind == "late"]
    assert re.fullmatch(
        r"no step in \d+\.\d s, where the longest took \d+\.\d s: rank 1: 2 other ranks wait in a "
        r"collective that it has not come to: it runs, or waits for a disk in waits_for_ever "
        r"\(stuck_script.py, line \d+\)",
        late.text,
    )
    (fault,) = [one for one in ledger.faults if one.kind == "hung"]
    assert fault.rank == 1
    assert fault.seen_s - late.at_s > 5.0, job.story()
    assert "it runs, and does not leave one place in waits_for_ever (stuck_script.py, line" in fault.detail


def log_of(home: Path, rank: int) -> str:
    return next((home / "state").glob(f"node-{rank}/logs/rank-{rank:05d}.log")).read_text()


@pytest.mark.parametrize(
    "kinds",
    [
        ("stopped", "interpreter", "loader", "other_collective"),
        pytest.param(
            ("interpreter_asleep", "lock", "file", "native", "child", "lock@backward"), marks=pytest.mark.slow
        ),
    ],
)
def test_who_sleeps_is_replaced_by_the_rhythm_of_the_job(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Each rank of one job hangs in turn, each in another way."""
    ranks, every = 4, 40
    hangs = {every * (number + 1): (number % ranks, kind) for number, kind in enumerate(kinds)}
    out, steps = tmp_path / "out", every * (len(kinds) + 1)
    options = ["--job", "hangs", "--nodes", ranks, "--tee", "none"]
    script = [
        HERE / "hangs_script.py",
        steps,
        out,
        ",".join(f"{at}:{rank}:{kind}" for at, (rank, kind) in hangs.items()),
    ]
    with Job(tmp_path, options, script) as job:
        job.ended(0, DEADLINE_S)
        ledger = job.ledger()
    hung = [one for one in ledger.faults if one.kind == "hung"]
    assert [one.rank for one in hung] == [rank for rank, _ in hangs.values()], job.story()
    for number, (one, kind) in enumerate(zip(hung, kinds, strict=True)):
        function = kind.partition("@")[0]
        # Where one is that is stopped py-spy may tell.
        assert kind == "stopped" or (f"in {function} (hangs_script.py, line" in one.detail) == (
            kind != "other_collective"
        ), f"{one.detail}\n{log_of(tmp_path, number % ranks)}"
        # Long before the longest stall, which is 300 s.
        began = float((out / f"hang-{every * (number + 1)}-{one.rank}").read_text())
        assert one.seen_s - began < 60.0
    assert [recovery.rung for recovery in ledger.recoveries] == ["process"] * len(kinds)
    losses = []
    for rank in range(ranks):
        lines = dict.fromkeys((out / f"loss-{rank}.txt").read_text().splitlines())
        assert [int(line.split()[0]) for line in lines] == list(range(steps)), "no step has two losses"
        losses.append(lines)
        log = log_of(tmp_path, rank)
        named = [kind.partition("@")[0] for of, kind in hangs.values() if of == rank]
        asked = [kind for kind in named if kind != "other_collective"]
        # One that is stopped writes no stacks of its own.
        assert all(f" in {kind}\n" in log for kind in asked if kind != "stopped"), log
        assert log.count("ckptless: what the kernel says of process ") == len(named), log
        # What it has to say, or why it has nothing: on a busy machine there may be no time for more.
        assert log.count("ckptless: the native stacks of process ") == len(named), log


def test_a_collective_that_all_others_have_returned_before_ends_the_job_soon(tmp_path: Path) -> None:
    """It is the script's own mistake. The longest stall would be 300 s, each time."""
    options = ["--job", "one-more", "--nodes", RANKS, "--tee", "none"]
    with Job(tmp_path, options, [HERE / "ends_script.py", 60, "one-more"]) as job:
        job.ended(4, DEADLINE_S)
        ledger = job.ledger()
    stalls = [one for one in ledger.faults if one.kind == "stall"]
    assert [one.generation for one in stalls] == [1, 2, 3, 4]
    why = (
        "2 ranks have returned from the training function, and never come: rank 1 in allreduce of 3 elements"
    )
    assert all(why in one.detail for one in stalls), job.story()
    assert why in job.stderr


def test_what_the_script_has_said_is_no_hang(tmp_path: Path) -> None:
    """Evaluations on one rank and on all, longer than the longest stall, and a slow step; then a hang."""
    out = tmp_path / "out"
    options = ["--job", "phase", "--nodes", RANKS, "--max-stall", 8, "--tee", "none"]
    script = [
        HERE / "hangs_script.py",
        100,
        out,
        "40:1:evaluation,60:0:together,60:1:together,60:2:together,80:2:too_long",
    ]
    with Job(tmp_path, options, script) as job:
        job.ended(0, DEADLINE_S)
        ledger = job.ledger()
    faults = [one for one in ledger.faults if one.kind not in ("broken", "exit")]
    assert [(fault.kind, fault.rank) for fault in faults] == [("hung", 2)], job.story()
    (fault,) = faults
    assert "(phase too long, longer than the script has said)" in fault.detail
