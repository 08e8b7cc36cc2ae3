"""Elastic jobs: sizes that a seed draws, people who ask for others, and nodes that come late or never."""

from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptless.daemon.launch.late import LateNodes
from ckptless.daemon.protocol import messages as m

if TYPE_CHECKING:
    from .world import World

LATEST_S = 12.0
FIXED_CHANCE, NEVER_CHANCE = 0.3, 0.15
LATEST_COME_S = 8.0
MOST_ASKED = 4


def elastic(spec: m.JobSpec, chance: Random) -> m.JobSpec:
    """The same job, which may have some other sizes."""
    late = chance.choice((0, 0, 2, 4))
    total = spec.nodes + spec.spares + late
    sizes = {spec.nodes, *chance.sample(range(1, total + 1), chance.randint(1, total))}
    sizes |= {chance.choice([size for size in range(1, total + 1) if size != spec.nodes])}
    if late and chance.random() < FIXED_CHANCE:
        # A job of one size, which waits for another node where it has no spare.
        sizes = set()
    return replace(
        spec,
        sizes=tuple(sorted(sizes)),
        grow_after_s=chance.choice((0.0, 0.5, 2.0)),
        late=late,
        draw_s=chance.choice((0.0, 4.0, 15.0)),
    )


class Drawing:
    """What a launcher does, and Slurm: nodes come late, or never, or their agents end at once."""

    def __init__(self, world: "World") -> None:
        spec = world.spec
        self._world, self._chance = world, Random(f"late nodes of {world.seed}")
        self._late = LateNodes(spec.nodes + spec.spares, spec.late)
        self._up: set[int] = set()
        self._ended: set[int] = set()

    def asked(self, wanted: int) -> None:
        """So many should be there."""
        for _ in range(self._late.missing(wanted, self._up, self._ended)):
            node = self._late.start()
            fate = self._chance.random()
            after_s = self._chance.uniform(0.05, LATEST_COME_S)
            if fate < NEVER_CHANCE:
                self._world.events.after(after_s, lambda node=node: self._ended.add(node))  # type: ignore[misc]
            else:
                self._world.events.after(after_s, lambda node=node: self._comes(node))  # type: ignore[misc]

    def _comes(self, node: int) -> None:
        world = self._world
        if world.over or node in world.dead_nodes | world.witness.down:
            return
        if world.network.broken:
            # It would be on no side of a cut.
            world.events.after(0.5, lambda: self._comes(node))
            return
        world.story.tell("late", f"node-{node} comes")
        world.injected["late"] += 1
        world.faulted("late")
        self._up.add(node)
        world.begin_node(node)


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
    daemon.resize(m.Wish(nodes=size, at_s=world.wall_clock()))
