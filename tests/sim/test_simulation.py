"""Whole jobs in virtual time, thousands of ways to go wrong; a failure names its seed and tells its story."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .world import World, simulate

ROOT = Path(__file__).parents[2]
SEEDS_PER_TEST = 40
# Rare ones, out of millions of faults; each has found a bug once.
FOUND = (100550, 101146, 102507, 102564, 102761, 102887, 105957, 205329)


def _outcome(world: World) -> str:
    outcome = world.checks.outcome
    return f"{outcome.state} {outcome.exit_code}" if outcome is not None else "nobody left"


@pytest.mark.parametrize("first", range(0, 400, SEEDS_PER_TEST))
def test_hundreds_of_seeds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        simulate(seed)


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once(seed: int) -> None:
    simulate(seed)


def test_twenty_thousand_faults() -> None:
    command = [sys.executable, "-m", "tests.sim", "20000", "--until", "20000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 violations\n")


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
