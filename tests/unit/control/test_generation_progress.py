"""What is counted of the current generation: nothing that an agent says of an older one."""

from __future__ import annotations

from typing import Any

import pytest

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery.generation_progress import GenerationProgress
from ckptless.daemon.protocol import messages as m

NODES, GENERATION = 3, 2


def info(node: int) -> m.NodeInfo:
    return m.NodeInfo(node=node, name=f"n{node}", address="127.0.0.1", agent_port=1)


def assignment() -> m.Assignment:
    """Ranks 0 and 1 on nodes 0 and 1; node 2 is a spare."""
    return m.Assignment(
        job="4711",
        generation=GENERATION,
        term=1,
        leader=0,
        places=tuple(m.Place(node=node, slot=0) for node in (0, 1)),
        nodes=tuple(info(node) for node in range(NODES)),
        restore_step=5,
    )


def slot(phase: m.Phase = "restored", **more: Any) -> m.SlotState:
    told: dict[str, Any] = {"slot": 0, "phase": phase, "generation": GENERATION, "hooked": True, "step": 5}
    return m.SlotState(**{**told, **more})


def view(node: int, *slots: m.SlotState, frozen: int | None = None, known: bool = True) -> NodeView:
    hello = m.Introduction(info=info(node), pid=1) if known else None
    state = m.AgentState(seq=1, slots=slots, assigned=GENERATION, frozen=frozen)
    return NodeView(node, hello=hello, state=state)


def progress(*views: NodeView) -> GenerationProgress:
    return GenerationProgress.of(assignment(), {one.node: one for one in views})


def test_a_phase_of_an_older_generation_does_not_count() -> None:
    old = slot("finished", generation=GENERATION - 1, stepped=True, step=9)
    found = progress(view(0, old), view(1, slot()), view(2))
    assert not found.all_have("here")
    assert found.counts["here"] == 1
    assert found.counts["ended"] == 0
    assert found.step == 5
    assert found.newest == 9


def test_the_newest_step_of_all_is_how_far_they_are() -> None:
    assert progress(view(0, slot(step=9)), view(1, slot(step=7)), view(2)).step == 9


@pytest.mark.parametrize(
    ("phase", "reached"),
    [
        ("waiting", ["here"]),
        ("assigned", ["here"]),
        ("joined", ["here", "joined"]),
        ("restored", ["here", "joined", "restored"]),
        ("finished", ["here", "joined", "restored", "stepped", "ended"]),
        ("exited", ["here", "exited", "ended"]),
        ("left", ["here"]),
    ],
)
def test_how_far_a_phase_is(phase: m.Phase, reached: list[str]) -> None:
    found = progress(view(0, slot(phase)), view(1, slot(phase)), view(2))
    assert [name for name, count in found.counts.items() if count] == reached
    assert all(found.all_have(name) for name in reached)


def test_a_step_that_was_restored_is_not_a_new_one() -> None:
    restored, stepped = slot(stepped=False), slot(stepped=True, step=6)
    found = progress(view(0, restored), view(1, stepped), view(2))
    assert found.counts["stepped"] == 1
    assert not found.all_have("stepped")


def test_a_process_that_failed_has_not_ended_well() -> None:
    failed = slot("exited", cause=m.Cause(kind="died", text="x"), exit_code=1)
    found = progress(view(0, failed), view(1, slot("exited")), view(2))
    assert (found.counts["exited"], found.counts["ended"]) == (2, 1)
    assert [finding.rank for finding in found.findings] == [0]


def test_who_has_stopped_an_older_generation_has_not_stopped_this_one() -> None:
    found = progress(view(0, slot(), frozen=GENERATION - 1), view(1, slot(), frozen=GENERATION), view(2))
    assert found.moving == {0, 2}
    assert found.disputed
    nobody = progress(view(0, slot(), frozen=GENERATION - 1), view(1, slot()), view(2))
    assert not nobody.disputed


def test_what_an_unknown_agent_has_stopped_is_waited_for() -> None:
    found = progress(view(0, slot(), frozen=GENERATION, known=False), view(1), view(2))
    assert found.moving == {0, 1, 2}
    assert not found.disputed


def test_a_lost_node_is_not_waited_for_and_disputes_nothing() -> None:
    for frozen in (None, GENERATION):
        lost = view(0, slot(), frozen=frozen)
        lost.lost = "silent"
        found = progress(lost, view(1, slot("joined")), view(2))
        assert found.moving == {1, 2}
        assert not found.disputed
        assert [place.node for place in found.inside] == [1]
        assert [finding.kind for finding in found.findings] == ["node-lost"]


@pytest.mark.parametrize(
    ("phase", "inside"),
    [
        ("assigned", 1),
        ("joined", 1),
        ("restored", 1),
        ("finished", 1),
        ("left", 0),
        ("exited", 0),
        ("waiting", 0),
    ],
)
def test_who_is_inside(phase: m.Phase, inside: int) -> None:
    found = progress(view(0, slot(phase, hooked=False)), view(1, slot(phase)), view(2))
    assert found.inside == [m.Place(node=1, slot=0)] * inside


def test_a_node_that_is_looked_at_again_counts_once() -> None:
    nodes = {0: view(0, slot("joined")), 1: view(1, slot("joined")), 2: view(2)}
    found = GenerationProgress.of(assignment(), nodes)
    nodes[0].state = m.AgentState(seq=2, slots=(slot("restored"),), assigned=GENERATION)
    found.look(nodes, [0])
    assert (found.counts["joined"], found.counts["restored"]) == (2, 1)
    nodes[0].state = m.AgentState(seq=3, slots=(slot("left"),), frozen=GENERATION)
    found.look(nodes, [0])
    assert (found.counts["joined"], found.counts["restored"], found.counts["here"]) == (1, 0, 2)
    assert found.moving == {1, 2}
    assert found.inside == [m.Place(node=1, slot=0)]


def test_findings_are_news_once_and_stay_as_long_as_they_are_true() -> None:
    nodes = {0: view(0, slot("left", cause=m.Cause(kind="raised", text="x"))), 1: view(1, slot()), 2: view(2)}
    found = GenerationProgress.of(assignment(), nodes)
    assert [finding.kind for finding in found.take_news()] == ["raised"]
    assert found.take_news() == []
    assert [finding.kind for finding in found.findings] == ["raised"]
    nodes[0].state = m.AgentState(seq=2, slots=(slot(),), assigned=GENERATION)
    found.look(nodes, [0])
    assert found.findings == []


def test_lost_nodes_come_first_then_the_others_by_rank() -> None:
    raised = m.Cause(kind="raised", text="x")
    lost = view(1)
    lost.lost = "silent"
    found = progress(view(0, slot("left", cause=raised)), lost, view(2))
    assert [finding.kind for finding in found.findings] == ["node-lost", "raised"]


def test_a_rank_that_is_done_has_made_its_first_step_once() -> None:
    done = slot("finished", stepped=True)
    assert progress(view(0, done), view(1, done), view(2)).all_have("stepped")


def test_before_the_first_step_of_all_there_is_none() -> None:
    new = slot("joined", step=None)
    found = progress(view(0, new), view(1, new), view(2))
    assert (found.step, found.newest) == (0, 0)
