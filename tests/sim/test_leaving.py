"""Health checks have jobs leave nodes, rightly or not, at any moment and beside everything else."""

from collections import Counter
from functools import partial
from random import Random

import pytest

from ckptless.daemon.ckptlessd.recovery.events import Leave
from ckptless.daemon.ckptlessd.recovery.leaving import Leaving

from .faults import Shape
from .story import Violation
from .test_planted import Bug
from .world import World

SEEDS = 200
BATCHES = 5
LATEST_S = 4.0
FAN = "a fan stands still"
CALM = Shape(without=frozenset(range(100)), others=False)

BUG = Bug(
    "a node is left whatever becomes of its ranks",
    Leaving,
    "due",
    "if (why := self._stays(assignment, node, leave)) is not None:",
    'if (why := "" and self._stays(assignment, node, leave)):',
)


def say(world: World, node: int, leave: Leave | None) -> None:
    daemon = world.daemons.get(node)
    if world.over or daemon is None or not daemon.alive or daemon.control is None:
        return
    world.story.tell("fault", f"{daemon.name} is {'well' if leave is None else 'not well'}")
    # The checks hold a node for sound that nobody has a reason to give up.
    world.network.ever.add(node)
    world.unwell[node] = FAN
    daemon.unwell(leave)


def run(seed: int, shape: Shape) -> tuple[World, list[int]]:
    """A run in which probes have something to say of some nodes, or of all; some take it back."""
    world, random = World(seed, shape), Random(f"health of {seed}")
    nodes = [*range(world.spec.nodes + world.spec.spares)]
    named = sorted(random.sample(nodes, random.choice((1, 1, 2, len(nodes)))))
    for node in named:
        leave = Leave(FAN, "health", at_once=random.random() < 0.5, shrink=random.random() < 0.5)
        at_s = random.uniform(0.0, LATEST_S)
        world.events.after(at_s, partial(say, world, node, leave))
        if random.random() < 0.3:
            world.events.after(at_s + random.uniform(0.0, 2.0), partial(say, world, node, None))
    world.run()
    return world, named


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_nodes_are_left_at_any_time(batch: int, elastic: bool) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        run(seed, Shape(elastic=elastic))


def test_a_probe_alone_ends_no_job() -> None:
    """Whatever it says, also of all nodes at once: where nothing else happens the job comes to its end."""
    seen: Counter[str] = Counter()
    for seed in range(50):
        world, named = run(seed, CALM)
        control = next(d.control for d in world.daemons.values() if d.alive and d.control is not None)
        outcome = control.outcome
        assert outcome is not None
        assert outcome.exit_code == 0 or world.job.sticky is not None, (seed, outcome)
        lost = {node for node, view in control.nodes.items() if view.lost_source == "health"}
        assert lost <= set(named)
        assert len(lost) <= world.spec.spares, seed
        seen["left"] += bool(lost)
        seen["prepared"] += world.prepared > 0
        seen["got ahead"] += world.got_ahead > 0
        seen["stayed"] += len(named) > len(lost)
    assert seen["left"] > 10
    assert seen["prepared"] >= seen["got ahead"] > 4
    assert seen["stayed"] > 10


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    BUG.plant(monkeypatch)
    with pytest.raises((Violation, AssertionError)):
        test_a_probe_alone_ends_no_job()
