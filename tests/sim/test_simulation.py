"""Whole jobs in virtual time, thousands of ways to go wrong; a failure names its seed and tells its story."""

from collections import Counter

import pytest

from .world import World, simulate

SEEDS_PER_TEST = 40


def _outcome(world: World) -> str:
    outcome = world.checks.outcome
    return f"{outcome.state} {outcome.exit_code}" if outcome is not None else "nobody left"


@pytest.mark.parametrize("first", range(0, 400, SEEDS_PER_TEST))
def test_hundreds_of_seeds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(400, 8400, 500))
def test_thousands_of_seeds(first: int) -> None:
    for seed in range(first, first + 500):
        simulate(seed)


def test_seeds_reach_what_they_are_for() -> None:
    worlds = [simulate(seed) for seed in range(400, 520)]
    outcomes = Counter(_outcome(world) for world in worlds)
    assert outcomes["done 0"] > len(worlds) / 2
    assert outcomes["failed 4"] > 0
    assert outcomes["failed 1"] > 0
    assert max(world.generation for world in worlds) > 4
    assert {fault.kind for world in worlds for fault in world.job.faults} >= {
        "leader",
        "link",
        "deaf",
        "node",
    }
    assert any(place for world in worlds for place in world.deaths)


def test_a_seed_replays_exactly() -> None:
    assert simulate(7).story.lines == simulate(7).story.lines
