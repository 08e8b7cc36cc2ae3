"""A node that holds what it need not gives the memory back: real vaults and servers, no processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from ckptless.daemon.agent.versions.replicas import put_record
from ckptless.daemon.protocol import version
from ckptless.daemon.replication.protection import Item

from .vaults import Node, Nodes, payload_of, until

STEP, NBYTES = 7, 3 * version.PAGE_NBYTES
RANKS = 4


def commit(node: Node, rank: int, step: int, generation: int = 2) -> None:
    """As a rank does whose shard has no twins; of which the record matters here."""
    held = node.vault.record(rank, STEP)
    assert held is not None
    node.vault.put_record(rank, step, held)
    node.replicas.push(put_record(generation, rank, step, held))


def shards(node: Node) -> set[int]:
    return {number for what, number in node.vault.items() if what == "tensors"}


def is_open(inode: int) -> bool:
    found = False
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found |= os.fstat(int(entry.name)).st_ino == inode
    return found


async def after_a_loss(nodes: Nodes) -> None:
    """FSDP on 0 to 3 with two copies; node 1 is lost, and node 4 has its rank: 0 and 3 hold one too many."""
    for shard in range(RANKS):
        for other in range(3):
            nodes[(shard + other) % RANKS].hold(shard, STEP, payload_of(shard, STEP, NBYTES))
    await nodes[1].close()
    nodes.follow(nodes.assignment([0, 4, 2, 3], STEP, away=[1]))
    del nodes[1]
    nodes[4].hold(1, STEP, payload_of(1, STEP, NBYTES))
    assert [shards(nodes[n]) for n in (0, 3)] == [{0, 2, 3}, {1, 2, 3}]


async def commit_all(nodes: Nodes, step: int) -> None:
    """By every rank; and all holders have the records."""
    homes = (0, 4, 2, 3)
    for rank, home in enumerate(homes):
        commit(nodes[home], rank, step)
    cores = [nodes[home].replicas.core for home in homes]
    await until(
        lambda: all(
            core._newest.get(Item("record", rank), (0,))[0] == step for rank, core in enumerate(cores)
        )
    )


def test_it_is_given_back_when_all_hold_a_newer_step() -> None:
    async def play() -> None:
        async with Nodes(RANKS + 1) as nodes:
            await after_a_loss(nodes)
            for step in (STEP, STEP + 1, STEP + 2):
                await commit_all(nodes, step)
                assert {1, 2} <= shards(nodes[3])
                assert {0, 2} <= shards(nodes[0])
            await commit_all(nodes, STEP + 3)
            assert nodes[0].told("copies-given-back")
            await until(lambda: (shards(nodes[0]), shards(nodes[3])) == ({0, 1, 3}, {0, 2, 3}))
            (text,) = nodes[3].told("copies-given-back")
            assert text == "record 1, tensors 1: 49167 bytes; others hold newer steps"

    asyncio.run(play())


def test_a_frozen_agent_keeps_what_it_has_told_of() -> None:
    async def play() -> None:
        async with Nodes(RANKS + 1) as nodes:
            await after_a_loss(nodes)
            nodes[3].replicas.core.accepting = False
            for step in range(STEP + 1, STEP + 5):
                nodes[3].replicas.core.saw_commit(step)
            assert 1 in shards(nodes[3])
            nodes[3].replicas.core.accepting = True
            nodes[3].replicas.core.saw_commit(STEP + 5)
            assert 1 not in shards(nodes[3])

    asyncio.run(play())


def test_memory_that_is_being_read_is_given_back_later() -> None:
    async def play() -> None:
        async with Nodes(RANKS + 1) as nodes:
            await after_a_loss(nodes)
            found = nodes[3].vault.tensors(1, STEP)
            assert found is not None
            view, inode = found[1].view(0, 10), os.fstat(found[1].fd).st_ino
            for step in range(STEP + 1, STEP + 4):
                nodes[3].replicas.core.saw_commit(step)
            assert nodes[3].vault.tensors(1, STEP) is None
            assert is_open(inode)
            view.release()
            nodes[3].replicas.core.saw_commit(STEP + 4)
            assert nodes[3].vault.region(found[0].region) is None
            assert not is_open(inode)

    asyncio.run(play())
