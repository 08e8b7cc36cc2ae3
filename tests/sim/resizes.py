"""Elastic jobs: sizes that a seed draws, and people who ask for another one at any moment."""

from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptless.daemon.protocol import messages as m

if TYPE_CHECKING:
    from .world import World

LATEST_S = 12.0
MOST_ASKED = 4


def elastic(spec: m.JobSpec, chance: Random) -> m.JobSpec:
    """The same job, which may have some other sizes."""
    total = spec.nodes + spec.spares
    sizes = {spec.nodes, *chance.sample(range(1, total + 1), chance.randint(1, total))}
    sizes |= {chance.choice([size for size in range(1, total + 1) if size != spec.nodes])}
    return replace(spec, sizes=tuple(sorted(sizes)), grow_after_s=chance.choice((0.0, 0.5, 2.0)))


def schedule(world: "World", chance: Random) -> None:
    """Somebody asks for a size now and then."""
    for _ in range(chance.randint(0, MOST_ASKED)):
        at_s, size, pick = (
            chance.uniform(0.0, LATEST_S),
            chance.choice((*world.spec.sizes, None)),
            chance.random(),
        )
        world.events.after(at_s, lambda size=size, pick=pick: _ask(world, size, pick))  # type: ignore[misc]


def _ask(world: "World", size: int | None, pick: float) -> None:
    daemons = [daemon for _, daemon in sorted(world.daemons.items()) if daemon.control is not None]
    if world.over or not daemons:
        return
    daemon = daemons[int(pick * len(daemons))]
    world.story.tell("resize", f"{daemon.name} hears that the job is to have {size} nodes")
    world.injected["resize"] += 1
    daemon.resize(m.Resize(nodes=size, at_s=world.wall_clock()))
