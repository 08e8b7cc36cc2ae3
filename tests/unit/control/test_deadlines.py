"""What the leader does not wait for, and what it writes down: each deadline, and each row of the story."""

from __future__ import annotations

from typing import Literal, TypeVar

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.planning.event_lines import EARLY_S
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.leading import REPEAT_S
from ckptless.daemon.ckptlessd.recovery.sizes import LOOK_S
from ckptless.daemon.ckptlessd.recovery.stalls import APART_S, SETTLED_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import (
    EventRecord,
    FaultRecord,
    GenerationRecord,
    JobRecord,
    Record,
    RecoveryRecord,
)
from ckptless.daemon.replication.protection import FEW_NODES

from .lease_nodes import LIMITS, STEP, Heard, Node, info, lost_by
from .recovering import HELD, NODES, Job, kills, kinds

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
    monkeypatch.setattr("tests.unit.control.lease_nodes.LIMITS", structs.replace(LIMITS, join_s=JOIN_S))


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
    assert m.Stop not in kinds(job.node.wait(STALL_S + 10.0, 5.0))


@pytest.mark.usefixtures("joins_soon")
def test_where_nobody_has_come_to_the_hooks_again_those_who_had_before_are_late() -> None:
    """A job of one rank, whose new process hangs before it says Hello, would wait for ever."""
    job = Job()
    second(job)
    for node in range(NODES):
        job.say(node, "assigned", stepped=False, hooked=False)
    assert m.Stop in kinds(job.node.wait(2 * JOIN_S, 5.0))


@pytest.mark.usefixtures("joins_soon")
def test_an_agent_that_has_told_nothing_yet_hides_nobody_who_hangs() -> None:
    job = first_assigned()
    job.say(1, "joined", stepped=False)
    job.say(2, "assigned", stepped=False)
    assert m.Stop in kinds(job.node.wait(2 * JOIN_S, 5.0))
    assert job.node.told.events.count("hung") == 1


def test_of_a_rank_that_is_late_and_a_step_that_does_not_come_the_rank_is_told() -> None:
    job = Job()
    second(job)
    for node in range(NODES):
        job.say(node, "joined", stepped=False)
    for node in (0, 1, 3):
        job.say(node, "restored", stepped=False)
    assert LIMITS.join_s == STALL_S
    job.node.wait(STALL_S + 10.0, 5.0)
    assert job.node.told.events.count("hung") == 1


@pytest.mark.usefixtures("joins_soon")
def test_a_rank_that_has_ended_while_others_train_does_not_hang() -> None:
    job = Job()
    job.say(0, "exited", code=0)
    found = job.node.wait(STALL_S + 10.0, 5.0)
    assert job.stage() == "stopping"
    assert "stall" in found.orders[0].reason  # type: ignore[union-attr]
    assert "hung" not in job.node.told.events


def _stops(out: object) -> bool:
    return isinstance(out, e.ToAgent) and isinstance(out.order, m.Stop)


LATE_S, LONGEST_S, ALLOWED_S = 4.0, 0.5, 60.0
WAITS = m.Call(group="0", size=3, number=8, operation="allreduce", elements=72)
IN_SCRIPT = "f (a.py, line 3)"
Kind = Literal["done", "waits", "asleep", "working", "excused", "moves", "slow"]


def of_kind(kind: Kind) -> m.Still | None:
    """What an agent tells of a rank: it waits for others, sleeps, runs, has said that it may last, or moves.

    "slow": it stands still, but not for long by its own rhythm.
    """
    if kind == "moves":
        return None
    return m.Still(
        still_s=LATE_S,
        late=kind != "slow",
        how="working" if kind == "working" else "asleep",
        phase="evaluation" if kind == "excused" else "compute",
        longest_s=LONGEST_S,
        call=WAITS if kind == "waits" else None,
        at=IN_SCRIPT,
    )


def stand(job: Job, *ranks: Kind) -> Heard:
    found = Heard()
    for node, kind in enumerate(ranks):
        allowed_s = ALLOWED_S if kind == "excused" else None
        phase: m.Phase = "finished" if kind == "done" else "restored"
        found.outputs += job.say(node, phase, still=of_kind(kind), allowed_s=allowed_s).outputs
    found.outputs += job.node.wait(LOOK_S, LOOK_S).outputs
    return found


@pytest.mark.parametrize(
    ("ranks", "named", "says"),
    [
        (
            ("waits", "working", "waits"),
            [1],
            "no step in 600 s: 2 other ranks wait in a collective that it has",
        ),
        (
            ("working", "waits", "working"),
            [0, 2],
            "no step in 600 s: 1 other rank waits in a collective that it",
        ),
        (("waits", "waits", "waits"), [], "all ranks wait in collectives: ranks 0, 1, 2 in allreduce"),
        (("working", "working", "working"), [], "no step in 600 s: no rank waits for another one"),
        (("waits", "moves", "waits"), [], "no step in 600 s"),
        (("waits", "moves", "asleep"), [], "no step in 600 s"),
    ],
)
def test_who_holds_the_job_up_is_named(ranks: tuple[Kind, ...], named: list[int], says: str) -> None:
    job = Job()
    stand(job, *ranks)
    job.node.wait(STALL_S + 10.0, 5.0)
    told = events(job.node.told, "hung")
    assert [row.about.rank for row in told if row.about] == named
    assert all(says in row.text for row in told)
    reason = next(out.order.reason for out in job.node.told.outputs if _stops(out))  # type: ignore[union-attr]
    assert says in reason


def test_who_hangs_by_the_job_s_own_rhythm_is_replaced_at_once() -> None:
    job = Job()
    found = stand(job, "waits", "asleep", "waits")
    (stop,) = [order for order in found.orders if isinstance(order, m.Stop)]
    assert stop.kill == (m.Place(node=1, slot=0),), "it is not waited for"
    (told,) = events(job.node.told, "hung")
    assert told.about is not None
    assert told.about.rank == 1
    assert "no step in 4.2 s, where the longest took 0.5 s: 2 other ranks wait" in told.text
    assert f"it sleeps in {IN_SCRIPT}" in told.text
    job.freeze(0, 2, 3)
    cause = m.Cause(kind="hung", text="stands still")
    job.say(1, "exited", cause=cause, frozen=True, code=-9)
    assert job.generation == 2
    assignment = job.node.control.job.assignment
    assert assignment is not None
    assert assignment.renew == (m.Place(node=1, slot=0),)
    assert (assignment.rung, job.lost) == ("process", [])


@pytest.mark.parametrize(
    "ranks",
    [
        ("waits", "asleep", "moves"),
        ("waits", "asleep", "slow"),
        ("waits", "slow", "waits"),
        ("waits", "excused", "waits"),
        ("excused", "asleep", "waits"),
        ("waits", "asleep", "asleep"),  # most of them: another process would be no better
        ("asleep", "asleep", "asleep"),
        ("waits", "waits", "waits"),
    ],
)
def test_as_long_as_it_may_be_something_else_nothing_is_done(ranks: tuple[Kind, ...]) -> None:
    job = Job()
    stand(job, *ranks)
    assert m.Stop not in kinds(job.node.wait(50.0, 1.0))
    assert events(job.node.told, "hung") == []


def test_one_that_the_others_have_returned_from_stops_all_each_time() -> None:
    job = Job()
    for generation in (1, 2):
        assert job.generation == generation
        (stop,) = [one for one in stand(job, "done", "waits", "done").orders if isinstance(one, m.Stop)]
        assert "2 ranks have returned" in stop.reason
        for node in (0, 2, 3, 1):
            job.say(node, "left", frozen=True)
        for phase in ("joined", "restored"):
            for node in range(NODES):
                job.say(node, phase, stepped=False)
    assert job.stage() == "restoring", "there is no step to be made"
    assert m.Stop not in kinds(stand(job, "done", "asleep", "done"))
    assert m.Stop not in kinds(stand(job, "done", "waits", "moves"))


def test_who_may_have_its_reasons_is_named_once() -> None:
    job = Job()
    stand(job, "waits", "working", "waits")
    job.node.wait(50.0, 1.0)
    (line,) = events(job.node.told, "late")
    assert "no step in 4.2 s, where the longest took 0.5 s: rank 1: 2 other ranks wait" in line.text
    assert (job.stage(), job.lost) == ("running", [])
    stand(job, "waits", "asleep", "waits")
    assert job.stage() == "stopping", "by now it sleeps"


def test_where_a_new_process_brings_no_step_it_was_no_reason() -> None:
    job = Job()
    stand(job, "waits", "asleep", "waits")
    job.freeze(0, 2, 3)
    job.say(1, "exited", cause=m.Cause(kind="hung", text="x"), frozen=True, code=-9)
    for phase in ("joined", "restored"):
        for node in range(NODES):
            job.say(node, phase, stepped=False)
    for node in range(NODES):
        job.say(node, "restored")
    assert (job.generation, job.stage()) == (2, "running")
    stand(job, "waits", "asleep", "waits")
    assert m.Stop not in kinds(job.node.wait(STALL_S - 10.0, 5.0))
    assert m.Stop in kinds(job.node.wait(20.0, 5.0)), "the longest stall is over"


def test_what_the_script_has_said_counts_beyond_the_longest_stall_too() -> None:
    """A rank may stand still, or get on, as in an evaluation that has collectives."""
    told: tuple[Kind, ...] = "excused", "moves"
    for kind in told:
        job = Job()
        for node in range(3):
            job.say(node, "restored", still=of_kind(kind), allowed_s=STALL_S + 100.0)
        assert m.Stop not in kinds(job.node.wait(STALL_S + 90.0, 5.0))
        assert m.Stop in kinds(job.node.wait(20.0, 5.0)), "it lasts longer than that"


@pytest.mark.parametrize("phase_s", [10.0, STALL_S - 10.0, STALL_S + 90.0])
def test_the_step_after_what_the_script_has_said_has_all_its_time(phase_s: float) -> None:
    job = Job()
    job.say(1, "restored", allowed_s=STALL_S + 100.0)
    job.node.wait(phase_s, 1.0)
    for node in range(3):
        job.say(node, "restored")
    assert m.Stop not in kinds(job.node.wait(STALL_S - 5.0, 1.0))
    assert m.Stop in kinds(job.node.wait(10.0, 1.0))


def test_a_job_of_one_rank_stalls_as_others_do() -> None:
    found = Node(0, 2).wait(STALL_S + 10.0, 5.0)
    assert m.Stop in kinds(found)


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
    apart(job, (1, 2))
    job.node.wait(SETTLED_S - 0.25, 0.25)
    apart(job, (1, 2), (1, 3))
    job.node.wait(SETTLED_S - 0.25, 0.25)
    assert job.lost == []
    apart(job, (1, 2), (1, 3))
    job.node.wait(0.5, 0.25)
    assert job.lost == [1], "it is in most of the pairs"


def apart(job: Job, *pairs: tuple[int, int]) -> None:
    """Every daemon says whom it cannot reach; of the leader's the daemon itself finds out."""
    for node in range(NODES):
        others = tuple(b if a == node else a for a, b in pairs if node in (a, b))
        if node == job.node.me:
            job.node.feed(e.Apart(frozenset(others)))
        else:
            job.node.feed(e.PeerUp(node, e.Standing(1, 0, "running", index=1, apart=others)))


def test_of_the_leader_s_own_bad_link_its_own_word_counts() -> None:
    job = Job()
    job.node.wait(APART_S, 0.25)
    job.node.feed(e.Apart(frozenset({2})))
    job.node.wait(SETTLED_S + 0.5, 0.25)
    assert job.lost == [2], "what it says cannot come here"
    job = Job()
    job.node.wait(APART_S, 0.25)
    job.node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=1, apart=(0,))))
    job.node.wait(SETTLED_S + 0.5, 0.25)
    assert job.lost == [], "it reaches it"


def test_who_gives_way_is_told_from_whom_it_was_apart() -> None:
    job = Job()
    job.node.wait(APART_S, 0.25)
    apart(job, (0, 3), (1, 2))
    job.node.wait(SETTLED_S + 0.25, 0.25)
    text = str(job.node.control.job.nodes[3].lost)
    assert text.startswith("it and node-0 cannot reach each other")


def test_a_pair_that_comes_up_at_the_end_of_the_longest_stall_is_not_waited_for() -> None:
    job = Job()
    job.node.wait(STALL_S - 1.0, 1.0)
    job.node.wait(0.5, 0.25)
    apart(job, (1, 2))
    assert job.lost == [2]
    assert job.stage() == "stopping"


def test_of_many_nodes_a_word_counts_until_it_was_to_be_said_again() -> None:
    node = Node(0, 2 * FEW_NODES)
    pause_s = node.control.job.remind_s
    assert pause_s > 1.0
    node.wait(APART_S, 0.25)
    for _ in range(2):
        for one in (1, 2):
            hello_of = e.Report(one, m.Introduction(info=info(one), pid=1))
            node.feed(hello_of, e.PeerUp(one, e.Standing(1, 0, "running", index=1, apart=(3 - one,))))
        node.wait(pause_s, 0.3)
    assert [one for one, view in node.control.job.nodes.items() if view.lost is not None] == [2]


def test_a_fault_that_comes_with_a_node_that_gives_way_stops_the_generation_once() -> None:
    for frozen in (False, True):
        job = Job()
        second_fault(job)
        job.node.wait(APART_S, 0.25)
        apart(job, (1, 3))
        job.node.wait(SETTLED_S - 0.25, 0.25)
        assert job.lost == []
        job.node.now += 0.25
        found = job.say(2, "restored", frozen=True) if frozen else job.raises()
        assert job.lost == [3]
        assert kinds(found) == [m.Stop]
        job.freeze(0, 1, 2)
        assert (job.generation, job.stage()) == (3, "joining")
        assert [(r.generation, r.outcome) for r in recoveries(job)] == [
            (2, None), (2, "recovered"), (3, None)
        ]  # fmt: skip


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
    job.say(1, "finished")
    job.node.wait(2 * EARLY_S, 0.25)
    assert job.node.told.events.count("returned-early") == 1, "of a generation that is enough"


def test_who_is_done_early_in_the_next_generation_too_is_told_no_more() -> None:
    job = Job()
    for generation in (1, 2):
        assert job.generation == generation
        job.say(0, "finished")
        job.node.wait(2 * EARLY_S, 0.25)
        assert job.node.told.events.count("returned-early") == 1
        second_fault(job)
    job.say(0, "finished")
    job.say(2, "finished")
    job.node.wait(2 * EARLY_S, 0.25)
    assert job.node.told.events.count("returned-early") == 2, "there is another one"


def second_fault(job: Job) -> None:
    """Rank 1 raises, and all train again."""
    job.raises()
    job.freeze(*range(NODES))
    trains_again(job)


def trains_again(job: Job) -> None:
    for phase in ("joined", "restored"):
        for node in range(NODES):
            job.say(node, phase, stepped=False)
    for node in range(NODES):
        job.say(node, "restored")
    assert job.stage() == "running"


# -------------------------------------------------------------------------------------------- the story


def test_what_is_written_of_a_generation() -> None:
    job = Job()
    second(job)
    assert [row.generation for row in rows(job.node.told, GenerationRecord)] == [2]
    assert [(r.generation, r.outcome) for r in recoveries(job)] == [(2, None)]
    assert job.node.told.events.count("generation") == 1
    assert [row.state for row in rows(job.node.told, JobRecord)] == ["running"]
    for phase in ("joined", "restored"):
        job.node.wait(2.0, 0.5)
        for node in range(NODES):
            job.say(node, phase, stepped=False)
    job.node.now += 5.0
    for node in range(NODES):
        job.say(node, "restored")
    assert [(r.generation, r.outcome) for r in recoveries(job)] == [(2, None), (2, "recovered")]
    assert list(recoveries(job)[-1].phases) == [
        "detect", "stop", "leave", "agree", "join", "restore", "first step"
    ]  # fmt: skip
    assert list(recoveries(job)[-1].phases.values())[-3:] == pytest.approx([2.0, 2.0, 5.0])


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
    (row,) = rows(job.node.told, JobRecord)
    assert (row.state, row.exit_code, row.reason, row.ended_s) == ("stopped", 130, "Ctrl-C", job.node.now)


@pytest.mark.parametrize("recovered", [False, True])
def test_what_is_written_of_a_good_end(recovered: bool) -> None:
    job = Job()
    if recovered:
        second_fault(job)
        job.node.forget()
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
    job.node.wait(REPEAT_S / 2, 0.25)
    job.freeze(*range(NODES))
    assert job.stage() == "joining"
    assert not meets_all(job.node.wait(REPEAT_S - 0.25, 0.25))
    assert meets_all(job.node.wait(0.25, 0.25))


def meets_all(found: Heard) -> list[e.Meet]:
    return [out for out in found.outputs if isinstance(out, e.Meet) and out.node is None]


def test_who_is_to_end_is_told_at_once_also_between_two_repetitions() -> None:
    job = Job()
    job.raises()
    job.freeze(0, 1, 3)
    job.freeze(2, phase="restored")
    tick_s = 0.7 * REPEAT_S
    assert kills(job.node.wait(42 * tick_s, tick_s)) == []
    assert m.Stop in kinds(Heard(job.node.told.outputs[-3:])), "it was just said again"
    assert kills(job.node.wait(tick_s, tick_s)) == [2]


def test_steps_that_are_heard_of_after_the_stop_count_as_progress() -> None:
    job = Job()
    job.raises()
    newest = STEP + 9
    slot = m.SlotState(slot=0, phase="left", generation=1, hooked=True, step=newest, stepped=True)
    state = m.AgentState(seq=900, slots=(slot,), assigned=1, frozen=1, holdings=HELD)
    job.node.feed(e.Report(0, state))
    job.freeze(1, 2, 3)
    assert job.node.control.job.assignment is not None
    assert [tries.step for tries in job.node.control.job.assignment.tries] == [newest]


def test_twins_that_differ_are_a_fault_though_a_rank_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = STEP - 1, STEP
    odd = {(STEP, 2)}
    held = m.Holdings(
        tensors=((0, steps),),
        records=tuple((rank, 0, steps) for rank in range(3)),
        digests=tuple(
            (0, step, rank, "0" * 16 + ("b" if (step, rank) in odd else "a"))
            for step in steps
            for rank in range(3)
        ),
    )
    monkeypatch.setattr("tests.unit.control.recovering.HELD", held)
    job = Job()
    job.raises()
    job.freeze(*range(NODES))
    assert job.generation == 2
    (line,) = events(job.node.told, "corrupt")
    assert line.about is not None
    assert line.about.rank == 2


def test_a_loss_is_announced_once_and_stops_the_generation() -> None:
    job = Job()
    found = job.node.feed(lost_by(2, "silent", 1.5, dark=True))
    assert kinds(found) == [m.Stop]
    assert found.dark == [2]
    job.node.wait(3.0)
    assert job.node.told.dark == [2]
    assert job.node.told.events.count("node-lost") == 1
    (fault,) = rows(job.node.told, FaultRecord)
    assert fault.seen_s == pytest.approx(job.node.now - 3.0 - 1.5)
    assert recoveries(job) == [], "nothing is planned before all are frozen"
    job.freeze(0, 1, 3)
    assert job.generation == 2
    assert recoveries(job)[-1].started_s == pytest.approx(job.node.now - 3.0 - 1.5, abs=0.01)
    assert job.node.control.job.assignment is not None
    assert job.node.control.job.assignment.restore_step == STEP
