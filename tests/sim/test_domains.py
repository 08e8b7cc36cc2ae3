"""Whole jobs in racks, and voters whose daemon is away replaced at once: whatever happens, nothing breaks."""

from itertools import pairwise
from random import Random

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.recovery import voters

from . import faults
from .daemons import Daemon
from .story import Violation
from .world import World

SEEDS = 70
# They are heard of by way of others for about a second, and missed by a recovery after three: in between most
# are replaced, many while they come back.
RESTART_S = (0.5, 2.2)
AWAY_S = 0.05


def simulate_in_racks(seed: int) -> World:
    """One seed. Raises Violation, with the story."""
    world, random = World(seed), Random(f"racks {seed}")
    nodes = world.spec.nodes + world.spec.spares
    domains = tuple(random.choice(("a", "b", "c", "")) for _ in range(nodes))
    world.spec = structs.replace(world.spec, domains=domains)
    try:
        world.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}\n{world.story.render()}") from violation
    return world


def test_jobs_in_racks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voters, "VOTER_AWAY_S", AWAY_S)
    monkeypatch.setattr(faults, "RESTART_S", RESTART_S)
    # Of four to six nodes all vote: none is left to replace one that is away.
    monkeypatch.setattr("ckptless.daemon.ckptlessd.consensus.quorum.MAX_VOTERS", 3)
    monkeypatch.setattr("ckptless.daemon.ckptlessd.consensus.quorum.LEAST_VOTERS", 3)
    replaced = 0
    for seed in range(SEEDS):
        world = simulate_in_racks(seed)
        decrees = list(world.checks._decrees.values())
        lost = {
            node for node in world.agents if any(lost_by(daemon, node) for daemon in world.daemons.values())
        }
        pairs = pairwise(decrees)
        replaced += sum(not set(old.voters) - set(new.voters) <= lost for old, new in pairs)
    assert replaced > 10, "it did not happen"


def lost_by(daemon: Daemon, node: int) -> bool:
    return daemon.control is not None and daemon.control.nodes[node].lost is not None
