"""What a daemon passes on, repeats and writes down, whether it leads or not; and what it says of its disk."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY
from ckptless.daemon.ckptlessd.recovery.losses import DARK_FOR_GOOD_S
from ckptless.daemon.ckptlessd.recovery.snapshots import NODES_A_SECOND, REPORT_INTERVAL_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Decided, Decree
from ckptless.daemon.protocol.records import EventRecord, HoldingRecord, NodeRecord
from ckptless.daemon.replication.protection import FEW_NODES

from .lease_nodes import START_S, STEP, Heard, Node, agreed, first_generation, hello, info, lost_by, trains

NODES = 3
MANY = 2 * FEW_NODES


def meets(found: Heard) -> list[int | None]:
    return [out.node for out in found.outputs if isinstance(out, e.Meet)]


def forwards(found: Heard) -> list[e.Forward]:
    return [out for out in found.outputs if isinstance(out, e.Forward)]


def nodes_written(found: Heard) -> list[int]:
    writes = [out for out in found.outputs if isinstance(out, e.Write)]
    return sorted({row.node for write in writes for row in write.records if isinstance(row, NodeRecord)})


def state(node: int, seq: int, step: int = STEP, **more: object) -> m.AgentState:
    told = trains(node, first_generation(NODES), seq)
    slots = tuple(structs.replace(slot, step=step) for slot in told.slots)
    return structs.replace(told, slots=slots, **more)


# ------------------------------------------------------------------------------------------- passed on


def test_what_the_own_agent_has_to_say_is_said_again_every_second() -> None:
    node = Node(1, NODES)
    for _ in range(3):
        found = node.wait(REPORT_INTERVAL_S, 0.25)
        assert meets(found) == [0]
        (told,) = (out for out in found.outputs if isinstance(out, e.Meet))
        assert [type(report.message) for report in told.reports] == [m.Introduction, m.AgentState]
        assert nodes_written(found) == [1], "of itself, since no other agent has said who it is"
        assert sum(isinstance(out, e.Write) for out in found.outputs) == 1


def test_without_a_leader_the_lowest_that_lives_hears_it() -> None:
    node = Node(3, 5)
    node.feed(lost_by(0, "gone"), e.PeerDown(1))
    assert 2 in meets(node.wait(0.25, 0.25)) or 2 in meets(node.wait(1.0, 0.25))
    assert 1 not in meets(node.told)


def test_the_lowest_itself_tells_the_next_one() -> None:
    node = Node(1, NODES)
    node.quiet = {2}
    node.feed(lost_by(0, "gone"))
    node.forget()
    assert 2 in meets(node.wait(REPORT_INTERVAL_S, 0.25))
    assert 1 not in meets(node.told)


def test_whoever_is_alone_tells_nobody() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerDown(0), e.PeerDown(2))
    node.forget()
    assert meets(node.wait(2 * REPORT_INTERVAL_S, 0.25)) == []


def test_after_the_end_nothing_is_said_again() -> None:
    node = Node(1, NODES)
    outcome = m.Outcome(state="done", exit_code=0, reason="")
    node.feed(e.Said(0, Decided(decree=Decree(index=2, voters=(0, 1, 2), outcome=outcome))))
    node.forget()
    assert meets(node.wait(3 * REPORT_INTERVAL_S, 0.25)) == []


def test_a_leader_that_is_heard_hears_it_and_no_lower_node() -> None:
    node = Node(1, 4, leader=2)
    assert meets(node.wait(1.0, 0.25)) == [2]


def test_before_its_agent_has_come_a_daemon_says_nothing() -> None:
    node = Node(1, NODES, fresh=True)
    node.feed(e.PeerUp(2, e.Standing(1, NOBODY, "forming", index=0)))
    assert meets(node.wait(3 * REPORT_INTERVAL_S, 0.25)) == []
    introduced = m.Introduction(info=info(2), pid=1)
    node.feed(e.Report(2, introduced))
    assert node.control.job.nodes[2].hello == introduced
    assert node.control.job.spec is None


def test_an_agent_s_words_are_a_line_of_the_story_once() -> None:
    node = Node(1, NODES)
    said = m.AgentEvent(level="warning", kind="slow-disk", text="it takes a second", generation=1)
    assert node.feed(e.Report(1, said)).events == ["slow-disk"]
    assert node.feed(e.Report(2, said)).events == [], "node 2's daemon writes it"


def test_each_line_of_the_story_has_a_name_of_its_own_and_says_where_it_belongs() -> None:
    node = Node(1, NODES)
    said = m.AgentEvent(level="info", kind="k", text="t", generation=5)
    found = node.feed(e.Report(1, said), e.Report(1, said), e.NotSaved("it is full"))
    writes = [out for out in found.outputs if isinstance(out, e.Write)]
    assert all(write.share for write in writes), "each daemon's ledger has all of it"
    rows = [row for write in writes for row in write.records if isinstance(row, EventRecord)]
    assert len({row.event for row in rows}) == len(rows) == 3
    assert {(row.job, row.node) for row in rows} == {("4711", 1)}
    assert [row.generation for row in rows] == [5, 5, 1]
    before = Node.begun(NODES)
    assert before.feed(e.NotSaved("full")).events == ["vote-lost"]
    first = Node(1, NODES, fresh=True)
    first.control = Controller(1, "s", {number: NodeView(number) for number in range(NODES)})
    writes = [out for out in first.feed(e.NotSaved("full")).outputs if isinstance(out, e.Write)]
    (row,) = (row for write in writes for row in write.records if isinstance(row, EventRecord))
    assert (row.job, row.generation) == ("", None), "of no job that is known, and before any generation"


def test_an_agent_that_comes_again_is_not_up_again() -> None:
    node = Node.started_again(1, NODES, 0, START_S)
    assert node.told.events.count("agent-up") == 1
    hello = node.control.job.nodes[1].hello
    assert isinstance(hello, m.AgentHello)
    assert node.feed(e.Report(1, structs.replace(hello, pid=999))).events == []
    assert node.feed(e.Report(2, structs.replace(hello, pid=999))).events == []


def test_the_options_of_a_job_are_those_that_were_heard_first() -> None:
    node = Node(1, NODES)
    before, mine = node.control.job.spec, node.control.job.nodes[1].hello
    assert isinstance(mine, m.AgentHello)
    other = structs.replace(mine, spec=structs.replace(mine.spec, saved_step=9))
    node.feed(e.Report(2, other))
    assert node.control.job.spec == before != other.spec


def test_the_leader_needs_no_more_of_an_agent_than_who_it_is() -> None:
    node = Node(1, NODES)
    hello = node.control.job.nodes[1].hello
    assert isinstance(hello, m.AgentHello)
    (forward,) = forwards(node.feed(e.Report(1, hello)))
    introduction = m.Introduction(info=hello.info, pid=hello.pid, brought=hello.brought)
    assert forward == e.Forward(0, e.Report(1, introduction))


def test_who_lacks_a_decree_is_sent_it_and_who_has_a_newer_one_is_asked() -> None:
    node = Node(1, NODES)
    found = node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=0)))
    assert e.Tell(2, Decided(decree=agreed(NODES))) in found.outputs
    assert meets(found) == [2], "and where this one stands"
    found = node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=1)))
    assert (meets(found), [out for out in found.outputs if isinstance(out, e.Tell)]) == ([], [])
    found = node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=2)))
    assert meets(found) == [2]


def test_who_was_only_heard_of_is_not_reached() -> None:
    node = Node(1, NODES)
    node.feed(e.PeerDown(2), e.PeerUp(2, e.Standing(1, 0, "running", index=1), direct=False))
    assert node.control.job.reachable == {0, 1}
    node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=1)))
    assert node.control.job.reachable == {0, 1, 2}


def test_whom_it_cannot_reach_the_leader_hears() -> None:
    node = Node(1, NODES)
    found = node.feed(e.Apart(frozenset({2})))
    assert [(out.node, out.standing.apart) for out in found.outputs if isinstance(out, e.Meet)] == [(0, (2,))]
    assert meets(Node(0, NODES).feed(e.Apart(frozenset({2})))) == []


def test_a_connection_is_answered_by_all_that_there_is_to_know() -> None:
    node = Node(1, NODES)
    found = node.feed(e.Connected(2))
    (told,) = (out for out in found.outputs if isinstance(out, e.Meet))
    assert told.node == 2
    assert [type(report.message) for report in told.reports] == [m.AgentHello, m.AgentState]


# ---------------------------------------------------------------------------------------- of many nodes


def follower_of_many() -> Node:
    """Node 1 of many that train under node 0."""
    return Node(1, MANY)


def test_of_many_nodes_a_new_step_alone_is_told_in_turns() -> None:
    node = follower_of_many()
    told = [len(forwards(node.feed(e.Report(1, state(1, 10 + n, STEP + n))))) for n in range(5)]
    assert sum(told) <= 1
    node.now += MANY / NODES_A_SECOND
    (forward,) = forwards(node.feed(e.Report(1, state(1, 20, STEP + 20))))
    assert isinstance(forward.report.message, m.AgentState)
    assert forward.report.message.slots[0].step == STEP + 20
    cause = m.Cause(kind="raised", text="x")
    slot = structs.replace(state(1, 21).slots[0], cause=cause)
    assert len(forwards(node.feed(e.Report(1, structs.replace(state(1, 21), slots=(slot,)))))) == 1
    frozen = structs.replace(state(1, 22), frozen=1)
    assert len(forwards(node.feed(e.Report(1, frozen)))) == 1


def test_of_many_nodes_each_has_its_turn_once_in_a_while_and_not_all_at_once() -> None:
    nodes = 4 * NODES_A_SECOND
    turns: list[list[float]] = []
    for me in (1, 1 + nodes // 2):
        node, told = Node(me, nodes), list[float]()
        for n in range(96):
            node.now = START_S + 0.125 * n
            if forwards(node.feed(e.Report(me, state(me, 10 + n, STEP + n)))):
                told.append(node.now)
        assert all(b - a == 4.0 for a, b in pairwise(told[-3:])), "each fourth second"
        turns.append(told[-3:])
    assert (turns[0][-1] - turns[1][-1]) % 4.0 == 2.0


def test_of_many_nodes_an_agent_s_words_are_passed_on_at_once() -> None:
    node = follower_of_many()
    said = m.AgentEvent(level="info", kind="k", text="t", generation=1)
    assert [forward.report.message for forward in forwards(node.feed(e.Report(1, said)))] == [said]


def test_of_many_nodes_a_frozen_one_tells_all_at_once() -> None:
    node = follower_of_many()
    for step in range(4):
        told = state(1, 10 + step, STEP + step, frozen=1)
        (forward,) = forwards(node.feed(e.Report(1, told)))
        assert isinstance(forward.report.message, m.AgentState)
        assert forward.report.message.slots == told.slots


def test_of_many_nodes_what_is_held_is_not_told_with_every_step() -> None:
    node = follower_of_many()
    held = m.Copies(tensors=(), records=(), nbytes=0)
    node.now += 1.0
    (forward,) = forwards(node.feed(e.Report(1, state(1, 10, STEP + 1, copies=held))))
    assert isinstance(forward.report.message, m.AgentState)
    assert forward.report.message.copies is None
    assert node.control.job.nodes[1].copies is not None


def test_of_many_nodes_each_writes_its_own_row_and_the_leader_those_with_news() -> None:
    node = follower_of_many()
    node.feed(e.Report(5, m.Introduction(info=info(5), pid=1)), e.Report(5, state(5, 10)))
    assert nodes_written(node.wait(REPORT_INTERVAL_S, 0.5)) == [1]
    leader = Node(0, MANY)
    leader.wait(2 * REPORT_INTERVAL_S, 0.5)
    leader.feed(e.Report(5, state(5, 10)), e.Report(7, state(7, 10)))
    assert nodes_written(leader.wait(REPORT_INTERVAL_S, 0.5)) == [0, 5, 7]
    assert nodes_written(leader.wait(REPORT_INTERVAL_S, 0.5)) == [0]


def test_news_of_more_nodes_than_are_written_in_a_second_are_written_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Node(0, MANY)
    leader.wait(2 * REPORT_INTERVAL_S, 0.5)
    monkeypatch.setattr("ckptless.daemon.ckptlessd.recovery.snapshots.NODES_A_SECOND", 2)
    leader.feed(*(e.Report(node, state(node, 10)) for node in (5, 7, 9)))
    assert nodes_written(leader.wait(REPORT_INTERVAL_S, 0.5)) == [0, 5, 7]
    assert nodes_written(leader.wait(REPORT_INTERVAL_S, 0.5)) == [0, 9]


def test_what_is_held_is_written_where_it_has_changed() -> None:
    def holdings(found: Heard) -> int:
        writes = [out for out in found.outputs if isinstance(out, e.Write)]
        return sum(isinstance(row, HoldingRecord) for write in writes for row in write.records)

    node = Node(1, NODES)
    held = m.Copies(tensors=(), records=(), nbytes=0)
    node.feed(e.Report(1, state(1, 10, copies=held)), e.Report(2, state(2, 10, copies=held)))
    assert holdings(node.wait(REPORT_INTERVAL_S, 0.5)) == 1
    assert holdings(node.wait(3 * REPORT_INTERVAL_S, 0.5)) == 0
    leader = Node(0, NODES)
    leader.feed(e.Report(1, state(1, 10, copies=held)), e.Report(2, state(2, 10, copies=held)))
    assert holdings(leader.wait(REPORT_INTERVAL_S, 0.5)) == 2


# -------------------------------------------------------------------------------------------- no step


def test_how_long_the_own_ranks_have_made_no_step() -> None:
    node = Node(1, NODES)
    assert node.control.job.still_s(START_S + 4.0) == 4.0
    node.now = START_S + 2.0
    node.feed(e.Report(1, state(1, 10)))
    assert node.control.job.still_s(START_S + 4.0) == 4.0, "it was no new step"
    node.feed(e.Report(1, state(1, 11, STEP + 1)), e.Report(0, state(0, 11, STEP + 2)))
    assert node.control.job.still_s(START_S + 4.0) == 2.0
    node.now = START_S + 3.0
    node.feed(e.Report(0, state(0, 12, STEP + 3)))
    assert node.control.job.still_s(START_S + 4.0) == 2.0, "that was a step of another node"
    both = trains(1, first_generation(NODES), 12)
    slots = (structs.replace(both.slots[0], step=STEP + 1), structs.replace(both.slots[0], slot=1))
    node.feed(e.Report(1, structs.replace(both, slots=slots)))
    assert node.control.job.still_s(START_S + 4.0) == 2.0, "of two ranks the one that is behind is no news"
    node.feed(e.OrderFrom(0, 1, m.Stop(generation=1, reason="x")))
    assert node.control.job.still_s(START_S + 4.0) == 0.0
    first = Node.begun(NODES)
    assert first.control._leading.step == 0
    first.now = START_S + 3.0
    first.feed(e.Report(0, state(0, 10, 1)))
    assert first.control.job.still_s(START_S + 4.0) == 1.0, "a step is a step, the first one too"
    spare = Node(2, NODES)
    assert spare.control.job.still_s(START_S + 4.0) == 0.0


# -------------------------------------------------------------------------------------------- the disk


def test_a_bad_disk_is_said_once_and_so_is_its_end() -> None:
    node = Node(1, NODES)
    assert [told.able for told in node.feed(e.NotSaved("it is full")).meetings] == [False]
    node.feed(e.NotSaved("it is full"))
    assert node.told.events == ["vote-lost"]
    assert [told.able for told in node.told.meetings] == [False]
    assert node.control.job.unable == {1}
    node.forget()
    for _ in range(2):
        node.feed(e.Saved())
    assert node.told.events == ["vote-again"]
    assert [told.able for told in node.told.meetings] == [True]
    assert node.control.job.unable == set()


def test_who_has_forgotten_what_it_promised_cannot_vote_again() -> None:
    views = {node: NodeView(node) for node in range(NODES)}
    node = Node(1, NODES)
    node.control = Controller(1, "s", views, node.control.job.agreement.durable, may_vote=False)
    found = Heard(node.control.handle(e.NotSaved("it is full"), START_S))
    found.outputs += node.control.handle(e.Saved(), START_S)
    assert found.events == []
    assert node.control.job.unable == {1}


# ------------------------------------------------------------------------------------------ lost nodes


def test_a_lost_node_that_is_heard_again_is_told_of_once_by_the_leader() -> None:
    for me, told in ((0, ["node-returned"]), (1, [])):
        node = Node(me, NODES)
        node.feed(lost_by(2, "silent"))
        node.forget()
        for _ in range(2):
            node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=1)))
        assert [kind for kind in node.told.events if kind == "node-returned"] == told


def test_whom_a_daemon_waits_for_at_the_beginning() -> None:
    node = Node(1, NODES, fresh=True)
    node.control = Controller(1, "s", {number: NodeView(number) for number in range(NODES)})
    assert node.control._snapshots.waits_for == [0, 2]
    node.feed(e.PeerUp(2, e.Standing(0, NOBODY, "forming", index=0)))
    assert node.control._snapshots.waits_for == [0], "its daemon knows whether its agent is up"
    node.feed(lost_by(0, "gone"))
    assert node.control._snapshots.waits_for == []
    node.feed(e.PeerDown(2))
    assert node.control._snapshots.waits_for == [2]
    node.feed(e.Report(2, m.Introduction(info=info(2), pid=1)))
    assert node.control._snapshots.waits_for == [], "its agent is up, whatever became of its daemon"


def test_the_leader_waits_for_agents_of_which_it_has_not_heard_though_their_daemons_are_there() -> None:
    node = Node(0, NODES, fresh=True)
    node.control = Controller(0, "s", {number: NodeView(number) for number in range(NODES)})
    node.feed(*(e.PeerUp(other, e.Standing(0, NOBODY, "forming", index=0)) for other in node.others))
    node.feed(*(e.Report(one, hello(one, NODES)) for one in (0, 1)))
    node.wait(5.0)
    assert (node.control.job.leads, node.control.job.stage) == (True, "forming")
    assert node.control._snapshots.waits_for == [2]
    node.feed(lost_by(2, "its agent is gone"))
    assert node.control.job.stage == "joining", "who is lost is not waited for"


def test_what_the_own_node_had_at_last_is_written_with_the_end() -> None:
    node = Node(1, NODES)
    outcome = m.Outcome(state="done", exit_code=0, reason="")
    found = node.feed(e.Said(0, Decided(decree=Decree(index=2, voters=(0, 1, 2), outcome=outcome))))
    assert nodes_written(found) == [1]
    assert found.ends == [m.End(outcome=outcome)]
    kinds = [row for out in found.outputs if isinstance(out, e.Write) for row in out.records]
    assert not [row for row in kinds if isinstance(row, EventRecord)]


def test_an_end_before_any_agent_has_come_is_learned_too() -> None:
    views = {node: NodeView(node) for node in range(NODES)}
    control = Controller(me=1, session="s", nodes=views, durable=None)
    outcome = m.Outcome(state="failed", exit_code=4, reason="x")
    decree = Decree(index=1, voters=(0, 1, 2), outcome=outcome)
    control.handle(e.Said(0, Decided(decree=decree)), START_S)
    assert control.job.outcome == outcome


def test_a_leader_tells_itself_nothing_again() -> None:
    node = Node(0, NODES)
    node.feed(lost_by(1, "gone"))
    found = node.wait(5.0)
    assert sum(isinstance(order, m.Stop) for order in found.orders) > 1
    assert not forwards(found)


def dark() -> Node:
    """The leader, which has lost node 2: nothing on it answers."""
    node = Node(0, NODES)
    node.feed(lost_by(2, "silent", dark=True))
    return node


def test_a_node_that_stays_dark_is_gone_for_the_cluster_also_where_the_job_ends_before_that() -> None:
    node = dark()
    node.wait(DARK_FOR_GOOD_S + 1.0, 0.5)
    assert node.told.dark_states == [(2, "dark"), (2, "gone")]
    node = dark()
    node.wait(1.0)
    node.feed(e.Report(0, m.Cancel(exit_code=143, reason="scancel")))
    assert node.outcome is not None
    assert node.told.dark_states == [(2, "dark"), (2, "gone")]


def test_a_dark_node_that_is_heard_again_was_away_for_so_long() -> None:
    for after_s, away in ((12.0, "nothing on it answered for 12 s, and it lives"), (40.0, "answered, and")):
        node = dark()
        node.wait(after_s, 0.5)
        found = node.feed(e.PeerUp(2, e.Standing(1, 0, "running", index=1)))
        (told,) = (out for out in found.outputs if isinstance(out, e.NodeIsDark))
        assert told.state == "back"
        assert away in told.reason
