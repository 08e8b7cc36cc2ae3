"""Whose word counts: orders of an old ballot or generation, reports of before, nodes that are lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.planning.faults import NodeViews
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import (
    Ballot,
    Canvass,
    Decided,
    Decree,
    Prepare,
    Refusal,
    Support,
)

from .lease_nodes import (
    LEASE_S,
    LIMITS,
    Heard,
    Node,
    agreed,
    first_generation,
    hello,
    info,
    job_spec,
    lost_by,
    meet,
    trains,
)
from .recovering import Job

NODES = 3
STOP, GO = m.Stop(generation=1, reason="x"), m.Go(generation=1)


def to_agent(found: Heard) -> list[type]:
    return [type(out.order) for out in found.outputs if isinstance(out, e.ToAgent)]


def standing(term: int, leader: int, stage: e.Stage = "running", **more: Any) -> e.Standing:
    return replace(e.Standing(term, leader, stage, index=1), **more)


def stage(node: Node) -> str:
    return node.control.job.stage


def is_held(node: Node) -> bool:
    return node.control.job.decides


def leader_of(node: Node) -> int:
    return node.control.job.leader


def refusals(found: Heard) -> list[Refusal]:
    tells = [out.say for out in found.outputs if isinstance(out, e.Tell)]
    return [say for say in tells if isinstance(say, Refusal)]


# ------------------------------------------------------------------------------------------- reports


@pytest.mark.parametrize("seq", [1, 2])
def test_a_report_that_is_no_newer_changes_nothing(seq: int) -> None:
    leader = Node(0, NODES)
    late = trains(1, first_generation(NODES), seq, "joined")
    leader.feed(e.Report(1, late))
    state = leader.control.job.nodes[1].state
    assert state is not None
    assert (state.seq, state.slots[0].phase) == (2, "restored")
    leader.feed(e.Report(1, structs.replace(late, seq=3)))
    assert leader.control.job.nodes[1].slots()[0].phase == "joined"


def test_the_leader_is_passed_every_report_of_the_own_agent_and_no_other() -> None:
    node = Node(1, NODES)
    for sender, seq in ((1, 5), (2, 6)):
        state = trains(sender, first_generation(NODES), seq)
        found = node.feed(e.Report(sender, state))
        passed = [out for out in found.outputs if isinstance(out, e.Forward)]
        assert passed == ([e.Forward(0, e.Report(1, state))] if sender == 1 else [])


# -------------------------------------------------------------------------------------------- orders


def test_an_order_of_an_older_ballot_is_refused() -> None:
    node = Node(1, NODES)
    node.feed(e.OrderFrom(2, 2, STOP))
    assert (node.control.job.leader, stage(node)) == (2, "stopping")
    found = node.feed(e.OrderFrom(0, 1, GO))
    assert (node.control.job.leader, stage(node)) == (2, "stopping")
    assert found.events == ["order-refused"]
    assert to_agent(found) == []
    # Whoever gave it hears who leads.
    assert [(out.node, out.standing.leader) for out in found.outputs if isinstance(out, e.Meet)] == [(0, 2)]
    assert to_agent(node.feed(e.OrderFrom(2, 2, GO))) == [m.Go]


def test_of_one_number_the_higher_node_has_the_higher_ballot() -> None:
    node = Node(1, NODES)
    node.feed(e.OrderFrom(2, 1, STOP))
    assert leader_of(node) == 2
    assert node.feed(e.OrderFrom(0, 1, GO)).events == ["order-refused"]


def test_an_order_of_another_generation_is_not_obeyed() -> None:
    node = Node(1, NODES)
    early = node.feed(e.OrderFrom(0, 1, m.Stop(generation=2, reason="x")))
    assert (early.events, to_agent(early), stage(node)) == ([], [], "running")
    late = node.feed(e.OrderFrom(0, 1, m.Stop(generation=0, reason="x")))
    assert (late.events, to_agent(late), stage(node)) == (["order-refused"], [], "running")


def test_no_order_is_obeyed_once_the_job_is_over() -> None:
    node = Node(1, NODES)
    outcome = m.Outcome(state="done", exit_code=0, reason="")
    over = Decree(index=2, voters=(0, 1, 2), assignment=first_generation(NODES), outcome=outcome)
    assert to_agent(node.feed(e.Said(0, Decided(decree=over)))) == [m.End]
    found = node.feed(e.OrderFrom(0, 1, STOP))
    assert (found.events, to_agent(found), stage(node)) == (["order-refused"], [], "ended")


def test_what_is_agreed_on_is_no_order() -> None:
    node = Node(1, NODES)
    with pytest.raises(TypeError, match="Assign is agreed on"):
        node.feed(e.OrderFrom(0, 1, m.Assign(assignment=first_generation(NODES))))


def test_an_order_that_is_said_again_is_answered_by_how_far_it_is() -> None:
    node = Node(1, NODES)
    first = node.feed(e.OrderFrom(0, 1, STOP))
    assert not [out for out in first.outputs if isinstance(out, e.Forward)]
    again = node.feed(e.OrderFrom(0, 1, STOP))
    told = [out.report.message for out in again.outputs if isinstance(out, e.Forward)]
    assert [type(message) for message in told] == [m.Introduction, m.AgentState]
    assert to_agent(again) == [m.Stop]


@pytest.mark.parametrize(
    ("order", "then", "handed"),
    [
        (STOP, "stopping", [m.Stop]),
        (GO, "restoring", [m.Go]),
        (m.Release(generation=1), "releasing", [m.Release]),
        (m.Running(generation=1), "running", []),
    ],
)
def test_where_an_order_leads(order: m.Order, then: str, handed: list[type]) -> None:
    node = Node(1, NODES)
    assert to_agent(node.feed(e.OrderFrom(0, 1, order))) == handed
    assert stage(node) == then


# ---------------------------------------------------------------------------------------- generations


def test_a_change_of_voters_begins_nothing_again() -> None:
    node = Node(1, NODES)
    named = Decree(index=2, voters=(1, 2), assignment=first_generation(NODES))
    found = node.feed(e.Said(0, Decided(decree=named)))
    assert node.control.job.known == named
    assert stage(node) == "running"
    assert to_agent(found) == []


def test_a_new_generation_is_joined() -> None:
    node = Node(1, NODES)
    second = structs.replace(first_generation(NODES), generation=2)
    found = node.feed(e.Said(0, Decided(decree=Decree(index=2, voters=(0, 1, 2), assignment=second))))
    assert stage(node) == "joining"
    assert to_agent(found) == [m.Assign]


# -------------------------------------------------------------------------------------- whose word


def test_the_word_of_a_lost_node_does_not_count() -> None:
    node = Node(0, 5)
    accuses = standing(1, 0, lost=((1, "silent", "membership"),))
    node.feed(lost_by(3, "silent"), e.PeerUp(3, accuses))
    assert node.control.job.nodes[1].lost is None
    node.feed(e.PeerUp(2, accuses))
    assert node.control.job.nodes[1].lost == "silent"


def test_the_word_of_a_node_that_is_out_of_the_generation_does_not_count() -> None:
    """It may have been cut off when the others went on without it, and not know that."""
    node = Node(1, 5)
    without = structs.replace(
        first_generation(5), nodes=tuple(info(one) for one in (0, 1, 2, 4)), generation=2
    )
    node.feed(e.Said(0, Decided(decree=Decree(index=2, voters=tuple(range(5)), assignment=without))))
    accuses = standing(1, 0, lost=((2, "silent", "membership"),), index=2)
    node.feed(e.PeerUp(3, accuses))
    assert node.control.job.nodes[2].lost is None
    node.feed(e.PeerUp(4, accuses))
    assert node.control.job.nodes[2].lost == "silent"


def test_an_answer_of_a_lost_node_is_none() -> None:
    node = Node(0, 5)
    node.feed(e.AgentAnswers(3, True), e.AgentAnswers(4, True))
    assert node.control.job.answering == {3, 4}
    node.feed(lost_by(3, "silent"), e.AgentAnswers(3, True), e.AgentAnswers(4, False))
    assert node.control.job.answering == set()


def test_the_first_who_says_that_a_node_is_lost_is_believed() -> None:
    node = Node(0, 5)
    node.feed(lost_by(3, "silent", 2.0, dark=True), lost_by(3, "drained", source="slurm"))
    view, loss = node.control.job.nodes[3], node.control.job.losses[3]
    assert (view.lost, view.lost_source, view.lost_age_s, loss.dark) == ("silent", "membership", 2.0, True)


def test_there_is_no_stage_after_the_end() -> None:
    node = Node(1, NODES)
    outcome = m.Outcome(state="done", exit_code=0, reason="")
    node.feed(e.Said(0, Decided(decree=Decree(index=2, voters=(0, 1, 2), outcome=outcome))))
    node.feed(e.PeerUp(0, e.Standing(1, 0, "running", index=2)))
    assert stage(node) == "ended"


def test_an_agent_hears_of_one_end_only() -> None:
    """Of a node that was given up the job's own end says more."""
    node = Node(1, NODES)
    node.feed(lost_by(1, "silent"))
    (end,) = node.told.ends
    assert end.here_only
    outcome = m.Outcome(state="done", exit_code=0, reason="")
    node.feed(e.Said(0, Decided(decree=Decree(index=2, voters=(0, 1, 2), outcome=outcome))))
    node.forget()
    node.feed(e.Report(1, trains(1, first_generation(NODES), seq=9)))
    assert {(end.outcome.state, end.here_only) for end in node.told.ends} == {("done", False)}


def test_nothing_is_lost_by_the_end_of_the_job() -> None:
    node = Node(1, NODES)
    outcome = m.Outcome(state="done", exit_code=0, reason="")
    node.feed(e.Said(0, Decided(decree=Decree(index=2, voters=(0, 1, 2), outcome=outcome))))
    node.feed(lost_by(2, "gone"))
    assert node.control.job.nodes[2].lost is None


# --------------------------------------------------------------------------------------- two leaders


def test_who_hears_its_leader_supports_no_other_until_it_is_heard_no_more() -> None:
    node = Node(2, NODES)
    ask = Canvass(ballot=Ballot(number=2, node=1), index=1)
    yes = Support(ballot=ask.ballot, index=ask.index)
    (no,) = refusals(node.feed(e.Said(1, ask)))
    assert no.content
    # It is told who leads.
    assert [s.leader for s in node.told.meetings] == [0]
    assert e.Tell(1, yes) in node.feed(e.PeerDown(0), e.Said(1, ask)).outputs


def test_who_hears_its_leader_promises_nothing_to_another() -> None:
    node = Node(1, NODES)
    (no,) = refusals(node.feed(e.Said(2, Prepare(ballot=Ballot(number=2, node=2), index=1))))
    assert no.content


def test_a_leader_that_is_only_heard_of_by_others_is_heard() -> None:
    node = Node(3, 5)
    node.feed(e.PeerDown(0), e.Heartbeats(frozenset({0})))
    ask = Canvass(ballot=Ballot(number=2, node=1), index=1)
    (no,) = refusals(node.feed(e.Said(1, ask)))
    assert no.content
    node.feed(e.Heartbeats(frozenset()))
    assert refusals(node.feed(e.Said(1, ask))) == []


def test_a_leader_that_is_lost_is_not() -> None:
    node = Node(3, 5)
    node.feed(lost_by(0, "gone"))
    assert refusals(node.feed(e.Said(1, Canvass(ballot=Ballot(number=2, node=1), index=1)))) == []


def test_the_leader_itself_is_answered() -> None:
    node = Node(1, NODES)
    assert refusals(node.feed(e.Said(0, Prepare(ballot=Ballot(number=2, node=0), index=1)))) == []


def test_a_leader_that_holds_its_lease_supports_no_other() -> None:
    leader = Node(0, NODES)
    ask = Canvass(ballot=Ballot(number=9, node=2), index=1)
    (no,) = refusals(leader.feed(e.Said(2, ask)))
    assert no.content
    leader.feed(e.PeerDown(1), e.PeerDown(2))
    assert refusals(leader.feed(e.Said(2, ask))) == []


def test_of_two_reigns_the_newer_one_is_followed() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerUp(0, standing(1, 0)), e.PeerUp(2, standing(2, 2)))
    assert (node.control.job.leader, node.control.job.term) == (2, 2)
    found = node.feed(e.PeerUp(0, standing(1, 0)))
    assert (node.control.job.leader, node.control.job.term) == (2, 2)
    # Who follows an older one hears of the newer.
    assert (0, 2) in [(out.node, out.standing.leader) for out in found.outputs if isinstance(out, e.Meet)]


def meets(found: Heard) -> list[int | None]:
    return [out.node for out in found.outputs if isinstance(out, e.Meet)]


def test_who_hears_of_another_leader_says_there_where_it_stands() -> None:
    node = Node(1, 4)
    found = node.feed(e.PeerUp(2, standing(2, 3)))
    assert leader_of(node) == 3
    assert meets(found) == [3]
    assert [out.node for out in found.outputs if isinstance(out, e.Forward)] == [3, 3]
    found = node.feed(e.OrderFrom(2, 3, m.Running(generation=1)))
    assert leader_of(node) == 2
    assert meets(found) == [2], "by its first order"
    assert meets(node.feed(e.OrderFrom(2, 3, STOP))) == []


def test_a_leader_learns_from_whoever_has_promised_more_that_it_can_agree_on_nothing() -> None:
    """That one was led by more, and obeys no order of this one, which would give up its node."""
    node = Node(0, NODES)
    node.quiet = {1, 2}
    node.feed(e.PeerUp(1, standing(4, NOBODY, promised=Ballot(number=4, node=1))))
    assert not node.control.job.leads


def test_what_is_said_of_a_reign_of_before_does_not_change_whom_it_follows() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerUp(2, standing(5, 2)))
    node.feed(e.PeerUp(0, standing(3, 1)))
    assert (leader_of(node), node.control.job.term) == (2, 5), "its own one is over"


def test_a_leader_that_says_that_it_leads_no_more_is_not_followed() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerUp(2, standing(1, NOBODY)))
    assert leader_of(node) == 0, "that is not for node 2 to say"
    node.feed(e.PeerUp(2, standing(7, NOBODY)))
    assert (leader_of(node), node.control.job.term) == (0, 1), "of whoever led by that nothing is known"
    node.feed(e.PeerUp(0, standing(0, NOBODY)))
    assert leader_of(node) == 0, "it says so of the time before"
    node.quiet = {0, 2}
    found = Heard(node.control.handle(e.PeerUp(0, standing(1, NOBODY)), node.now))
    assert leader_of(node) == NOBODY
    assert NOBODY not in meets(found)


def test_who_is_taken_for_the_leader_and_is_not_says_so() -> None:
    node = Node(1, NODES)
    found = Heard(node.control.handle(e.PeerUp(2, standing(4, 1, "restoring")), node.now))
    told = [(out.node, out.standing.leader) for out in found.outputs if isinstance(out, e.Meet)]
    assert (2, NOBODY) in told
    assert node.control.job.term == 4
    assert stage(node) == "restoring", "how far the job is, they know"


def test_two_that_know_of_other_reigns_agree_and_are_quiet() -> None:
    """One was started again after it had led, and follows whom it hears of first: that was before its own."""
    node, other = Node(1, NODES), Node(2, NODES)
    node.quiet, other.quiet = {0, 2}, {0, 1}
    other.feed(e.PeerUp(0, standing(4, 1)))
    assert (leader_of(node), leader_of(other)) == (0, 1)
    meet(node, other)
    assert (leader_of(node), leader_of(other)) == (NOBODY, NOBODY)


LIMIT_S = LIMITS.join_s + LIMITS.stall_s


def without_leader(stage: e.Stage, *, for_s: float, steps: bool = False) -> list[m.End]:
    """Node 0 has led, and is gone; node 2 is heard, and cannot vote: node 1 asks it in vain."""
    node = Node(1, NODES)
    node.feed(e.PeerUp(0, standing(1, 0, stage)), e.PeerUp(2, standing(1, NOBODY, able=False)))
    found = Heard(node.control.handle_all((e.PeerDown(0), lost_by(0, "silent")), node.now))
    for step in range(round(for_s / 10)):
        node.now += 10.0
        found.outputs += node.control.handle(e.Tick(), node.now)
        assert node.held
        if steps:
            state = trains(1, first_generation(NODES), seq=step + 9)
            slots = (structs.replace(state.slots[0], step=step + 100),)
            found.outputs += node.control.handle(e.Report(1, structs.replace(state, slots=slots)), node.now)
    return found.ends


@pytest.mark.parametrize("stage", ["stopping", "joining", "restoring", "running", "releasing"])
def test_a_job_that_stands_still_and_finds_no_leader_ends(stage: e.Stage) -> None:
    assert without_leader(stage, for_s=LIMIT_S - 10.0) == []
    (end,) = without_leader(stage, for_s=LIMIT_S + 20.0)
    assert (end.outcome.state, end.outcome.why, end.here_only) == ("failed", "no-quorum", True)
    assert "nobody was elected leader for 1200 s: node-2 cannot vote" in end.outcome.reason


def test_a_spare_that_hears_none_who_would_train_ends_too() -> None:
    """It makes no steps by which it would know; others have given themselves up, and their daemons live."""
    for silent, ends in (([0], True), ([], False)):
        node = Node(2, NODES)
        node.feed(e.PeerUp(0, standing(1, 0, "running")), e.PeerUp(1, standing(1, 0, able=False)))
        found = Heard(node.control.handle_all([lost_by(1, "x"), *map(e.PeerDown, silent)], node.now))
        # Who led is followed no more, and nobody answers who is asked to be led.
        node.control.job.leader = NOBODY
        for _ in range(round(LIMIT_S / 10) + 2):
            node.now += 10.0
            found.outputs += node.control.handle(e.Tick(), node.now)
        assert node.held
        assert [end.outcome.why for end in found.ends] == ["no-quorum"] * ends


def leads_to_nothing(for_s: float, *, answer_at_s: float | None = None) -> tuple[Job, list[m.End]]:
    """A rank has raised; node 0 leads and hears all voters; none votes on the next generation it proposes."""
    job = Job()
    node = job.node
    job.raises()
    node.quiet = set(node.others)
    found = job.freeze(*range(node.nodes))
    assert not node.control.job.agreement.ready
    for step in range(1, round(for_s / 10) + 1):
        node.now += 10.0
        if step * 10.0 == answer_at_s:
            node.quiet.clear()
        found.outputs += node.feed(e.Tick()).outputs
    return job, found.ends


def test_a_leader_whose_proposals_are_not_agreed_on_ends_its_node() -> None:
    job, ends = leads_to_nothing(LIMIT_S)
    assert job.node.control.job.leads
    assert ends == []
    job, (end,) = leads_to_nothing(LIMIT_S + 10.0)
    assert (end.outcome.state, end.outcome.why, end.here_only) == ("failed", "no-quorum", True)
    assert end.outcome.reason.endswith("nothing was agreed on for 1200 s")
    assert not job.node.control.job.leads


def test_a_leader_whose_proposal_is_agreed_on_in_the_end_goes_on() -> None:
    job, ends = leads_to_nothing(LIMIT_S + 20.0, answer_at_s=LIMIT_S - 10.0)
    assert ends == []
    assert (job.generation, job.stage()) == (2, "joining")


def test_a_leader_that_has_nothing_to_propose_decides() -> None:
    """Its ranks may make one step for as long as they like: that is for the longest stall to say."""
    node = Node(0, NODES)
    node.now += LIMIT_S + 10.0
    ends = [end for _ in range(2) for end in node.feed(e.Tick()).ends]
    assert [end for end in ends if end.here_only] == []
    assert node.control.job.led == node.now


def test_who_cannot_be_blamed_is_not_named() -> None:
    """The other voter can vote, and gives no answer."""
    node = Node(1, NODES)
    node.feed(e.PeerUp(0, standing(1, 0, "stopping")))
    node.control.handle_all((e.PeerDown(0), lost_by(0, "silent")), node.now)
    node.now += LIMIT_S + 10.0
    (end,) = Heard(node.control.handle(e.Tick(), node.now)).ends
    assert end.outcome.reason.endswith("nobody was elected leader for 1200 s")


def test_a_job_that_stands_still_goes_on_where_there_is_a_leader() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerUp(0, standing(1, 0, "stopping")))
    for _ in range(round(2 * LIMIT_S / 10)):
        node.now += 10.0
        assert Heard(node.control.handle(e.Tick(), node.now)).ends == []


def test_the_search_for_a_leader_begins_when_the_last_one_was_heard() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerUp(0, standing(1, 0, "stopping")), e.PeerUp(2, standing(1, NOBODY, able=False)))
    node.now += 2 * LIMIT_S
    node.control.handle(e.Tick(), node.now)
    node.control.handle_all((e.PeerDown(0), lost_by(0, "silent")), node.now)
    node.now += LIMIT_S - 10.0
    assert Heard(node.control.handle(e.Tick(), node.now)).ends == []
    node.now += 20.0
    assert len(Heard(node.control.handle(e.Tick(), node.now)).ends) == 1
    (loss,) = (loss for loss in node.control.job.losses.values() if loss.node == 1)
    assert loss.age_s == LIMIT_S + 10.0


def test_a_job_that_has_not_begun_waits_for_its_nodes_whatever_its_deadlines_are() -> None:
    spec = structs.replace(job_spec(NODES), limits=structs.replace(LIMITS, join_s=1.0, stall_s=1.0))
    node = Controller(1, "s", NodeViews(tuple(range(NODES))))
    node.handle(e.Report(1, structs.replace(hello(1, NODES), spec=spec)), 1000.0)
    assert Heard(node.handle(e.Tick(), 1060.0)).ends == []


def test_what_trains_goes_on_without_a_leader() -> None:
    assert without_leader("running", for_s=2 * LIMIT_S, steps=True) == []


def test_a_spare_without_a_leader_stays_as_long_as_others_train() -> None:
    node = Node(2, NODES)
    node.feed(e.PeerUp(0, standing(1, NOBODY)), e.PeerUp(1, standing(1, NOBODY, able=False)))
    assert leader_of(node) == NOBODY

    def hear(*events: e.Input) -> list[m.End]:
        return Heard(node.control.handle_all(events, node.now)).ends

    node.now += LIMIT_S + 10.0
    assert hear(e.Tick()) == []
    assert hear(lost_by(0, "it stood still")) == []
    assert len(hear(lost_by(1, "it stood still"))) == 1


def test_time_in_which_a_daemon_was_suspended_does_not_count_for_the_search_of_a_leader() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerUp(0, standing(1, 0, "stopping")), e.PeerUp(2, standing(1, NOBODY, able=False)))
    node.control.handle_all((e.PeerDown(0), lost_by(0, "silent")), node.now)
    node.now += LIMIT_S + 10.0
    suspended = node.control.handle_all((e.Suspended(LIMIT_S + 10.0), e.Tick()), node.now)
    assert Heard(suspended).ends == []
    node.now += LIMIT_S - 10.0
    assert Heard(node.control.handle_all((e.Suspended(1.0), e.Tick()), node.now)).ends == []
    node.now += 10.5
    assert Heard(node.control.handle(e.Tick(), node.now)).ends == [], "a second of it was no time"
    node.now += 1.0
    assert len(Heard(node.control.handle(e.Tick(), node.now)).ends) == 1


def test_how_far_the_job_is_its_leader_says() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerUp(2, standing(1, 0, "stopping")))
    assert stage(node) == "running", "that is not for node 2 to say"
    for told in (standing(1, 0, "forming"), standing(1, 0, "ended"), standing(1, 0, "stopping", index=0)):
        node.feed(e.PeerUp(0, told))
        assert stage(node) == "running"
    node.feed(e.PeerUp(0, standing(1, 0, "stopping")))
    assert stage(node) == "stopping"


# ------------------------------------------------------------------------------------- the lease


def test_a_leader_without_its_lease_gives_no_orders() -> None:
    """A rank raises on its own node while it is cut off."""
    leader = Node(0, 5)
    leader.silent((1, 2, 3))
    assert not leader.control.job.decides
    raised = structs.replace(
        trains(0, first_generation(5), 9, "left").slots[0], cause=m.Cause(kind="raised", text="x")
    )
    state = m.AgentState(seq=9, slots=(raised,), assigned=1)
    assert leader.feed(e.Report(0, state)).orders == []
    leader.heals((1, 2, 3))
    assert [type(order) for order in leader.told.orders] == [m.Stop]


def test_a_node_whose_lease_is_over_decides_no_more_and_has_said_why() -> None:
    node = Node(1, 5)
    node.silent((0, 2, 3))
    node.wait(LEASE_S + 0.5)
    (end,) = node.told.ends
    assert end.here_only
    assert end.outcome.why == "no-quorum"
    assert "it heard 2 of 5 voters for 3.0 s" in end.outcome.reason
    assert node.told.events.count("fenced") == 1


def test_who_hears_of_the_dead_passes_it_on_and_counts_on_it() -> None:
    node = Node(0, 4)
    node.silent((2, 3))
    assert not is_held(node)
    node.feed(e.PeerUp(1, standing(1, 0, dead=(2, 3))))
    assert is_held(node)
    found = node.feed(e.PeerUp(1, standing(1, 0)))
    assert [out.standing.dead for out in found.outputs if isinstance(out, e.Meet)] == [(2, 3)]
    assert agreed(4).voters == node.control.job.known.voters
