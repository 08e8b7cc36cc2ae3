"""The leader has the job leave nodes that live: one after the other, and where it can go on without them."""

from __future__ import annotations

from typing import Any

import pytest

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.events import Leave
from ckptless.daemon.ckptlessd.recovery.stragglers import STRIKES
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import EventRecord

from .lease_nodes import STEP, Node, lost_by
from .recovering import Job, kinds

FAN = Leave("unwell (a fan)", "health")
AT_ONCE = Leave("unwell (a GPU is gone)", "health", at_once=True, shrink=True)
ADMINS = Leave("drained in Slurm: new cables", "operator", shrink=True)


def says(node: int, leave: Leave | None, **more: Any) -> e.PeerUp:
    """A daemon tells where it stands."""
    return e.PeerUp(node, e.Standing(1, 0, "running", index=1, unwell=leave, **more))


def told(job: Job, kind: str) -> list[str]:
    writes = [output for output in job.node.told.outputs if isinstance(output, e.Write)]
    rows = [row for write in writes for row in write.records if isinstance(row, EventRecord)]
    return [row.text for row in rows if row.kind == kind]


def orders_ahead(job: Job) -> list[m.Prepare]:
    """Return what spares, and those who give them state, were told before anybody stopped."""
    return [order for order in job.node.told.orders if isinstance(order, m.Prepare)]


def ahead(job: Job) -> list[m.Assignment]:
    """Return the assignments that spares were told to build for."""
    return [order.assignment for order in orders_ahead(job)]


def builds(job: Job) -> None:
    """The spare is told to build, has built, and gets a commit."""
    job.node.wait(0.5)
    assert stops(job) == []
    job.say(3, "waiting", spare="prepared")
    job.node.wait(0.5)
    assert [order.state for order in orders_ahead(job)] == [False, True]
    assert stops(job) == []
    # Not so long as the leader looks at all else.
    job.say(3, "waiting", spare="prepared", spare_has=STEP)
    assert len(stops(job)) == 1


def stops(job: Job) -> list[str]:
    return [order.reason for order in job.node.told.orders if isinstance(order, m.Stop)]


def places(job: Job) -> list[int]:
    assignment = job.node.control.job.assignment
    assert assignment is not None
    return [place.node for place in assignment.places]


def trains_again(job: Job) -> None:
    for phase in ("joined", "restored"):
        for node in range(4):
            job.say(node, phase)
    assert job.stage() == "running"


def test_ranks_move_first_and_their_node_is_out_once_it_has_none() -> None:
    job = Job()
    job.node.feed(says(1, FAN))
    builds(job)
    assert stops(job) == ["its ranks leave node-1, which is unwell (a fan)"]
    assert job.lost == []
    job.freeze(0, 2, 3)
    job.say(1, "left", frozen=True)
    assert (job.generation, places(job)) == (2, [0, 3, 2])
    assignment = job.node.control.job.assignment
    assert assignment is not None
    # It has given its state, and nobody is to blame.
    assert (assignment.rung, assignment.faults) == ("spare", ())
    assert 1 in [info.node for info in assignment.nodes]
    trains_again(job)
    (text,) = told(job, "recovered")
    assert text.endswith(" s after the last one was stopped")
    assert job.lost == []
    job.node.wait(0.5)
    assert job.lost == [1]
    view = job.node.control.job.nodes[1]
    assert (view.lost, view.lost_source) == ("unwell (a fan)", "health")
    assert (job.stage(), job.generation) == ("running", 2)


def test_one_that_is_not_trusted_is_lost_at_once() -> None:
    job = Job()
    job.node.feed(says(1, AT_ONCE))
    job.node.wait(0.5)
    assert job.lost == [1]
    assert job.stage() == "stopping"
    # The others hear it from here.
    assert [lost[0] for lost in job.node.told.meetings[-1].lost] == [1]


def test_a_spare_that_is_not_well_is_out_and_nobody_stops() -> None:
    job = Job()
    job.node.feed(says(3, FAN))
    assert kinds(job.node.wait(0.5)) == []
    assert (job.lost, job.stage()) == ([3], "running")


@pytest.mark.parametrize("leave", [FAN, AT_ONCE, ADMINS])
def test_without_a_spare_it_stays_and_that_is_told_once(leave: Leave) -> None:
    job = Job()
    job.node.feed(lost_by(3, "its agent is gone"))
    job.node.feed(says(1, leave))
    job.node.wait(2.0)
    assert (job.lost, job.stage()) == ([3], "running")
    (text,) = told(job, "stays")
    assert text.startswith(f"node-1 is to be left ({leave.reason}), and stays: ")


@pytest.mark.parametrize("leave", [FAN, AT_ONCE])
def test_a_script_without_hooks_stays_where_it_is(leave: Leave) -> None:
    """It would begin anew elsewhere."""
    job = Job()
    job.say(2, "restored", hooked=False)
    job.node.feed(says(1, leave))
    job.node.wait(1.0)
    assert (job.lost, job.stage(), stops(job)) == ([], "running", [])
    assert told(job, "stays")[-1].endswith("a script that does not use ckptless.run would begin anew")


def test_one_node_at_a_time() -> None:
    """A check that is wrong is wrong on all nodes at once."""
    job = Job()
    job.node.feed(*(says(node, AT_ONCE) for node in (1, 2, 3)), e.Unwell(AT_ONCE))
    job.node.wait(2.0)
    assert len(job.lost) == 1


def test_what_is_taken_back_is_not_done() -> None:
    job = Job()
    job.node.feed(lost_by(3, "its agent is gone"), says(1, FAN))
    job.node.wait(0.5)
    job.node.feed(says(1, None))
    assert job.node.control.job.unwell == {}


def test_its_own_daemon_s_word_reaches_the_leader_with_where_it_stands() -> None:
    node = Node(1, 4)
    found = node.feed(e.Unwell(FAN))
    assert [standing.unwell for standing in found.meetings] == [FAN]
    assert [out.node for out in found.outputs if isinstance(out, e.Meet)] == [0]
    assert node.feed(e.Unwell(None)).meetings[-1].unwell is None


def test_nodes_that_slurm_drains_are_left_too_by_the_leader_s_own_word() -> None:
    job = Job()
    job.node.feed(e.Drained({2: ADMINS}))
    builds(job)
    assert stops(job) == ["its ranks leave node-2, which is drained in Slurm: new cables"]
    job.node.feed(e.Drained({}))
    assert job.node.control.job.drained == {}


def test_nobody_leaves_in_the_middle_of_a_recovery() -> None:
    job = Job()
    job.raises()
    job.node.feed(says(2, AT_ONCE))
    job.node.wait(1.0)
    job.freeze(0, 1, 2, 3)
    assert job.stage() == "joining"
    job.node.wait(1.0)
    assert job.lost == []
    for phase in ("joined", "restored"):
        for node in range(4):
            job.say(node, phase)
    job.node.wait(0.5)
    assert job.lost == [2]


def test_where_the_spare_is_lost_meanwhile_its_ranks_stay() -> None:
    job = Job()
    job.node.feed(says(1, FAN))
    builds(job)
    assert job.stage() == "stopping"
    job.node.feed(lost_by(3, "its agent is gone"))
    job.freeze(0, 2)
    job.say(1, "left", frozen=True)
    assert (job.generation, places(job), job.outcome()) == (2, [0, 1, 2], None)


def test_a_fault_beside_it_is_answered_in_the_same_plan() -> None:
    job = Job()
    job.node.feed(says(2, FAN))
    builds(job)
    job.freeze(0, 1, 2, 3)  # rank 1 has raised
    assert (job.generation, places(job)) == (2, [0, 1, 3])
    assignment = job.node.control.job.assignment
    assert assignment is not None
    assert len(assignment.faults) == 1


def test_a_rank_that_stays_slow_moves_to_a_spare() -> None:
    job = Job()
    job.node.control.job.move_stragglers = 2
    steps = 0
    while not ahead(job):
        steps += 1
        assert steps < 20
        for node in range(3):
            own_s = 0.15 if node == 1 else 0.1
            pace = m.Pace(step=steps, took_s=0.2, own_s=own_s, waited_s=0.0, data_s=0.0, commit_s=0.0)
            job.say(node, "restored", pace=pace)
        job.node.wait(0.5)
    assert steps == STRIKES + 2
    builds(job)
    assert stops(job) == [
        "its ranks leave node-1, which is unwell (rank 1 holds up the others: +50 %, compute)"
    ]
    job.freeze(0, 2, 3)
    job.say(1, "left", frozen=True)
    assert (job.generation, places(job)) == (2, [0, 3, 2])


def test_what_a_spare_builds_for_is_what_comes() -> None:
    job = Job()
    job.node.feed(says(1, FAN))
    job.node.wait(0.5)
    (told_ahead,) = ahead(job)
    # Nothing stops meanwhile, and it is said again only to one that has not begun.
    job.say(3, "waiting", spare="preparing")
    job.node.wait(10.0)
    assert (job.stage(), ahead(job)) == ("running", [told_ahead])
    job.say(3, "waiting", spare="prepared")
    job.node.wait(0.5)
    job.say(3, "waiting", spare="prepared", spare_has=STEP)
    job.freeze(0, 2, 3)
    job.say(1, "left", frozen=True)
    comes = job.node.control.job.assignment
    assert comes is not None
    assert (told_ahead.generation, told_ahead.places, told_ahead.cut) == (2, comes.places, comes.cut)


def test_one_that_has_not_heard_is_told_again() -> None:
    job = Job()
    job.node.feed(says(1, FAN))
    job.node.wait(3.5)
    # After one second, and two more.
    assert len(ahead(job)) == 3
    assert len({told_ahead.places for told_ahead in ahead(job)}) == 1


def test_who_gives_state_ahead_is_told_again_and_not_waited_for_for_ever() -> None:
    """The rank's node may not have heard it; and a job may make no commit for long."""
    job = Job()
    job.node.feed(says(1, FAN))
    job.node.wait(0.5)
    job.say(3, "waiting", spare="prepared")
    job.node.wait(5.0)
    assert [order.state for order in orders_ahead(job)] == [False, True, True, True]
    assert job.node.control.job.spec is not None
    job.say(0, "restored", step=1000)
    job.node.wait(job.node.control.job.spec.limits.stall_s - 5.0)
    assert stops(job)[0] == "its ranks leave node-1, which is unwell (a fan)"
    assert len(told(job, "not-prepared")) == 1


@pytest.mark.parametrize("phase", ["exited", "starting", "empty"])
def test_a_spare_that_dies_while_it_builds_is_not_waited_for(phase: m.Phase) -> None:
    job = Job()
    job.node.feed(says(1, FAN))
    job.node.wait(0.5)
    assert stops(job) == []
    job.say(3, "waiting", spare=phase)
    job.node.wait(0.5)
    assert stops(job) != []


def test_a_spare_that_is_only_being_started_is_not_waited_for() -> None:
    job = Job()
    job.say(3, "waiting", spare="starting")
    job.node.feed(says(1, FAN))
    job.node.wait(0.5)
    assert (ahead(job), len(stops(job))) == ([], 1)


def test_a_spare_that_builds_for_too_long_is_not_waited_for() -> None:
    job = Job()
    job.node.feed(says(1, FAN))
    job.say(3, "waiting", spare="preparing")
    assert job.node.control.job.spec is not None
    stall_s = job.node.control.job.spec.limits.stall_s
    job.node.wait(stall_s - 1.0)
    assert stops(job) == []
    job.say(0, "restored", step=1000)
    job.node.wait(2.0)
    assert stops(job) == ["its ranks leave node-1, which is unwell (a fan)"]
    (text,) = told(job, "not-prepared")
    assert text == f"who is to get the ranks of node-1 was not ready in {stall_s:g} s"


def test_a_fault_meanwhile_is_answered_and_the_spare_is_told_anew() -> None:
    job = Job()
    job.node.feed(says(1, FAN))
    job.node.wait(0.5)
    job.raises()
    assert job.stage() == "stopping"
    job.freeze(0, 1, 2, 3)
    # It moves with that, or it does not, but nobody waits.
    assert job.generation == 2


def test_what_cannot_be_trusted_does_not_wait_for_what_is_slow() -> None:
    job = Job()
    job.node.feed(says(1, FAN))
    job.node.wait(0.5)
    job.node.feed(says(2, AT_ONCE))
    job.node.wait(0.5)
    assert job.lost == [2]


def test_nobody_moves_to_a_node_that_is_to_be_left_itself() -> None:
    job = Job()
    job.node.feed(e.Drained({1: ADMINS, 3: ADMINS}))
    job.node.wait(2.0)
    assert (job.lost, ahead(job), stops(job)) == ([3], [], [])
    assert told(job, "stays")[-1].startswith("node-1 is to be left")


def test_what_a_person_has_asked_for_is_known_to_a_daemon_that_starts_later() -> None:
    """It was not there when that was said; whoever was tells it, until the node is out."""
    there = Node(me=2, nodes=4)
    there.feed(e.LeaveAsked(1, FAN))
    asked = there.control.job.standing.asked
    assert asked == ((1, FAN),)
    job = Job()
    job.node.feed(says(2, None, asked=asked))
    builds(job)
    assert stops(job) == ["its ranks leave node-1, which is unwell (a fan)"]
    there.feed(lost_by(1, "its ranks have left it"))
    assert not there.control.job.standing.asked
