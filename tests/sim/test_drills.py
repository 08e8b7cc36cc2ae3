"""Drills at any moment, beside everything else that happens to a job: they are faults, and told as drills."""

from collections.abc import Iterator
from random import Random
from typing import get_args

import pytest

from ckptless.daemon.ckptlessd.recovery import eviction
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.model import DRILLS_OF_NODES, DRILLS_WITH_LENGTH, DrillKind

from .world import World

SEEDS = 300
BATCHES = 5
LATEST_S = 6.0
KINDS: tuple[DrillKind, ...] = get_args(DrillKind)


def someone_asks(world: World, random: Random) -> Iterator[bool]:
    """Whether there is a drill, by the rules of `ckptctl drill`; asked of any daemon of the job."""
    daemons = [daemon for _, daemon in sorted(world.daemons.items()) if daemon.alive]
    kind, target = random.choice(KINDS), random.choice(sorted(world.agents))
    if world.over or not daemons:
        return
    daemon = random.choice(daemons)
    control = daemon.control
    if control is None or control.outcome is not None or eviction.cannot_say(control) is not None:
        return
    ranks = len(control.assignment.places) if control.assignment is not None else 1
    of_node = kind in DRILLS_OF_NODES
    drill = m.Drill(
        kind=kind,
        rank=None if of_node else target % ranks,
        node=target if of_node else None,
        step=random.choice((0, 0, 4)),
        for_s=2.0 if kind in DRILLS_WITH_LENGTH else 0.0,
        uid=0,
    )
    if eviction.drill_refusal(control, drill) or control.drills.busy(control.generation, world.events.now):
        yield False
        return
    world.story.tell("drill", f"{daemon.name} is asked: {drill.what} once step {drill.step} is done")
    daemon.drill(drill)
    yield True


@pytest.mark.parametrize("batch", range(BATCHES))
def test_drills_at_any_time(batch: int) -> None:
    said: list[bool] = []
    struck = 0
    for seed in range(batch, SEEDS, BATCHES):
        world, random = World(seed), Random(seed)
        for _ in range(3):
            world.events.after(
                random.uniform(0.0, LATEST_S),
                lambda world=world, random=random: said.extend(someone_asks(world, random)),  # type: ignore[misc]
            )
        world.run()
        struck += world.struck
    assert said.count(True) >= 20
    assert False in said
    assert struck >= 15
