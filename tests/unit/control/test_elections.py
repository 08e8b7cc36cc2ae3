"""Whose turn it is to lead: the order, the times, and what a daemon says when that changes."""

from __future__ import annotations

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.election import AGAIN_S, DOUBLED, FORMING_GRACE_S, TURN_S
from ckptless.daemon.ckptlessd.recovery.fencing import AGREEING_S, CANCEL_S, FORMING_DEADLINE_S, RENEWALS
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Accepted, Ballot, Canvass, Decided, Decree, Prepare
from ckptless.daemon.protocol.records import EventRecord

from .lease_nodes import LEASE_S, START_S, Heard, Node, agreed, first_generation, hello, lost_by

NODES = 5
TICK_S = 0.0625


def canvasses(found: Heard) -> list[int | None]:
    tells = [out for out in found.outputs if isinstance(out, e.Tell)]
    return [out.node for out in tells if isinstance(out.say, Canvass)]


def tries_after(node: Node, most_s: float) -> float | None:
    """Seconds until it asks for support, with the others silent about it."""
    began = node.now
    while node.now - began < most_s:
        for output in node.control.handle(e.Tick(), node.now):
            if isinstance(output, e.Tell) and isinstance(output.say, Canvass):
                return node.now - began
        node.now += TICK_S
    return None


def campaigns(node: Node) -> bool:
    return node.control.job.agreement.campaigns


def lone(me: int, *, away: tuple[int, ...] = (0,), losses: tuple[int, ...] = ()) -> Node:
    """A follower of node 0, which hears of nothing more."""
    node = Node(me, NODES)
    node.control.handle_all(
        [*(e.PeerDown(one) for one in away), *(lost_by(one, "gone") for one in losses)], node.now
    )
    return node


# ------------------------------------------------------------------------------------------- the order


def test_the_lowest_voter_that_is_left_tries_at_once() -> None:
    node = Node(1, NODES)
    found = node.control.handle(e.PeerDown(0), node.now)
    asked = [out.node for out in found if isinstance(out, e.Tell)]
    assert asked == [0, 2, 3, 4]


@pytest.mark.parametrize(("me", "turn"), [(2, 1), (3, 2), (4, 3)])
def test_each_other_one_waits_for_its_turn(me: int, turn: int) -> None:
    after_s = tries_after(lone(me), 10.0)
    assert after_s is not None
    assert turn * TURN_S <= after_s <= 2 * turn * TURN_S + TICK_S


def test_who_cannot_vote_or_is_lost_or_away_has_no_turn() -> None:
    assert lone(3, away=(0, 1), losses=(2,)).control.job.agreement.campaigns
    node = Node(3, NODES)
    unable = e.Standing(1, 0, "running", index=1, able=False)
    node.feed(e.PeerUp(1, unable), e.PeerUp(2, unable))
    node.control.handle(e.PeerDown(0), node.now)
    assert node.control.job.agreement.campaigns
    again = e.Standing(1, 0, "running", index=1)
    able = Node(3, NODES)
    able.feed(e.PeerUp(1, unable), e.PeerUp(1, again))
    able.control.handle(e.PeerDown(0), able.now)
    assert not able.control.job.agreement.campaigns


def test_who_led_last_is_the_first_again() -> None:
    node = Node(1, NODES)
    # Node 3 led, and says that it leads no more; its daemon is there.
    node.feed(e.PeerUp(3, e.Standing(2, 3, "running", index=1)))
    node.control.handle(e.PeerUp(3, e.Standing(2, NOBODY, "running", index=1)), node.now)
    after_s = tries_after(node, 10.0)
    assert after_s is not None
    # Behind nodes 3 and 0.
    assert after_s >= 2 * TURN_S


def test_who_does_not_vote_does_not_lead_unless_all_voters_are_lost() -> None:
    for losses, tries in (((0,), False), ((0, 1, 2), True)):
        node = Node(4, NODES)
        named = Decree(index=2, voters=(0, 1, 2), assignment=first_generation(NODES))
        node.feed(e.Said(0, Decided(decree=named)))
        node.control.handle_all(
            [*(lost_by(one, "gone") for one in losses), e.Heartbeats(frozenset({0, 1, 2}))], node.now
        )
        assert (tries_after(node, 10.0) is not None) is tries
    node = Node(4, NODES)
    node.feed(e.Said(0, Decided(decree=named)), *(e.PeerDown(voter) for voter in (0, 1, 2)))
    assert tries_after(node, 10.0) is None, "they are away, and not lost"


def test_who_does_not_vote_leads_where_each_voter_is_lost_or_cannot_vote() -> None:
    """A lost node's daemon votes on, and does not lead; one that has forgotten its votes does neither."""
    node = Node(4, NODES)
    named = Decree(index=2, voters=(0, 1, 2), assignment=first_generation(NODES))
    node.feed(e.Said(0, Decided(decree=named)), lost_by(0, "gone"), lost_by(1, "gone"), e.PeerDown(0))
    unable = e.Standing(1, NOBODY, "running", index=2, able=False)
    assert tries_after(node, 10.0) is None, "node 2 can"
    node.feed(e.PeerUp(2, unable))
    assert tries_after(node, 10.0) is not None


def test_who_does_not_vote_does_not_lead_where_it_only_reaches_no_voter() -> None:
    """In a large job that is so of most nodes: they hear of voters by the beats of others."""
    node = Node(4, NODES)
    named = Decree(index=2, voters=(0, 1, 2), assignment=first_generation(NODES))
    node.feed(e.Said(0, Decided(decree=named)), *(e.PeerDown(one) for one in (0, 1, 2)))
    node.feed(e.Heartbeats(frozenset({1, 2})))
    assert node.held
    assert tries_after(node, 30.0) is None


def test_who_hears_its_leader_again_does_not_try() -> None:
    node = lone(4)
    node.now += TURN_S
    node.control.handle(e.PeerUp(0, e.Standing(1, 0, "running", index=1)), node.now)
    assert tries_after(node, 30.0) is None
    # And its turn begins anew.
    node.control.handle(e.PeerDown(0), node.now)
    after_s = tries_after(node, 10.0)
    assert after_s is not None
    assert after_s >= 3 * TURN_S


@pytest.mark.parametrize(("away", "told"), [((), True), ((0,), False)])
def test_who_asks_for_support_hears_of_the_leader_where_there_is_one(
    away: tuple[int, ...], told: bool
) -> None:
    node = lone(3, away=away)
    ballot = Ballot(number=2, node=2)
    found = node.control.handle(e.Said(2, Canvass(ballot=ballot, index=1)), node.now)
    assert any(isinstance(out, e.Meet) and out.node == 2 for out in found) is told
    found = node.control.handle(e.Said(2, Accepted(ballot=ballot, index=1)), node.now)
    assert not any(isinstance(out, e.Meet) and out.node == 2 for out in found)


def test_whoever_led_leads_again_when_it_says_so_itself() -> None:
    node = Node(3, NODES)
    nobody, itself = (e.Standing(1, who, "running", index=1) for who in (NOBODY, 0))
    node.feed(e.PeerUp(0, nobody))
    assert node.control.job.leader == NOBODY
    node.feed(e.PeerUp(2, itself))
    assert node.control.job.leader == NOBODY, "it has not heard yet"
    node.feed(e.PeerUp(0, itself))
    assert node.control.job.leader == 0


def test_a_try_ends_where_the_leader_is_heard_of_again() -> None:
    node = lone(1)
    assert node.control.job.agreement.campaigns
    node.control.handle(e.Heartbeats(frozenset({0})), node.now)
    assert not node.control.job.agreement.campaigns


def test_a_try_that_was_ended_by_another_is_made_again_after_a_while() -> None:
    node = lone(1)
    assert node.control.job.agreement.campaigns
    node.control.job.agreement.resign()
    after_s = tries_after(node, 10.0)
    assert after_s is not None
    assert AGAIN_S <= after_s <= 2 * AGAIN_S + TICK_S


def test_no_two_tries_of_a_life_and_no_two_lives_wait_alike() -> None:
    waits = set()
    for session in ("s", "t"):
        node = Node(4, NODES)
        node.control.job.session = session
        node.control.handle(e.PeerDown(0), node.now)
        for _ in range(2):
            waits.add(tries_after(node, 10.0))
            node.control.job.agreement.resign()
            node.now += TICK_S
    assert len(waits) == 4
    assert None not in waits


def promises(node: Node, ballot: Ballot) -> None:
    """Another daemon tries to lead, and asks this one for its promise."""
    node.control.handle(e.Said(ballot.node, Prepare(ballot=ballot, index=1)), node.now)
    assert node.control.job.agreement.durable.promised == ballot


def test_who_has_promised_another_its_vote_gives_it_time_and_each_time_more() -> None:
    """Where disks are slow daemons would end each other's tries for ever."""
    node, waits = lone(1), list[float]()
    for number in range(3, 10):
        promises(node, Ballot(number=number * 10, node=2))
        after_s = tries_after(node, 20.0)
        assert after_s is not None
        waits.append(after_s)
    for doubled, wait_s in enumerate(waits):
        assert 1 <= wait_s / (AGAIN_S * 2 ** min(doubled, DOUBLED)) <= 2 + TICK_S / AGAIN_S


def test_a_leader_that_was_heard_ends_the_patience_of_before() -> None:
    node = lone(1)
    for number in range(3, 7):
        promises(node, Ballot(number=number, node=2))
        assert tries_after(node, 20.0) is not None
    node.feed(e.PeerUp(0, e.Standing(30, 0, "running", index=1)))
    node.control.handle(e.PeerDown(0), node.now)
    assert tries_after(node, AGAIN_S) is not None


def test_a_try_that_nobody_has_answered_stays_the_same_one() -> None:
    node = lone(1)
    sought = node.control.job.agreement.sought
    assert sought is not None
    tries_after(node, 0.5)
    for _ in range(100):
        node.now += TICK_S
        node.control.handle(e.Tick(), node.now)
    assert node.control.job.agreement.sought == sought


def test_nobody_tries_once_the_job_is_over() -> None:
    node = lone(1)
    node.control.handle(e.Report(1, m.Cancel(exit_code=130, reason="Ctrl-C")), node.now)
    node.now += AGREEING_S + 1.0
    node.control.handle(e.Tick(), node.now)
    assert node.control.job.stage == "ended"
    assert tries_after(node, 10.0) is None
    assert not campaigns(node)


def test_who_follows_another_gives_up_its_own_try() -> None:
    node = lone(1)
    assert campaigns(node)
    node.control.handle(e.OrderFrom(2, 9, m.Running(generation=1)), node.now)
    assert not campaigns(node)
    assert node.control.job.leader == 2


def test_a_leader_that_is_ordered_by_a_newer_one_follows_it() -> None:
    node = Node(0, NODES)
    node.feed(e.OrderFrom(2, 9, m.Running(generation=1)))
    assert not node.control.job.leads
    assert node.control.job.leader == 2


def test_a_leader_does_not_hear_itself() -> None:
    """Before the first generation who hears its leader waits twice as long as the leader does."""
    assert not Node(0, NODES).control.job.hears_leader


# ------------------------------------------------------------------------------------------- becoming it


def test_who_is_elected_tells_all_and_notes_it() -> None:
    node = Node(1, NODES)
    node.feed(e.AgentAnswers(0, True))
    found = node.feed(e.PeerDown(0))
    assert node.control.job.leads
    assert node.control.job.leader == 1
    assert found.events == ["leader"]
    told = [out for out in found.outputs if isinstance(out, e.Meet) and out.node is None]
    assert [(out.standing.term, out.standing.leader, out.reports) for out in told] == [(2, 1, ())]


def test_who_is_deposed_tells_all_that_it_leads_no_more() -> None:
    node = Node(0, NODES)
    node.control.job.agreement.resign()
    found = node.feed(e.Tick())
    told = [out.standing.leader for out in found.outputs if isinstance(out, e.Meet) and out.node is None]
    assert told[0] == NOBODY


def test_two_that_know_of_no_leader_have_nothing_to_tell_each_other() -> None:
    """Or both would answer for ever."""
    nobody = e.Standing(1, NOBODY, "running", index=1)
    node = Node(1, 3)
    node.feed(e.PeerUp(0, nobody))
    assert node.control.job.leader == NOBODY
    found = node.feed(e.PeerUp(2, nobody))
    assert [out for out in found.outputs if isinstance(out, e.Meet)] == []


def test_a_new_leader_tells_of_losses_that_no_generation_was_planned_without() -> None:
    node = Node(1, NODES)
    node.feed(lost_by(3, "its agent is gone"))
    assert "node-lost" not in node.told.events
    node.feed(lost_by(0, "its agent is gone"), e.PeerDown(0))
    node.wait(3.0)
    assert node.control.job.leads
    assert node.told.events.count("node-lost") == 2


def test_a_lost_agent_that_answered_before_answers_no_more() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerDown(3), e.AgentAnswers(3, True))
    assert 3 in node.control.job.answering
    node.feed(lost_by(3, "its agent is gone"))
    assert 3 not in node.control.job.answering


def test_a_leader_that_has_learned_from_another_begins_anew() -> None:
    node = Node(0, NODES)
    node.control.job.agreement.resign()
    decree = Decree(index=2, voters=(0, 1, 2), assignment=first_generation(NODES))
    node.feed(e.Said(1, Decided(decree=decree)))
    node.wait(3.0)
    assert node.control.job.leader == 0
    assert "leader" in node.told.events
    assert node.control.job.nodes[1].state is None


def test_a_new_leader_waits_for_what_the_others_say_now() -> None:
    node = Node(1, NODES)
    node.feed(e.Report(2, m.AgentState(seq=5, slots=(), assigned=1)), e.AgentAnswers(0, True), e.PeerDown(0))
    assert node.control.job.leads
    assert node.control.job.nodes[2].state is None
    assert node.control.job.nodes[1].state is not None


# ----------------------------------------------------------------------------------------- the beginning


def begun(me: int, *others: int) -> Node:
    """A daemon at the beginning of a job, that has met these others."""
    node = Node(me, NODES, fresh=True)
    node.control = Controller(me, "s", {number: NodeView(number) for number in range(NODES)})
    node.feed(e.Report(me, hello(me, NODES)))
    nothing = e.Standing(0, NOBODY, "forming", index=0)
    node.feed(*(e.PeerUp(other, nothing) for other in others))
    return node


def test_at_the_beginning_the_lowest_leads_at_once() -> None:
    node = begun(0)
    assert canvasses(node.told)[:4] == [1, 2, 3, 4]


def test_at_the_beginning_the_others_wait_for_the_lowest() -> None:
    after_s = tries_after(begun(2, 1, 3, 4), 60.0)
    assert after_s is not None
    assert FORMING_GRACE_S + TURN_S <= after_s <= FORMING_GRACE_S + 2 * TURN_S + TICK_S


def test_who_meets_too_few_gives_up_in_the_end() -> None:
    node = begun(4)
    node.wait(FORMING_DEADLINE_S + AGREEING_S - 1.0, 0.5)
    assert node.told.ends == []
    node.wait(2.0, 0.5)
    (end,) = node.told.ends
    assert end.outcome.why == "no-quorum"
    assert "1 of 5 daemons have met, too few to begin" in end.outcome.reason
    assert FORMING_DEADLINE_S + AGREEING_S <= node.control.job.losses[4].age_s <= node.now - START_S
    node = begun(4)
    node.feed(e.NotSaved("it is full"))
    node.wait(FORMING_DEADLINE_S + AGREEING_S + 1.0, 0.5)
    assert "met, too few of them can vote to begin" in node.told.ends[0].outcome.reason


def test_an_agent_that_does_not_come_up_is_given_up_and_the_job_begins_without_it() -> None:
    node = begun(0, 1, 2, 3, 4)
    node.feed(*(e.Report(other, hello(other, NODES)) for other in (1, 2, 4)))
    node.wait(FORMING_DEADLINE_S - 1.0, 0.5)
    assert node.control.job.known.index == 0
    node.wait(2.0, 0.5)
    assert node.control.job.assignment is not None
    assert [place.node for place in node.control.job.assignment.places] == [0, 1, 2, 4]
    assert node.control.job.nodes[3].lost == "its agent did not come up in 120 s"


def test_who_is_elected_late_waits_for_agents_no_longer_than_another() -> None:
    node = begun(2, 1, 3, 4)
    node.feed(*(e.Report(other, hello(other, NODES)) for other in (1, 3, 4)))
    assert tries_after(node, 60.0) is not None
    began_s = node.now
    node.wait(FORMING_DEADLINE_S - (began_s - START_S) - 1.0, 0.5)
    assert node.control.job.leads
    assert node.control.job.assignment is None
    node.wait(2.0, 0.5)
    assert node.control.job.assignment is not None


def test_who_hears_its_leader_waits_for_it_twice_as_long() -> None:
    node = begun(4, 0)
    node.feed(e.PeerUp(0, e.Standing(1, 0, "forming", index=0)))
    node.wait(2 * FORMING_DEADLINE_S + AGREEING_S - 1.0, 0.5)
    assert node.told.ends == []
    node.wait(2.0, 0.5)
    assert len(node.told.ends) == 1


def test_with_too_few_agents_the_job_ends_before_it_began() -> None:
    node = begun(0, 1, 2, 3, 4)
    node.feed(e.Report(1, hello(1, NODES)))
    node.wait(FORMING_DEADLINE_S + 1.0, 0.5)
    (end,) = node.told.ends
    assert node.control.job.assignment is None
    assert end.outcome.state == "failed"


def test_the_first_generation_says_what_it_goes_on_from() -> None:
    node = begun(0, 1, 2, 3, 4)
    told = {other: hello(other, NODES) for other in range(NODES)}
    node.feed(*(e.Report(other, told[other]) for other in range(1, NODES)))
    assert "generation" in node.wait(1.0).events
    assert "start" not in node.told.events
    node = begun(0, 1, 2, 3, 4)
    for other in range(1, NODES):
        held = m.Holdings(tensors=((0, (5,)),), records=tuple((rank, 0, (5,)) for rank in range(NODES - 1)))
        brought = m.Brought(run="7", generation=1, ranks=1, holdings=held)
        node.feed(e.Report(other, structs.replace(told[other], brought=brought)))
    node.wait(1.0)
    writes = [out for out in node.told.outputs if isinstance(out, e.Write)]
    rows = [row for write in writes for row in write.records if isinstance(row, EventRecord)]
    (start,) = [row.text for row in rows if row.kind == "start"]
    assert start.startswith("step 5 from the memory of run 7")


# ------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(("quiet", "after_s"), [((), AGREEING_S), ((0, 2, 3), CANCEL_S)])
def test_who_is_to_end_and_hears_of_no_end_ends_by_itself(quiet: tuple[int, ...], after_s: float) -> None:
    node = Node(1, NODES)
    if quiet:
        node.feed(*(e.PeerDown(one) for one in quiet))
    node.feed(e.Report(1, m.Cancel(exit_code=130, reason="Ctrl-C")))
    node.wait(after_s, 0.5)
    assert node.told.ends == []
    node.wait(1.0, 0.5)
    (end,) = node.told.ends
    assert (end.outcome.state, end.outcome.exit_code, end.outcome.reason) == ("stopped", 130, "Ctrl-C")
    assert node.control.job.stage == "ended"
    # Others hear the user's word from it: its leader may be gone, or be itself.
    (word,) = [out for out in node.told.outputs if isinstance(out, e.Meet) and out.node is None][-1:]
    assert m.Cancel(exit_code=130, reason="Ctrl-C") in [report.message for report in word.reports]
    assert word.standing.stage == "ended"
    # What is agreed on later holds more.
    outcome = m.Outcome(state="done", exit_code=0, reason="")
    node.feed(e.Said(0, Decided(decree=Decree(index=2, voters=(0, 1, 2), outcome=outcome))))
    assert node.outcome == outcome


# ------------------------------------------------------------------------------------ lease and witness


def test_the_agent_hears_of_the_lease_ten_times_in_it() -> None:
    node = Node(1, NODES)
    found = node.wait(2 * LEASE_S, TICK_S)
    assert 2 * RENEWALS - 2 <= found.renewals <= 2 * RENEWALS


def test_half_asks_the_witness_and_says_so_until_it_has_the_word() -> None:
    node = Node(0, 4)
    node.silent((2, 3))
    found = node.wait(1.5)
    asked = [out for out in found.outputs if isinstance(out, e.AskWitness)]
    assert asked[:1] == [e.AskWitness((2, 3), (0, 1))]
    assert "half of the voters is silent: node-2, node-3" in str(found.outputs)
    found = node.feed(e.Witnessed((2, 3)))
    assert node.held
    assert found.events[0] == "witness"
    assert "node-2, node-3 are dead by the cluster's word" in str(found.outputs)
    told = [out.standing.dead for out in found.outputs if isinstance(out, e.Meet) and out.node is None]
    assert told[0] == (2, 3)
    for nodes in ((2,), (2, 3)):
        assert "witness" not in node.feed(e.Witnessed(nodes)).events
    assert not [out for out in node.wait(3.0).outputs if isinstance(out, e.AskWitness)]


def test_before_it_knows_the_job_a_half_asks_nobody() -> None:
    node = Node(0, 4, fresh=True)
    node.control.handle(e.PeerUp(1, e.Standing(1, NOBODY, "running", index=1)), node.now)
    assert not [out for out in node.wait(5.0).outputs if isinstance(out, e.AskWitness)]


def test_a_majority_asks_nobody() -> None:
    node = Node(0, NODES)
    node.silent((3, 4))
    assert not [out for out in node.wait(3.0).outputs if isinstance(out, e.AskWitness)]


def test_who_is_lost_by_the_word_of_others_has_no_lease_to_tell_of() -> None:
    node = Node(1, NODES)
    node.feed(lost_by(1, "drained", source="slurm"))
    (end,) = node.told.ends
    assert (end.outcome.why, end.here_only) == ("node-lost", True)
    assert node.wait(2 * LEASE_S).renewals == 0
    assert len(node.told.ends) == 1
    assert node.now > START_S
    assert agreed(NODES).voters == node.control.job.known.voters


def test_a_daemon_that_was_stopped_hears_first_what_has_come() -> None:
    node = Node(1, NODES)
    node.control.handle_all([e.PeerDown(other) for other in (0, 2, 3, 4)], node.now)
    node.now += LEASE_S + 5.0
    assert Heard(node.control.handle(e.Tick(), node.now)).ends == []
    ends: list[m.End] = []
    for _ in range(4):
        node.now += LEASE_S / 4
        ends += Heard(node.control.handle(e.Tick(), node.now)).ends
    assert len(ends) == 1, "nothing has come"


def test_a_daemon_that_was_stopped_for_most_of_its_lease_was_stopped() -> None:
    node = Node(1, NODES)
    node.control.handle_all([e.PeerDown(other) for other in (0, 2, 3, 4)], node.now)
    for part in (0.4, 0.7):
        node.now += part * LEASE_S
        assert Heard(node.control.handle(e.Tick(), node.now)).ends == []


def test_the_first_try_after_a_silence_is_not_late_as_one_that_failed() -> None:
    node = Node(1, NODES)
    node.control.handle(e.PeerDown(0), node.now)
    assert campaigns(node)
    # Node 0 leads again, and is gone again: nothing of before delays the next try.
    node.feed(e.PeerUp(0, e.Standing(3, 0, "running", index=1)))
    assert not campaigns(node)
    node.control.handle(e.PeerDown(0), node.now)
    assert campaigns(node)
