"""A voter whose disk takes nothing, beside a node that dies: the job goes on, or says what it waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from .faults import Shape
from .world import World

if TYPE_CHECKING:
    from collections.abc import Callable

FOR_EVER_S = 1e9


def play(nodes: int, *events: tuple[float, Callable[[World], None]]) -> World:
    """A long job without faults but these: (seconds after generation 1, what happens then)."""
    return play_world(World(3, Shape(nodes=nodes, without=frozenset(range(100)))), *events)


def play_world(world: World, *events: tuple[float, Callable[[World], None]]) -> World:
    """The same for a world that was made otherwise."""
    world.job = replace(world.job, steps=150)

    def begin() -> None:
        if not world.generation:
            world.events.after(0.1, begin)
            return
        for at_s, event in events:
            world.events.after(at_s, lambda event=event: event(world))  # type: ignore[misc]

    begin()
    world.run()
    return world


def full(node: int, for_s: float) -> Callable[[World], None]:
    def fill(world: World) -> None:
        world.faulted("disk")
        world.story.tell("fault", f"the disk of node-{node} is full for {for_s:.0f} s")
        world.full_until[node] = world.events.now + for_s
        world.events.after(min(for_s, 60.0), lambda: world.faulted("disk"))

    return fill


def dies(node: int) -> Callable[[World], None]:
    def die(world: World) -> None:
        world.faulted("node")
        world.story.tell("fault", f"node-{node} dies, dark")
        world.kill_daemon(node, dark=True, lose=True)
        world.agents[node].die(dark=True)
        world.dead_nodes.add(node)

    return die


def told(world: World, kind: str) -> list[tuple[float, str]]:
    return [(at, text) for at, _, text in world.story.lines if text.startswith(f"{kind}: ")]


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_a_full_disk_is_known_before_a_node_dies(broken: int, dead: int) -> None:
    """The exact schedule: of four nodes the disk of one is full for ever, and another one dies, dark."""
    if broken == dead:
        return
    world = play(4, (2.0, full(broken, FOR_EVER_S)), (15.0, dies(dead)))
    assert world.generation == 2
    assert world.checks.outcome is not None
    assert world.checks.outcome.state == "done", world.story.render()
    said = told(world, "vote-lost")
    assert [text for _, text in said] == [f"vote-lost: node-{broken} cannot vote: the disk is full"]


@pytest.mark.parametrize("dead", [0, 1])
def test_both_at_once_wait_for_the_disk(dead: int) -> None:
    """Of four voters two are left that can vote, and no quorum: it goes on when the disk is free again."""
    broken = 1 - dead
    world = play(4, (2.0, full(broken, 8.0)), (2.1, dies(dead)))
    assert world.checks.outcome is not None
    assert world.checks.outcome.state == "done", world.story.render()
    assert len(told(world, "vote-lost")) == 1
    ((again_s, _),) = told(world, "vote-again")
    ((recovered_s, _),) = told(world, "recovered")
    assert again_s < recovered_s < again_s + 5.0


@pytest.mark.parametrize("gap_s", [-0.1, 0.05])
def test_the_next_to_lead_has_no_disk(gap_s: float) -> None:
    """Three of five voters can vote: the next one but one leads, and nobody waits for a disk."""
    world = play(5, (2.0, full(1, FOR_EVER_S)), (2.0 + gap_s, dies(0)))
    assert world.checks.outcome is not None
    assert world.checks.outcome.state == "done", world.story.render()
    died_s = next(at for at, _, text in world.story.lines if text == "node-0 dies, dark")
    ((recovered_s, _),) = told(world, "recovered")
    assert recovered_s < died_s + 10.0
    assert len(told(world, "vote-lost")) == 1


@pytest.mark.parametrize("dead", [0, 3])
def test_a_job_that_stands_still_ends_where_too_few_can_ever_vote(dead: int) -> None:
    """Also where somebody leads: the leader's vote alone decides nothing."""
    world = play(4, (2.0, full(1, FOR_EVER_S)), (2.0, full(2, FOR_EVER_S)), (2.1, dies(dead)))
    limits = world.spec.limits
    ends = {text for _, text in told(world, "ends")}
    assert len(ends) == 3, world.story.render()
    for text in ends:
        assert "was agreed on for" in text or "was elected leader for" in text
        assert text.endswith(f" {limits.join_s + limits.stall_s:.0f} s: node-1, node-2 cannot vote")
