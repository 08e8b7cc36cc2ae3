"""Nodes that live are taken out of a job at any moment, beside everything else that happens to it."""

from collections.abc import Iterator
from random import Random

import pytest

from ckptless.daemon.ckptlessd.recovery import eviction
from ckptless.daemon.ckptlessd.recovery.events import Leave, NodeLost
from ckptless.daemon.protocol.records import FaultSource

from .world import World

SEEDS = 300
BATCHES = 5
LATEST_S = 6.0
WORDS: tuple[FaultSource, ...] = ("operator", "health", "slurm")


def someone_says(world: World, random: Random) -> Iterator[bool]:
    """Whether a node was taken out, by the rules of `ckptctl evict`; asked of any daemon of the job."""
    daemons = [daemon for _, daemon in sorted(world.daemons.items()) if daemon.alive]
    node, source = random.choice(sorted(world.agents)), random.choice(WORDS)
    if world.over or not daemons:
        return
    daemon = random.choice(daemons)
    control = daemon.control
    if control is None or control.outcome is not None or control.nodes[node].lost is not None:
        return
    if eviction.cannot_say(control) is not None:
        return
    if eviction.refusal(control, node, force=False) is not None:
        yield False
        return
    world.story.tell("fault", f"{daemon.name} hears that node-{node} is to go ({source})")
    world.faulted("evict")
    # The checks hold a node for sound that nobody has a reason to give up.
    world.network.ever.add(node)
    if source == "operator" and random.random() < 0.5:
        daemon.leave(node, Leave("somebody wants it", source, shrink=True))
    else:
        daemon.lose(NodeLost(node, "somebody says so", 0.0, source=source))
    yield True


@pytest.mark.parametrize("batch", range(BATCHES))
def test_nodes_are_taken_out_at_any_time(batch: int) -> None:
    said: list[bool] = []
    for seed in range(batch, SEEDS, BATCHES):
        world, random = World(seed), Random(seed)
        for _ in range(2):
            world.events.after(
                random.uniform(0.0, LATEST_S),
                lambda world=world, random=random: said.extend(someone_says(world, random)),  # type: ignore[misc]
            )
        world.run()
    assert said.count(True) >= 20
    assert False in said
