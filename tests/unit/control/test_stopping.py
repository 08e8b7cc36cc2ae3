"""The leader from a fault to the next generation: who is waited for, for how long, and who is ended."""

from __future__ import annotations

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY
from ckptless.daemon.ckptlessd.recovery.leading import ENDING_S, REPEAT_S
from ckptless.daemon.ckptlessd.recovery.stalls import APART_S, SETTLED_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Decided, Decree
from ckptless.daemon.protocol.records import EventRecord

from .lease_nodes import LIMITS, STEP, Heard, Node, first_generation, hello, lost_by, trains
from .recovering import NODES, Job, kills, kinds

LEAVE_S = LIMITS.leave_s
# --------------------------------------------------------------------------------------- from fault on


def test_a_fault_stops_the_generation_and_is_said_once() -> None:
    job = Job()
    assert kinds(job.raises()) == [m.Stop]
    assert job.stage() == "stopping"
    assert kinds(job.raises()) == []
    assert job.node.told.events.count("raised") == 1


def test_new_voters_are_not_asked_for_in_the_middle_of_a_recovery() -> None:
    job = Job()
    job.raises()
    job.node.feed(lost_by(2, "its agent is gone"))
    job.node.wait(1.0, 0.25)
    assert job.node.control.job.known.index == 1
    job.freeze(0, 1, 3)
    assert (job.generation, job.node.control.job.known.index) == (2, 2)
    assert 2 not in job.node.control.job.known.voters


def test_every_agent_is_waited_for_also_a_spare_s() -> None:
    job = Job()
    job.raises()
    job.freeze(0, 1, 2)
    assert job.generation == 1
    job.freeze(3)
    assert job.generation == 2
    assert job.stage() == "joining"


def test_an_agent_that_does_not_stop_is_given_up_after_a_while() -> None:
    job = Job()
    job.raises()
    job.freeze(0, 1, 3)
    job.node.wait(LEAVE_S - 1.0, 0.5)
    assert job.lost == []
    job.node.wait(1.5, 0.5)
    assert job.lost == [2]
    assert f"did not stop in {LEAVE_S:.0f} s" in str(job.node.control.job.nodes[2].lost)
    # The others hear it from here.
    assert [told[0] for told in job.node.told.meetings[-1].lost] == [2]
    assert job.generation == 2
    assert [place.node for place in job.node.control.job.assignment.places] == [0, 1, 3]  # type: ignore[union-attr]


def test_a_rank_that_stays_inside_is_ended_after_a_while_and_has_time_to_end() -> None:
    job = Job()
    job.raises()
    job.freeze(0, 1, 3)
    job.freeze(2, phase="restored")
    assert kills(job.node.wait(LEAVE_S - 1.0, 0.5)) == []
    assert kills(job.node.wait(1.5, 0.5)) == [2]
    # Again and again, but its node is given up only after the same time once more.
    again = job.node.wait(LEAVE_S - 1.0, 0.5)
    assert set(kills(again)) == {2}
    assert job.lost == []
    assert job.node.told.events.count("kill") == 1
    job.node.wait(2.0, 0.5)
    assert job.lost == [2]
    assert job.generation == 2
    assert job.node.told.events.count("kill") == 1


def test_a_rank_that_is_ended_is_a_process_to_replace_and_no_lost_node() -> None:
    job = Job()
    job.raises()
    job.freeze(0, 1, 3)
    job.freeze(2, phase="restored")
    job.node.wait(LEAVE_S + 0.5, 0.5)
    job.say(2, "exited", cause=m.Cause(kind="hung", text="did not leave"), frozen=True, code=-9)
    assert job.generation == 2
    assert job.lost == []
    assert [place.node for place in job.node.control.job.assignment.renew] == [2]  # type: ignore[union-attr]


def test_the_next_generation_needs_the_next_fault() -> None:
    job = Job()
    job.raises()
    job.freeze(0, 1, 2, 3)
    assert job.generation == 2
    for node in range(NODES):
        job.say(node, "joined", stepped=False)
    assert job.stage() == "restoring"
    for node in range(NODES):
        job.say(node, "restored", stepped=False)
    assert job.stage() == "restoring", "no step yet"
    for node in range(NODES - 2):
        job.say(node, "restored")
    assert job.stage() == "restoring", "one has made none"
    job.say(NODES - 2, "restored")
    assert job.stage() == "running"
    assert job.node.told.events.count("recovered") == 1


def test_orders_are_said_again_to_whoever_missed_them() -> None:
    job = Job()
    job.raises()
    job.node.forget()
    found = job.node.wait(3 * REPEAT_S, 0.25)
    assert kinds(found) == [m.Stop] * 3
    assert kills(found) == []
    job.freeze(0, 1, 2, 3)
    found = job.node.wait(3 * REPEAT_S, 0.25)
    assert kinds(found) == []
    told = [out for out in found.outputs if isinstance(out, e.Meet) and out.node is None]
    assert len(told) == 3
    for node in range(NODES):
        job.say(node, "joined", stepped=False)
    assert kinds(job.node.wait(3 * REPEAT_S, 0.25)) == [m.Go] * 3


def test_where_only_consequences_are_known_one_of_them_is_announced_once() -> None:
    job = Job()
    broken = m.Cause(kind="broken", text="connection reset")
    job.say(0, "left", cause=broken)
    assert "broken" not in job.node.told.events
    job.node.quiet = {1, 2, 3}
    for node in range(NODES):
        job.say(node, "left", cause=broken if node == 0 else None, frozen=True)
    for _ in range(3):
        job.node.now += 0.25
        job.node.feed(e.Tick())
    assert job.generation == 1, "nobody has agreed yet"
    assert job.node.told.events.count("broken") == 1


@pytest.mark.parametrize(("text", "reason"), [("", "died"), ("of signal 9", "died: of signal 9")])
def test_the_order_to_stop_says_why(text: str, reason: str) -> None:
    job = Job()
    (stop,) = job.say(1, "left", cause=m.Cause(kind="died", text=text)).orders
    assert isinstance(stop, m.Stop)
    assert stop.reason == reason


def test_a_job_that_is_to_end_is_not_stopped_before_that_is_agreed_on() -> None:
    job = Job()
    job.node.quiet = {1, 2, 3}
    job.node.feed(e.Report(0, m.Cancel(exit_code=130, reason="Ctrl-C")))
    assert kinds(job.raises()) == []
    assert job.outcome() is None


# --------------------------------------------------------------------------------------- other leaders


def test_what_another_leader_has_stopped_stops_here() -> None:
    job = Job()
    found = job.say(2, "restored", frozen=True)
    assert kinds(found) == [m.Stop]
    assert "another leader" in found.orders[0].reason  # type: ignore[union-attr]


def taken_over(stage: m.Order | None) -> Heard:
    """Return what node 1 says that leads after node 0, whose daemon is away and whose agent answers."""
    node = Node(1, NODES)
    if stage is not None:
        node.feed(e.OrderFrom(0, 1, stage))
    assignment = first_generation(NODES)
    reports = [e.Report(other, hello(other, NODES)) for other in node.others]
    node.feed(*reports, e.AgentAnswers(0, True), e.PeerDown(0))
    node.wait(2.0)
    assert node.control.job.leads
    node.feed(*(e.Report(other, trains(other, assignment, 50)) for other in range(NODES)))
    return node.told


@pytest.mark.parametrize("order", [m.Go(generation=1), m.Stop(generation=1, reason="x")])
def test_a_new_leader_begins_half_a_recovery_again(order: m.Order) -> None:
    found = taken_over(order)
    stops = [one for one in found.orders if isinstance(one, m.Stop)]
    assert stops
    assert stops[0].reason == "the leader was lost during a recovery"


def test_a_new_leader_gives_agents_as_long_to_stop_as_any_other() -> None:
    node = Node(1, NODES)
    node.feed(e.OrderFrom(0, 1, m.Stop(generation=1, reason="x")))
    node.wait(LEAVE_S - 1.0, 0.5)
    node.silent((0,))
    node.wait(LEAVE_S - 5.0, 0.5)
    assert node.control.job.leads
    assert [n for n, view in node.control.job.nodes.items() if view.lost is not None] == [0]
    node.wait(10.0, 0.5)
    assert all(node.control.job.nodes[n].lost is not None for n in (2, 3))


def reigns(found: Heard) -> list[str]:
    writes = [out for out in found.outputs if isinstance(out, e.Write)]
    lines = [row for write in writes for row in write.records if isinstance(row, EventRecord)]
    return [line.text for line in lines if line.kind == "leader"]


def test_a_new_leader_says_why_it_leads() -> None:
    assert reigns(taken_over(None)) == ["node-1 leads, since node-0 cannot be reached"]
    node = Node(1, NODES)
    node.feed(e.PeerUp(0, e.Standing(1, NOBODY, "running", index=1)))
    node.feed(e.PeerDown(0), e.AgentAnswers(0, True))
    node.wait(5.0)
    assert reigns(node.told) == ["node-1 leads, since nobody else does"]


def test_who_leads_again_takes_a_fault_of_the_new_generation_for_no_old_one() -> None:
    job = Job()
    job.raises()
    (before,) = [job.node.control.job.assignment]
    assert before is not None
    second = structs.replace(before, generation=2, term=2, leader=1)
    decree = Decree(index=2, voters=tuple(range(NODES)), assignment=second)
    standing = e.Standing(2, 1, "running", index=2)
    job.node.feed(e.Said(1, Decided(decree=decree)), e.PeerUp(1, standing))
    assert (job.stage(), job.node.control.job.leads) == ("running", False)
    job.node.feed(e.PeerDown(1), e.AgentAnswers(1, True))
    job.node.wait(5.0)
    assert (job.stage(), job.node.control.job.leads) == ("running", True)
    found = job.raises()
    assert kinds(found) == [m.Stop]
    assert found.events == ["raised"], "the story of this generation has it, too"


@pytest.mark.parametrize("order", [None, m.Release(generation=1)])
def test_a_new_leader_stops_nothing_that_is_whole(order: m.Order | None) -> None:
    assert m.Stop not in kinds(taken_over(order))


# ------------------------------------------------------------------------------------------- the end


def finished() -> Job:
    job = Job()
    for node in range(NODES):
        job.say(node, "finished")
    assert job.stage() == "releasing"
    return job


def test_when_every_rank_is_done_they_are_released_and_the_job_ends() -> None:
    job = finished()
    assert kinds(job.node.told) == [m.Release]
    for node in range(NODES - 1):
        job.node.wait(0.5)
        assert job.outcome() is None
        job.say(node, "exited", code=0)
    job.node.wait(0.1)
    outcome = job.outcome()
    assert outcome is not None
    assert (outcome.state, outcome.exit_code) == ("done", 0)


def test_a_node_that_goes_with_the_release_fails_nothing_for_a_while() -> None:
    job = finished()
    job.node.feed(lost_by(1, "its agent is gone"))
    job.node.wait(ENDING_S - 0.5)
    assert job.outcome() is None
    job.node.wait(1.0)
    outcome = job.outcome()
    assert outcome is not None
    assert (outcome.why, outcome.exit_code) == ("after-training", 1)


def test_a_new_leader_has_the_same_patience_with_nodes_that_go() -> None:
    node = Node(1, NODES)
    node.feed(e.OrderFrom(0, 1, m.Release(generation=1)))
    node.now += 10 * ENDING_S
    node.feed(lost_by(0, "its agent is gone"))
    assert node.control.job.leads
    node.wait(ENDING_S - 0.5)
    assert node.control.job.stage == "releasing"
    node.wait(1.0)
    outcome = node.outcome
    assert outcome is not None
    assert outcome.why == "after-training"


def test_a_node_whose_ranks_have_ended_may_go() -> None:
    job = finished()
    job.say(1, "exited", code=0)
    job.node.feed(lost_by(1, "its agent is gone"))
    job.node.wait(3 * ENDING_S)
    assert job.outcome() is None


def test_a_node_goes_too_soon_where_one_of_its_processes_has_not_ended() -> None:
    job = finished()
    slots = tuple(
        m.SlotState(slot=slot, phase=phase, generation=1, hooked=True, step=STEP, stepped=True)
        for slot, phase in enumerate[m.Phase](("exited", "finished"))
    )
    job.node.feed(e.Report(1, m.AgentState(seq=900, slots=slots, assigned=1)))
    job.node.feed(lost_by(1, "its agent is gone"))
    job.node.wait(3 * ENDING_S)
    outcome = job.outcome()
    assert outcome is not None
    assert (outcome.why, outcome.node) == ("after-training", None)


def test_a_process_that_fails_after_training_fails_the_job() -> None:
    job = finished()
    job.say(2, "exited", cause=m.Cause(kind="died", text="ended with 3"), code=3)
    job.node.wait(0.1)
    outcome = job.outcome()
    assert outcome is not None
    assert (outcome.why, outcome.exit_code, outcome.rank) == ("after-training", 3, 2)
    assert outcome.node == 2


def test_ranks_that_have_all_ended_are_not_done_where_the_last_one_failed() -> None:
    job = Job()
    for node in (0, 1):
        job.say(node, "exited", code=0)
    job.say(2, "exited", cause=m.Cause(kind="died", text="ended with 3"), code=3)
    job.node.wait(0.1)
    assert (job.stage(), job.outcome()) == ("stopping", None)


# ------------------------------------------------------------------------------------ waited in vain


def test_without_a_step_the_job_is_stopped_once_the_longest_stall_is_over() -> None:
    job = Job()
    assert kinds(job.node.wait(LIMITS.stall_s, 5.0)) == []
    found = job.node.wait(10.0, 5.0)
    assert kinds(found)[:1] == [m.Stop]
    assert "stall" in found.orders[0].reason  # type: ignore[union-attr]


def test_a_new_step_is_a_sign_that_all_is_well() -> None:
    job = Job()
    for step in range(4):
        assert kinds(job.node.wait(LIMITS.stall_s - 50.0, 10.0)) == []
        slot = m.SlotState(slot=0, phase="restored", generation=1, hooked=True, step=100 + step, stepped=True)
        job.node.feed(e.Report(1, m.AgentState(seq=200 + step, slots=(slot,), assigned=1)))


def test_of_two_nodes_that_cannot_reach_each_other_one_gives_way() -> None:
    job = Job()
    told = {node: e.Standing(1, 0, "running", index=1, apart=(3 - node,)) for node in (1, 2)}
    job.node.wait(APART_S, 0.25)
    job.node.feed(*(e.PeerUp(node, standing) for node, standing in told.items()))
    job.node.wait(SETTLED_S - 0.5, 0.25)
    assert job.lost == []
    job.node.feed(*(e.PeerUp(node, standing) for node, standing in told.items()))
    found = job.node.wait(1.0, 0.25)
    assert job.lost == [2]
    assert kinds(found) == [m.Stop]
    assert "others see both" in found.orders[0].reason  # type: ignore[union-attr]
    assert "(rank 2)" in found.orders[0].reason  # type: ignore[union-attr]


def apart_for(job: Job, seconds: float, steps: bool) -> Job:
    """Nodes 1 and 2 do not reach each other, and say so again each second."""
    for second in range(round(seconds)):
        for node in (1, 2):
            standing = e.Standing(1, 0, job.node.control.job.stage, index=1, apart=(3 - node,))
            job.node.feed(e.PeerUp(node, standing))
        if steps:
            slot = m.SlotState(
                slot=0, phase="restored", generation=1, hooked=True, step=100 + second, stepped=True
            )
            job.node.feed(e.Report(1, m.AgentState(seq=200 + second, slots=(slot,), assigned=1)))
        job.node.wait(1.0, 0.25)
    return job


def test_as_long_as_there_are_steps_they_need_not_reach_each_other() -> None:
    assert apart_for(Job(), 3 * APART_S, steps=True).lost == []
    assert apart_for(Job(), 3 * APART_S, steps=False).lost == [2]


def test_without_a_spare_they_are_waited_for_as_long_as_for_any_step() -> None:
    job = Job()
    job.node.feed(lost_by(3, "its agent is gone"))
    stall_s = LIMITS.stall_s
    assert apart_for(job, stall_s - 5.0, steps=False).lost == [3]
    assert apart_for(job, 10.0, steps=False).lost == [2, 3]
    assert "it and node-1 cannot reach each other" in str(job.node.control.job.nodes[2].lost)


def test_after_training_nobody_needs_to_reach_another() -> None:
    assert apart_for(finished(), 3 * APART_S, steps=False).lost == []


def test_a_spare_that_gives_way_is_stopped_for_too() -> None:
    """It holds copies of others' state."""
    job = Job()
    told = {node: e.Standing(1, 0, "running", index=1, apart=(4 - node,)) for node in (1, 3)}
    job.node.wait(APART_S, 0.25)
    job.node.feed(*(e.PeerUp(node, standing) for node, standing in told.items()))
    job.node.wait(SETTLED_S - 0.5, 0.25)
    assert job.lost == []
    found = job.node.wait(1.0, 0.25)
    assert job.lost == [3]
    assert kinds(found)[:1] == [m.Stop]
    assert "cannot reach each other" in found.orders[0].reason  # type: ignore[union-attr]
