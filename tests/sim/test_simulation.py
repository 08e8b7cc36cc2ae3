"""Whole jobs in virtual time, thousands of ways to go wrong; a failure names its seed and tells its story."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.consensus.quorum import choose_voters

from .agents import Agent
from .faults import Shape
from .world import World, simulate

ROOT = Path(__file__).parents[2]
SEEDS = 140
LATE_S = 8.0
# Rare ones, out of millions of faults; each has found a bug once.
FOUND = (
    *(20136, 100550, 101146, 102507, 102564, 102761, 102887, 105957, 205329, 1006190),
    *(600301, 600761, 602738, 605610, 5066, 5095),
    # The leader's disk is full, so that it votes no more, and not all have a connection to it.
    1489,
)


def _outcome(world: World) -> str:
    outcome = world.checks.outcome
    return f"{outcome.state} {outcome.exit_code}" if outcome is not None else "nobody left"


@pytest.mark.timeout(600)
def test_hundreds_of_seeds_reach_what_they_are_for() -> None:
    worlds = [simulate(seed) for seed in range(SEEDS)]
    outcomes = Counter(_outcome(world) for world in worlds)
    assert outcomes["done 0"] > len(worlds) / 2
    assert outcomes["failed 4"] > 0
    assert outcomes["failed 1"] > 0
    assert max(world.generation for world in worlds) > 3
    assert {fault.kind for world in worlds for fault in world.job.faults} >= {
        "leader",
        "link",
        "deaf",
        "node",
    }
    assert any(place for world in worlds for place in world.deaths)


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("seed", range(8))
def test_whoever_comes_late_finds_the_leader(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a neighbour of the leader's, nor a voter: nothing of the leader's has ever come there."""
    world = World(seed, Shape(nodes=12, without=frozenset(range(100))))
    voters = choose_voters((), set(range(12)), set(range(12)))
    late = set(range(12)) - set(voters) - world.graph.neighbours(0)
    connect, waited = Agent.connect, set[int]()

    def connect_late(agent: Agent) -> None:
        if agent.node in late - waited:
            waited.add(agent.node)
            world.events.after(LATE_S, agent.connect)
        else:
            connect(agent)

    monkeypatch.setattr(Agent, "connect", connect_late)
    world.run()
    assert late
    came = [at for at, _, text in world.story.lines if text.startswith("agent-up")]
    begun = next(at for at, _, text in world.story.lines if text.startswith("generation: generation 1 "))
    assert LATE_S < max(came) < begun < max(came) + 2.5


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_twenty_thousand_faults() -> None:
    """Of components: disks, nodes, links, partitions, daemons and Slurm."""
    command = [sys.executable, "-m", "tests.sim", "20000", "--until", "20000", "--components", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 violations\n")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, 8140, 500))
def test_thousands_of_seeds(first: int) -> None:
    for seed in range(first, first + 500):
        simulate(seed)


def test_a_seed_replays_exactly() -> None:
    assert simulate(7).story.lines == simulate(7).story.lines
