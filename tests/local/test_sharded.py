"""Sharded models (FSDP2, HSDP): no rank's state is another's, and any node may be lost at any moment."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from .localrun import RANKS, Fault, Shape, check, fault

# A run has up to twenty recoveries; the first test of a kind also makes the reference run.
pytestmark = pytest.mark.timeout(600)

FEW = 70
MANY = 300


@pytest.mark.parametrize(("parallel", "overlap"), [("fsdp", "on"), ("hsdp", "off")])
def test_processes_and_nodes_at_every_place(tmp_path: Path, parallel: str, overlap: str) -> None:
    faults = [
        fault("build", "kill", 0, generation=1),
        fault("forward", "kill", 2, 0),
        fault("update", "kill", 1, 6),
        fault("backward", "raise", 3, 12),
        fault("forward", "stop", 0, 18),
        fault("commit", "node", 3, 24),
        fault("recovered", "kill", 1, after=5),
        # Of the leader.
        fault("update", "node", 0, 32),
        fault("committed", "kill", 2, 40),
        # All at once.
        *(fault("commit", "kill", rank, 48) for rank in range(RANKS)),
        fault("restore", "kill", 1, after=9),
        fault("update", "raise", 2, 56),
        fault("finish", "kill", 1, FEW),
    ]
    kinds = check(tmp_path, faults, spares=2, shape=Shape(steps=FEW, parallel=parallel, overlap=overlap))
    assert kinds["node-lost"] == 2
    assert kinds["died"] >= 6


def test_two_nodes_at_once(tmp_path: Path) -> None:
    """Each is a holder of the other's shard: both have a second one."""
    faults = [
        fault("update", "node", 1, 10),
        fault("update", "node", 2, 10),
        fault("commit", "node", 0, 30),
    ]
    assert check(tmp_path, faults, spares=3, shape=Shape(steps=FEW, parallel="fsdp"))["node-lost"] == 3


def test_two_shards_on_each_node(tmp_path: Path) -> None:
    faults = [
        fault("update", "kill", 1, 8),
        fault("commit", "node", 2, 16),
        fault("backward", "kill", 3, 24),
        fault("forward", "kill", 0, 32),
    ]
    shape = Shape(nodes=2, per_node=2, steps=FEW, parallel="fsdp")
    assert check(tmp_path, faults, spares=1, shape=shape)["node-lost"] == 1


def twenty(seed: int) -> list[Fault]:
    """Twenty faults at random places, three of them of whole nodes, one in the recovery from another."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    for n in range(19):
        kind = "node" if n % 6 == 3 else chance.choice(("kill", "kill", "raise", "stop"))
        where = chance.choice(("forward", "backward", "update", "commit", "committed"))
        faults.append(fault(where, kind, chance.randrange(RANKS), 14 * n + chance.randrange(1, 12)))
    victim = chance.randrange(RANKS)
    faults.append(fault("recovered", "kill", victim, after=chance.randrange(18)))
    return faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_twenty_faults(tmp_path: Path, parallel: str, seed: int) -> None:
    shape = Shape(steps=MANY, parallel=parallel)
    assert check(tmp_path, twenty(seed), spares=3, shape=shape)["node-lost"] == 3
