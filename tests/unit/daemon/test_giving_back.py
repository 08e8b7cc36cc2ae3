"""A node that holds what it need not gives the memory back: real vaults and servers, no processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vaults import Node, Nodes, payload_of, until

from ckptless.daemon.agent.versions import giving_back
from ckptless.daemon.agent.versions.holders import Version
from ckptless.daemon.api import version

STEP, NBYTES = 7, 3 * version.PAGE_NBYTES
RANKS = 4


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving_back, "FIRST_S", 0.01)
    monkeypatch.setattr(giving_back, "MOST_S", 0.02)


def commit(node: Node, shard: int, step: int, generation: int = 2) -> None:
    """As a rank does whose shard has no twins."""
    if node.vault.tensors(shard, step) is None:
        node.hold(shard, step, payload_of(shard, step, NBYTES), generation=generation)
    found = node.vault.tensors(shard, step)
    assert found is not None
    pushed = Version(generation, shard, step, *found)
    node.replicas.push_tensors(pushed, frozenset({node.number}), lambda: None)


def shards(node: Node) -> set[int]:
    return {number for what, number in node.vault.items() if what == "tensors"}


class Asked:
    """How often a node has been asked who holds its shards."""

    def __init__(self, node: Node) -> None:
        self.count = 0
        answer = node.replicas.serving.on_who_holds

        def counted(ask):  # type: ignore[no-untyped-def]
            self.count += 1
            return answer(ask)

        node.replicas.serving.on_who_holds = counted

    async def again(self) -> None:
        """It is asked and answers, from now on."""
        before = self.count
        await until(lambda: self.count >= before + 2)


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


def test_it_is_given_back_when_others_hold_two_newer_steps() -> None:
    async def play() -> None:
        async with Nodes(RANKS + 1) as nodes:
            await after_a_loss(nodes)
            asked = Asked(nodes[4]), Asked(nodes[2])
            for step in (STEP, STEP + 1):
                for shard, home in enumerate((0, 4, 2, 3)):
                    commit(nodes[home], shard, step)
                for each in asked:
                    await each.again()
                assert {1, 2} <= shards(nodes[3])
                assert {0, 2} <= shards(nodes[0])
            for shard, home in enumerate((0, 4, 2, 3)):
                commit(nodes[home], shard, STEP + 2)
            await until(lambda: nodes[0].told("copies-given-back") and nodes[3].told("copies-given-back"))
            await until(lambda: (shards(nodes[0]), shards(nodes[3])) == ({0, 1, 3}, {0, 2, 3}))
            assert nodes[3].told("copies-given-back") == [
                "tensors 1: 49152 bytes; others hold newer steps",
            ]

    asyncio.run(play())


def test_a_frozen_agent_keeps_what_it_has_told_of() -> None:
    async def play() -> None:
        async with Nodes(RANKS + 1) as nodes:
            await after_a_loss(nodes)
            asked = Asked(nodes[4])
            nodes[3].replicas.serving.accepting = False
            for step in (STEP, STEP + 1, STEP + 2):
                nodes[4].replicas._giving_back.settled.held(("tensors", 1), step, {0, 2})
            await asked.again()
            assert 1 in shards(nodes[3])
            nodes[3].replicas.serving.accepting = True
            await until(lambda: 1 not in shards(nodes[3]))

    asyncio.run(play())


def test_memory_that_is_being_read_is_given_back_later() -> None:
    async def play() -> None:
        async with Nodes(RANKS + 1) as nodes:
            await after_a_loss(nodes)
            asked = Asked(nodes[4])
            found = nodes[3].vault.tensors(1, STEP)
            assert found is not None
            view, inode = found[1].view(0, 10), os.fstat(found[1].fd).st_ino
            for step in (STEP + 1, STEP + 2):
                nodes[4].replicas._giving_back.settled.held(("tensors", 1), step, {0, 2})
            await until(lambda: nodes[3].vault.tensors(1, STEP) is None)
            await asked.again()
            assert is_open(inode)
            view.release()
            await until(lambda: nodes[3].vault.region(found[0].region) is None)
            assert not is_open(inode)

    asyncio.run(play())
