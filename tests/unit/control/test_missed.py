"""An agent that has missed an order, while there was no way to it, is told of it when it is heard again."""

from __future__ import annotations

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Ballot, Decree, Durable

from .lease_nodes import Heard, Node, first_generation, hello, lost_by, trains

NODES = 3


def given(found: Heard) -> list[int]:
    """Generations that the agent was handed."""
    orders = [output.order for output in found.outputs if isinstance(output, e.ToAgent)]
    return [order.assignment.generation for order in orders if isinstance(order, m.Assign)]


@pytest.mark.parametrize(("assigned", "missed"), [(None, [1]), (0, [1]), (1, [])])
def test_it_is_told_what_it_has_missed(assigned: int | None, missed: list[int]) -> None:
    node = Node(me=1, nodes=NODES)
    state = structs.replace(trains(1, first_generation(NODES), seq=5), assigned=assigned)
    assert given(node.feed(e.Report(1, state))) == missed


def ended_early(nodes: int) -> Durable:
    outcome = m.Outcome(state="stopped", exit_code=143, reason="signal 15", why="cancelled")
    known = Decree(index=1, voters=tuple(range(nodes)), outcome=outcome)
    return Durable(promised=Ballot(number=1, node=0), vote=None, known=known)


def test_again_where_that_was_lost_too() -> None:
    node = Node(me=1, nodes=NODES)
    state = structs.replace(trains(1, first_generation(NODES), seq=5), assigned=None)
    node.feed(e.Report(1, state))
    assert set(given(node.wait(3.0))) == {1}


def test_the_agent_of_a_node_that_was_given_up_is_told_to_end_when_it_is_heard_again() -> None:
    """The word went to no agent: there was no connection to it. It hears the others, and would run on."""
    node = Node(me=1, nodes=NODES)
    assert len(node.feed(lost_by(1, "its agent did not stop in 3.0 s", source="leader")).ends) == 1
    state = trains(1, first_generation(NODES), seq=5)
    (end,) = node.feed(e.Report(1, state)).ends
    assert end.here_only
    assert node.feed(e.Report(1, structs.replace(state, seq=6))).ends == [end], "that was lost, too"
    assert end.outcome.why == "node-lost"
    assert end.outcome.reason == "node-1 counts as lost: its agent did not stop in 3.0 s"


def test_the_agent_of_a_job_that_ended_before_its_first_generation_is_told_so() -> None:
    node = Node(me=1, nodes=NODES, fresh=True)
    node.control.job.agreement.durable = ended_early(NODES)
    node.feed(e.Report(1, hello(1, NODES)))
    (end,) = node.feed(e.Report(1, m.AgentState(seq=1, slots=()))).ends[-1:]
    assert end.outcome.state == "stopped"
    assert node.wait(3.0).ends.count(end) >= 2
