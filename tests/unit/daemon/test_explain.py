"""`ckptctl explain`: how a job stands and why, what happened to it, and what to do, from a ledger's rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ledger.event_kinds import KINDS
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.records import (
    PHASES,
    EventRecord,
    FaultRecord,
    GenerationRecord,
    JobRecord,
    Record,
    RecoveryRecord,
    SlotRecord,
    Subject,
)

# A day and an hour whose local time does not matter to any of this.
BEGAN_S = datetime(2026, 11, 20, 3, 0, 0).timestamp()
JOB = JobRecord(
    job="4711",
    command=("train.py",),
    world_size=2,
    nodes=2,
    spares=1,
    state="running",
    started_s=BEGAN_S,
)


def generation(number: int, after_s: float, *, faults: tuple[str, ...] = ()) -> GenerationRecord:
    return GenerationRecord(
        job="4711",
        generation=number,
        places=((0, 0), (1, 0)),
        restore_step=None if number == 1 else 40,
        rung="start" if number == 1 else "process",
        faults=faults,
        leader=0,
        agreed_s=BEGAN_S + after_s,
    )


def event(
    kind: str, after_s: float, text: str, *, level: Any = "warning", in_generation: int = 1, node: int = 0
) -> EventRecord:
    return EventRecord(
        event=f"{kind}.{after_s}",
        job="4711",
        node=node,
        at_s=BEGAN_S + after_s,
        level=level,
        kind=kind,
        generation=in_generation,
        text=text,
        about=Subject(node=node),
    )


FAULT = FaultRecord(
    fault="g1.t1.1",
    job="4711",
    kind="died",
    node=1,
    slot=0,
    rank=1,
    generation=1,
    detail="was ended by SIGKILL",
    seen_s=BEGAN_S + 719,
)
RECOVERY = RecoveryRecord(
    job="4711",
    generation=2,
    rung="process",
    faults=("g1.t1.1",),
    restore_step=40,
    started_s=BEGAN_S + 719,
    phases=dict(zip(PHASES, (0.01, 0.02, 0.0, 0.01, 0.3, 0.1, 0.06), strict=True)),
    outcome="recovered",
)
DIED = event("died", 720, "rank 1 on node02 (slot 0, pid 77) was ended by SIGKILL", node=1)
# It trains since 03:00:03, and at 03:12 rank 1 died.
TRAINS = (
    JOB,
    generation(1, 1),
    event("agent-up", 0.5, "up", level="info"),
    event("trains", 3, "generation 1 trains", level="info"),
)
RECOVERED = (*TRAINS, FAULT, RECOVERY, DIED, generation(2, 719.2, faults=("g1.t1.1",)))


def asked(tmp_path: Path, rows: Sequence[Record], *words: str) -> Result:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.write(rows)
    return CliRunner().invoke(ckptctl, ["--state-dir", str(tmp_path), "explain", *words])


def as_json(tmp_path: Path, rows: Sequence[Record], *words: str) -> Any:
    result = asked(tmp_path, rows, "--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def state(tmp_path: Path, *rows: Record) -> str:
    return str(as_json(tmp_path, rows)["state"]["text"])


def test_a_job_that_waits_for_nodes_says_for_which(tmp_path: Path) -> None:
    forming = structs.replace(JOB, state="forming", reason="waiting for node03, node04")
    assert "has not begun, for " in state(tmp_path, forming)
    assert state(tmp_path, forming).endswith(": waiting for node03, node04.")


def test_a_job_that_trains(tmp_path: Path) -> None:
    slot = SlotRecord(
        job="4711",
        node=0,
        slot=0,
        rank=0,
        generation=1,
        pid=7,
        phase="restored",
        step=812,
        loss=None,
        updated_s=BEGAN_S + 9,
    )
    spare = structs.replace(slot, node=2, rank=None, step=None)
    text = state(tmp_path, *TRAINS, slot, spare)
    assert text == "job 4711 trains since 2026-11-20 03:00:03.000, 2 ranks, step 812; 1 slots are spare."


def test_a_job_that_recovers_says_since_what_and_what_comes_next(tmp_path: Path) -> None:
    running = structs.replace(RECOVERY, outcome=None, phases={"detect": 0.01, "stop": 0.02})
    waits = event("waits-for-node", 730, "no spare left for rank 1; it waits 300 s for another node")
    text = state(tmp_path, *TRAINS, FAULT, DIED, running, waits)
    assert "since rank 1 on node02 (slot 0, pid 77) was ended by SIGKILL; it is at: leave." in text
    assert text.endswith("it waits 300 s for another node.")


def test_a_job_that_is_over_says_why(tmp_path: Path) -> None:
    over = structs.replace(
        JOB, state="failed", ended_s=BEGAN_S + 60, exit_code=4, reason="no spare left for rank 1"
    )
    assert state(tmp_path, over, generation(1, 1)).endswith("exit code 4: no spare left for rank 1.")


def test_the_story_has_each_recovery_with_its_rows(tmp_path: Path) -> None:
    found = as_json(tmp_path, RECOVERED)
    texts = [one["text"] for one in found["story"]]
    assert texts[0] == "The job began, on 2 nodes and 1 spares."
    assert texts[1] == "2 ranks began, from the beginning; all had made a step 3.0 s after its begin."
    assert texts[2] == (
        "Rank 1 on node02 (slot 0, pid 77) was ended by SIGKILL. The job went on from step 40 after 0.50 s "
        "(most of it join, 300 ms), with a new process on the same node."
    )
    assert found["story"][2]["evidence"] == ["fault g1.t1.1", "generation 2"]
    assert [one["at_s"] for one in found["story"]] == sorted(one["at_s"] for one in found["story"])


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("superseded", "Before the job went on, after 0.50 s, something else came."),
        ("failed", "There was no way to go on."),
        (None, "The job has not gone on yet."),
    ],
)
def test_a_recovery_that_did_not_lead_on(tmp_path: Path, outcome: str | None, words: str) -> None:
    rows = (*TRAINS, FAULT, DIED, structs.replace(RECOVERY, outcome=outcome))
    assert as_json(tmp_path, rows)["story"][-1]["text"].endswith(words)


def test_a_fault_that_the_story_does_not_have_is_told_from_its_own_row(tmp_path: Path) -> None:
    found = as_json(tmp_path, (*TRAINS, FAULT, RECOVERY))
    assert found["story"][-1]["text"].startswith("Died on node-1: was ended by SIGKILL. ")
    found = as_json(
        tmp_path, (structs.replace(RECOVERY, faults=("lost",), generation=3, started_s=BEGAN_S + 800),)
    )
    assert "A fault that is not recorded here" in found["story"][-1]["text"]


def test_a_node_that_took_no_rank_with_it_is_told_of(tmp_path: Path) -> None:
    lost = event("node-lost", 50, "node-2 (node03, no rank) is lost: Slurm has it down (slurm)", node=2)
    texts = [one["text"] for one in as_json(tmp_path, (*TRAINS, lost))["story"]]
    assert texts[-1] == "Node-2 (node03, no rank) is lost: Slurm has it down (slurm)."


def test_what_there_is_to_do_is_told_once_for_each_kind(tmp_path: Path) -> None:
    waited = [event("commit-waited", at, f"rank 1 waited {at} s") for at in (10, 20, 30)]
    fine = event("node-returned", 40, "node-1 is heard again")
    found = as_json(tmp_path, (*TRAINS, *waited, fine))["advice"]
    assert [(one["kind"], one["often"], one["text"]) for one in found] == [
        ("commit-waited", 3, "rank 1 waited 30 s")
    ]
    assert found[0]["to_do"] == KINDS["commit-waited"].to_do
    shown = asked(tmp_path, ()).stdout
    assert "commit-waited, 3 times, the last at 2026-11-20 03:00:30.000: rank 1 waited 30 s" in shown
    assert f"To do: {KINDS['commit-waited'].to_do}." in shown


@pytest.mark.parametrize("at", ["2026-11-20T03:12", "2026-11-20 03:11:30"])
def test_only_what_happened_then(tmp_path: Path, at: str) -> None:
    found = as_json(tmp_path, RECOVERED, "--at", at)
    assert [one["evidence"][0] for one in found["story"]] == ["fault g1.t1.1"]
    nothing = asked(tmp_path, (), "--at", "2026-11-20T05:00")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "nothing is recorded of job 4711 within a minute of 2026-11-20 05:00:00.000" in nothing.stderr


def test_a_time_of_day_is_the_latest_there_was(tmp_path: Path) -> None:
    asked(tmp_path, RECOVERED)
    for text in ("03:12", "03:12:30"):
        result = asked(tmp_path, (), "--at", text)
        assert result.exit_code == 0
    for text in ("3 o'clock", "25:00", "", "2026-13-40T00:00"):
        result = asked(tmp_path, (), "--at", text)
        assert (result.exit_code, "a time is 03:12" in result.stderr) == (2, True), text


def test_a_kind_is_explained_without_a_job() -> None:
    result = CliRunner().invoke(ckptctl, ["explain", "--kind", "hung"])
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, f"hung: {KINDS['hung'].means}.")
    unknown = CliRunner().invoke(ckptctl, ["explain", "--kind", "hang"])
    assert (unknown.exit_code, "no event is of the kind 'hang'" in unknown.stderr) == (2, True)


def test_what_a_job_says_does_not_drive_the_terminal(tmp_path: Path) -> None:
    evil = event("commit-waited", 10, "rank 1 waited \x1b[31m 1 s")
    assert "\x1b" not in asked(tmp_path, (*TRAINS, evil)).stdout
