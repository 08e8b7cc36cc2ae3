"""What the leader does not wait for, and what it writes down: each deadline, and each row of the story."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.planning.event_lines import EARLY_S
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.leading import REPEAT_S
from ckptless.daemon.ckptlessd.recovery.stalls import APART_S, SETTLED_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import EventRecord, GenerationRecord, JobRecord, Record, RecoveryRecord

sys.path.insert(0, str(Path(__file__).parent))

from lease_nodes import LIMITS, STEP, Heard, lost_by
from recovering import NODES, Job, kills, kinds

R = TypeVar("R", bound=Record)
LEAVE_S, STALL_S = LIMITS.leave_s, LIMITS.stall_s
JOIN_S = 60.0


def rows(found: Heard, kind: type[R]) -> list[R]:
    writes = [out for out in found.outputs if isinstance(out, e.Write)]
    return [row for write in writes for row in write.records if isinstance(row, kind)]


def events(found: Heard, kind: str) -> list[EventRecord]:
    return [row for row in rows(found, EventRecord) if row.kind == kind]


def second(job: Job) -> None:
    """Generation 2 is there, after rank 1 has raised."""
    job.raises()
    job.freeze(*range(NODES))
    assert job.generation == 2


@pytest.fixture
def joins_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not join within a minute is late; without a step all may be for ten."""
    monkeypatch.setattr("lease_nodes.LIMITS", structs.replace(LIMITS, join_s=JOIN_S))


# ------------------------------------------------------------------------------------------- joining


@pytest.mark.usefixtures("joins_soon")
def test_who_has_not_joined_in_time_hangs() -> None:
    job = Job()
    second(job)
    for node in (0, 2, 3):
        job.say(node, "joined", stepped=False)
    job.say(1, "assigned", stepped=False, hooked=False)
    assert kinds(job.node.wait(JOIN_S, 1.0)) == []
    assert set(kinds(job.node.wait(2.0, 1.0))) == {m.Stop}
    assert job.node.told.events.count("hung") == 1
    assert "not joined in 60 s" in str(rows(job.node.told, EventRecord))


@pytest.mark.usefixtures("joins_soon")
def test_who_has_not_restored_in_time_hangs() -> None:
    job = Job()
    second(job)
    for node in range(NODES):
        job.say(node, "joined", stepped=False)
    job.say(0, "restored", stepped=False)
    job.say(1, "finished", stepped=False)
    job.node.wait(JOIN_S + 2.0, 1.0)
    assert job.stage() == "stopping"
    hung = [
        row for row in rows(job.node.told, EventRecord) if isinstance(row, EventRecord) and row.kind == "hung"
    ]
    assert [(row.about.rank, "not restored in 60 s" in row.text) for row in hung if row.about] == [(2, True)]


@pytest.mark.usefixtures("joins_soon")
def test_all_that_are_restored_have_until_the_longest_stall_for_their_first_step() -> None:
    job = Job()
    second(job)
    for phase in ("joined", "restored"):
        for node in range(NODES):
            job.say(node, phase, stepped=False)
    assert job.stage() == "restoring"
    assert m.Stop not in kinds(job.node.wait(STALL_S - 10.0, 5.0))
    assert m.Stop in kinds(job.node.wait(20.0, 5.0))


def first_assigned(*hooked: bool) -> Job:
    """Generation 1 is there, and ranks have not joined."""
    job = Job(running=False)
    for node, one in enumerate(hooked):
        job.say(node, "assigned", stepped=False, hooked=one)
    return job


@pytest.mark.usefixtures("joins_soon")
def test_at_the_start_a_script_may_take_its_time_before_it_comes_to_the_hooks() -> None:
    job = first_assigned(True, True, False, False)
    job.say(0, "joined", stepped=False)
    job.say(1, "joined", stepped=False)
    assert m.Stop not in kinds(job.node.wait(2 * JOIN_S, 5.0))
    late = first_assigned(True, True, True, True)
    late.say(0, "joined", stepped=False)
    assert m.Stop in kinds(late.node.wait(2 * JOIN_S, 5.0))


@pytest.mark.usefixtures("joins_soon")
def test_where_nobody_has_hooks_nobody_knows_how_far_they_are() -> None:
    job = first_assigned(False, False, False, False)
    assert m.Stop not in kinds(job.node.wait(2 * STALL_S, 10.0))


def test_where_one_has_not_come_to_the_hooks_there_is_no_step_to_miss() -> None:
    job = first_assigned(True, True, True, False)
    for node in (0, 1):
        job.say(node, "joined", stepped=False)
    job.say(2, "assigned", stepped=False, hooked=False)
    assert "stall" not in job.node.wait(STALL_S + 10.0, 5.0).events


# ------------------------------------------------------------------------------------------ giving up


def test_the_others_hear_whom_the_leader_gives_up_and_only_then() -> None:
    job = Job()
    job.raises()
    job.freeze(0, 1, 3)
    job.freeze(2, phase="restored")
    job.node.wait(LEAVE_S - 0.5, 0.5)
    told = job.node.wait(1.0, 0.5)
    assert kills(told) == [2]
    assert not [out for out in told.outputs if isinstance(out, e.Meet) and out.node is None]
    job.node.wait(LEAVE_S - 1.0, 0.5)
    told = job.node.wait(1.0, 0.5)
    meets = [out.standing.lost for out in told.outputs if isinstance(out, e.Meet) and out.node is None]
    assert [[node for node, _, _ in lost] for lost in meets[:1]] == [[2]]


def test_who_was_to_end_in_the_recovery_before_is_told_again_first() -> None:
    job = Job()
    for generation in (1, 2):
        assert job.generation == generation
        job.raises()
        job.freeze(0, 1, 3)
        job.freeze(2, phase="restored")
        assert kills(job.node.wait(LEAVE_S + 0.5, 0.5)) == [2]
        assert job.lost == []
        if generation == 1:
            cause = m.Cause(kind="hung", text="did not leave")
            job.say(2, "exited", cause=cause, frozen=True, code=-9)
            for node in range(NODES):
                job.say(node, "joined", stepped=False)


def test_a_new_leader_gives_up_an_agent_that_never_says_anything() -> None:
    job = Job(me=0)
    job.node.control.job.nodes[2].state = None
    job.node.wait(STALL_S + 10.0, 5.0)
    assert job.lost == [2]
    assert "has said nothing for 600 s" in str(job.node.control.job.nodes[2].lost)


def test_pairs_that_still_change_are_not_settled() -> None:
    job = Job()
    job.node.wait(APART_S, 0.25)

    def apart(*pairs: tuple[int, int]) -> None:
        for node in range(1, NODES):
            others = tuple(b if a == node else a for a, b in pairs if node in (a, b))
            job.node.feed(e.PeerUp(node, e.Standing(1, 0, "running", index=1, apart=others)))

    apart((1, 2))
    job.node.wait(SETTLED_S - 0.25, 0.25)
    apart((1, 2), (1, 3))
    job.node.wait(SETTLED_S - 0.25, 0.25)
    assert job.lost == []
    apart((1, 2), (1, 3))
    job.node.wait(0.5, 0.25)
    assert job.lost == [1], "it is in most of the pairs"


def test_who_is_done_long_before_the_others_is_told_once() -> None:
    job = Job()
    job.node.wait(2 * EARLY_S, 0.25)
    job.say(0, "finished")
    job.node.wait(EARLY_S - 0.5, 0.25)
    assert "returned-early" not in job.node.told.events
    job.node.wait(0.5, 0.25)
    assert job.node.told.events.count("returned-early") == 1
    job.node.wait(2 * EARLY_S, 0.25)
    assert job.node.told.events.count("returned-early") == 1


# -------------------------------------------------------------------------------------------- the story


def test_what_is_written_of_a_generation() -> None:
    job = Job()
    second(job)
    assert [row.generation for row in rows(job.node.told, GenerationRecord)] == [2]
    assert [(r.generation, r.outcome) for r in recoveries(job)] == [(2, None)]
    assert job.node.told.events.count("generation") == 1
    assert [row.state for row in rows(job.node.told, JobRecord)] == ["running"]
    for phase in ("joined", "restored"):
        for node in range(NODES):
            job.say(node, phase, stepped=False)
    job.node.now += 5.0
    for node in range(NODES):
        job.say(node, "restored")
    assert [(r.generation, r.outcome) for r in recoveries(job)] == [(2, None), (2, "recovered")]
    assert list(recoveries(job)[-1].phases) == [
        "detect", "stop", "leave", "agree", "join", "restore", "first step"
    ]  # fmt: skip


def recoveries(job: Job) -> list[RecoveryRecord]:
    return rows(job.node.told, RecoveryRecord)


def test_what_is_written_of_an_end_in_the_middle_of_a_recovery() -> None:
    job = Job()
    job.raises()
    job.node.feed(e.Report(0, m.Cancel(exit_code=130, reason="Ctrl-C")))
    assert job.outcome() is not None
    assert [(r.generation, r.outcome) for r in recoveries(job)] == [(2, "failed")]
    (end,) = events(job.node.told, "end")
    assert (end.level, end.text) == ("error", "stopped: Ctrl-C")
    assert [row.state for row in rows(job.node.told, JobRecord)] == ["stopped"]


def test_what_is_written_of_a_good_end() -> None:
    job = Job()
    for node in range(NODES - 1):
        job.say(node, "finished")
    for node in range(NODES - 1):
        job.say(node, "exited", code=0)
    job.node.wait(0.1)
    (end,) = events(job.node.told, "end")
    assert (end.level, end.text) == ("info", "done: every rank ended by itself")
    assert recoveries(job) == []


def test_orders_are_not_said_again_too_soon() -> None:
    job = Job()
    job.raises()
    assert kinds(job.node.wait(REPEAT_S - 0.25, 0.25)) == []
    assert kinds(job.node.wait(0.25, 0.25)) == [m.Stop]


def test_a_loss_is_announced_once_and_stops_the_generation() -> None:
    job = Job()
    found = job.node.feed(lost_by(2, "silent", 1.5, dark=True))
    assert kinds(found) == [m.Stop]
    assert found.dark == [2]
    job.node.wait(3.0)
    assert job.node.told.dark == [2]
    assert job.node.told.events.count("node-lost") == 1
    assert recoveries(job) == [], "nothing is planned before all are frozen"
    job.freeze(0, 1, 3)
    assert job.generation == 2
    assert recoveries(job)[-1].started_s == pytest.approx(job.node.now - 3.0 - 1.5, abs=0.01)
    assert job.node.control.job.assignment is not None
    assert job.node.control.job.assignment.restore_step == STEP
