"""Two nodes that live and cannot reach each other, one way or both: one gives way, and the job trains on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from .faults import LIMITS, Shape
from .test_disks import play_world, told
from .world import World

LONG_S = 90.0


def block(pairs: set[tuple[int, int]], for_s: float = LONG_S) -> Callable[[World], None]:
    def cut(world: World) -> None:
        world.faulted("cut")
        world.network.block(pairs, for_s)

    return cut


def lost(world: World) -> set[int]:
    pattern = r"node-lost: node-(\d+) .*it and node-[-, node0-9]* cannot reach each other.*"
    texts = [re.fullmatch(pattern, text) for _, text in told(world, "node-lost")]
    assert all(texts)
    return {int(text[1]) for text in texts if text is not None}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("one", "other", "loses"), [(1, 2, 2), (2, 1, 2), (0, 2, 2), (2, 0, 2), (0, 1, 1)])
def test_one_of_a_pair_gives_way(one: int, other: int, loses: int, *, both: bool) -> None:
    ways = {(one, other), (other, one)} if both else {(one, other)}
    world = play_world(World(3, Shape(nodes=4, without=frozenset(range(100)))), (2.0, block(ways)))
    assert world.checks.outcome is not None
    assert world.checks.outcome.state == "done", world.story.render()
    assert lost(world) == {loses}
    # Well before the deadline of a step.
    cut_s = next(at for at, _, text in world.story.lines if text.startswith("nothing gets through"))
    recovered = [at for at, _ in told(world, "recovered")]
    assert recovered
    assert recovered[0] - cut_s < LIMITS.stall_s
    assert world.generation == 2


def test_a_node_apart_from_two_gives_way_for_both() -> None:
    world = play_world(
        World(3, Shape(nodes=4, without=frozenset(range(100)))), (2.0, block({(1, 0), (1, 2)}))
    )
    assert world.checks.outcome is not None
    assert world.checks.outcome.state == "done", world.story.render()
    assert lost(world) == {1}


def test_what_heals_soon_costs_nobody_a_node() -> None:
    world = play_world(
        World(3, Shape(nodes=4, without=frozenset(range(100)))), (2.0, block({(1, 2)}, for_s=1.5))
    )
    assert lost(world) == set()
    assert world.generation == 1


@pytest.mark.parametrize("both", [False, True])
def test_two_of_many_that_are_no_neighbours(*, both: bool) -> None:
    """Of more than nine nodes a daemon watches some: where no step is made, it looks at the others, too."""
    nodes = 16
    world = World(3, Shape(nodes=nodes, without=frozenset(range(100))))
    far = sorted(set(range(2, nodes - 2)) - world.graph.neighbours(1))[0]
    ways = {(1, far), (far, 1)} if both else {(1, far)}
    play_world(world, (2.0, block(ways)))
    assert world.checks.outcome is not None
    assert world.checks.outcome.state == "done", world.story.render()
    assert lost(world) == {far}
    assert world.generation == 2


def test_many_that_are_apart_from_one_do_not_lose_theirs() -> None:
    """Its port is bad towards half of the nodes: it is in all of the pairs, and gives way."""
    world = World(3, Shape(nodes=16, without=frozenset(range(100))))
    play_world(world, (2.0, block({(5, other) for other in (1, 2, 7, 8, 9, 11, 12)})))
    assert world.checks.outcome is not None
    assert world.checks.outcome.state == "done", world.story.render()
    assert lost(world) == {5}
