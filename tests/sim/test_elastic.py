"""Jobs that change their size, by faults and since somebody wants it, beside all else that happens."""

import re
from collections import Counter

import pytest

from ckptless.daemon.agent.core import cuts
from ckptless.daemon.agent.core.replication import Replication
from ckptless.daemon.ckptlessd.planning import plan, resizing

from .faults import Shape
from .story import Violation
from .test_planted import Bug
from .world import World, simulate

ELASTIC = Shape(elastic=True)
SEEDS = 120
BUG_SEEDS = 400
# Rare ones, each has found a bug once: 2811, of one rank alone whose new process hangs before it says Hello,
# 12951, of a leader whose daemon starts again with a clock that was set back, and a spare far from it.
FOUND = (2811, 12951)
GENERATION = re.compile(r"generation: generation \d+ \((\S+)\)")

BUGS = (
    Bug(
        "what was set aside is forgotten at the first commit",
        Replication,
        "saw_commit",
        "if not (moved and self.accepting):",
        "if not self.accepting:",
    ),
    Bug(
        "only the newest cut is looked at",
        plan,
        "state_sources",
        "found = sources_of(_told(nodes.values(), former.cut), nowhere, progress)",
        "found = sources_of(told, places, progress)",
    ),
    Bug("nothing is set aside", cuts, "cut_moves", "if cut == wanted:", "if False:"),
    Bug("what is taken back is lost", cuts, "cut_moves", '"take-back" if', '"forget-here" if'),
    Bug("any size will do", resizing, "size", "in spec.sizes if one <=", "in range(1, 99) if one <="),
)


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once(seed: int) -> None:
    simulate(seed, ELASTIC)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("first", range(SEEDS, 4120, 500))
def test_thousands_of_seeds(first: int) -> None:
    for seed in range(first, first + 500):
        simulate(seed, ELASTIC)


def _rungs(world: World) -> list[str]:
    texts = [text for _, _, text in world.story.lines]
    return [found[1] for text in texts if (found := GENERATION.match(text))]


@pytest.mark.timeout(600)
def test_hundreds_of_seeds_reach_what_they_are_for() -> None:
    worlds = [simulate(seed, ELASTIC) for seed in range(SEEDS)]
    rungs = Counter(rung for world in worlds for rung in _rungs(world))
    assert rungs["shrink"] > 20
    assert rungs["grow"] > 10
    outcomes = Counter(world.checks.outcome.why for world in worlds if world.checks.outcome is not None)
    assert outcomes["done"] > len(worlds) / 2
    # A fault comes while the parts are taken: they are taken again, of what was set aside.
    again = [
        world for world in worlds if re.search("shrink (shrink|grow|spare|process)", " ".join(_rungs(world)))
    ]
    assert again


def seeds_until_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Return how many seeds it takes; None where they are not enough."""
    with monkeypatch.context() as patch:
        bug.plant(patch)
        for seed in range(BUG_SEEDS):
            try:
                simulate(seed, ELASTIC)
            except Violation:
                return seed + 1
            except (AssertionError, KeyError, StopIteration, IndexError, ValueError):
                # The control plane itself fell over what the bug had done.
                return seed + 1
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name.replace(" ", "-") for bug in BUGS])
def test_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = seeds_until_found(bug, monkeypatch)
    assert seeds is not None
    simulate(seeds - 1, ELASTIC)  # it was the bug
