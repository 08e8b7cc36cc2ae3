"""Copies that went with their holders are made again at once: real vaults and servers, no commits."""

from __future__ import annotations

import asyncio

import pytest

from ckptless.daemon.agent.versions.store import Version
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError
from ckptless.daemon.protocol.peers import messages as p

from .vaults import DEADLINE_S, Node, Nodes, payload_of, until

STEP, NBYTES = 7, 5 * version.PAGE_NBYTES + 100
RANKS = 4


def holders(nodes: Nodes, shard: int, step: int = STEP) -> set[int]:
    """Return who has a shard's tensors, sound, and the record of its rank."""
    return {
        number
        for number, node in nodes.items()
        if node.payload(shard, step) == payload_of(shard, step, NBYTES)
        and node.vault.record(shard, step) is not None
    }


def hold_as_fsdp(nodes: Nodes) -> None:
    """Each shard on its node and the next two."""
    for shard in range(RANKS):
        for other in range(3):
            nodes[(shard + other) % RANKS].hold(shard, STEP, payload_of(shard, STEP, NBYTES))


def version_of(node: Node, generation: int) -> Version:
    found = node.vault.tensors(0, STEP)
    assert found is not None
    return Version(generation, 0, STEP, *found)


def test_a_lost_nodes_copies_are_made_again_without_a_commit() -> None:
    async def play() -> None:
        async with Nodes(RANKS + 1) as nodes:
            hold_as_fsdp(nodes)
            await nodes[1].close()
            nodes.follow(nodes.assignment([0, 4, 2, 3], STEP, away=[1]))
            del nodes[1]
            await until(lambda: sum(len(node.told("copies-remade")) for node in nodes.values()) == 3)
            # The home of shard 1, node 4, gets it for its rank, which is not there here.
            assert [holders(nodes, shard) for shard in range(RANKS)] == [
                {0, 2, 3},
                {0, 2, 3},
                {0, 2, 3, 4},
                {0, 3, 4},
            ]
            assert any(
                "step 7: tensors of shard 0; record of rank 0" in t for t in nodes[0].told("copies-remade")
            )

    asyncio.run(play())


def test_a_holder_that_no_generation_ends_with_is_replaced_at_once() -> None:
    """A spare is lost: nobody stops for that, and there may be no next commit for long."""

    async def play() -> None:
        async with Nodes(4) as nodes:
            nodes[0].hold(0, STEP, payload_of(0, STEP, NBYTES))
            nodes.follow(nodes.assignment([0], None, generation=1))
            acked: list[int] = []
            nodes[0].replicas.push_tensors(version_of(nodes[0], 1), frozenset({0}), lambda: acked.append(1))
            await until(lambda: acked)
            assert {n for n in nodes if nodes[n].payload(0, STEP)} == {0, 1, 2}
            await nodes[2].close()
            await until(lambda: nodes[3].payload(0, STEP))
            assert nodes[3].payload(0, STEP) == payload_of(0, STEP, NBYTES)
            await until(lambda: nodes[0].told("copies-remade"))
            assert acked == [1], "a commit is acked once"

    asyncio.run(play())


def test_the_same_tensors_are_not_taken_from_two_nodes_at_once() -> None:
    async def play() -> None:
        async with Nodes(3) as nodes:
            for number in (0, 1):
                nodes[number].hold(0, STEP, payload_of(0, STEP, NBYTES))
            nodes.follow(nodes.assignment([0], STEP))
            rooms: list[int] = []
            room = nodes[2].vault.room

            def counted(shard: int, nbytes: int):  # type: ignore[no-untyped-def]
                rooms.append(shard)
                return room(shard, nbytes)

            nodes[2].vault.room = counted  # type: ignore[method-assign]
            acked: list[int] = []
            for number in (0, 1):
                one = nodes[number].replicas
                one.push_tensors(
                    version_of(nodes[number], 2),
                    frozenset({number}),
                    lambda number=number: acked.append(number),  # type: ignore[misc]
                )
            await until(lambda: sorted(acked) == [0, 1])
            assert rooms == [0]

    asyncio.run(play())


def test_who_waits_for_the_same_tensors_does_not_wait_for_their_givers_next_word() -> None:
    """The home's commit would wait as long as whoever made the copies again has nothing else to give."""

    async def play() -> None:
        async with Nodes(3) as nodes:
            for number in (0, 1):
                nodes[number].hold(0, STEP, payload_of(0, STEP, NBYTES))
            nodes.follow(nodes.assignment([0], None, generation=1))
            info = nodes[2].info
            links = [await nodes[number].replicas.dial(info) for number in (0, 1)]
            found = nodes[0].vault.tensors(0, STEP)
            assert found is not None
            at, region = found
            with region.view(at.offset, version.PAGE_NBYTES) as view:
                offer = p.OfferTensors(generation=1, header=bytes(view))
            digest, transfers = at.digest, nodes[2].replicas.serving._transfers
            links[0].send(offer)
            assert await links[0].receive() == p.TensorsAnswer(answer="wanted")
            links[1].send(offer)
            await until(lambda: transfers[digest]._waiters)
            links[0].send(p.PutTensors())
            with region.view(at.offset + version.PAGE_NBYTES, NBYTES) as view:
                await links[0].send_bulk(view)
            async with asyncio.timeout(DEADLINE_S):
                answers = [await link.receive() for link in links]
            assert answers == [p.TensorsAnswer(answer="held")] * 2
            for link in links:
                link.close()

    asyncio.run(play())


def test_what_is_bad_is_not_given_to_others() -> None:
    """Said, and the copies that there are stay as they are."""

    async def play() -> None:
        async with Nodes(3) as nodes:
            nodes[0].hold(0, STEP, payload_of(0, STEP, NBYTES))
            nodes[0].spoil(0, STEP)
            nodes.follow(nodes.assignment([0], STEP))
            await until(lambda: nodes[0].told("copies-not-remade"))
            assert nodes[0].told("bad-version")
            # Whoever is sent it refuses it; the other may not be sent it any more.
            others = (nodes[1], nodes[2])
            assert any(node.told("refused-version") for node in others)
            assert all(node.payload(0, STEP) is None for node in others)

    asyncio.run(play())


def test_payloads_are_verified() -> None:
    """Of the helper itself."""
    node = Node(0, 2)
    node.hold(0, STEP, payload_of(0, STEP, NBYTES))
    node.spoil(0, STEP)
    with pytest.raises(BadVersionError):
        node.payload(0, STEP)
    node.vault.close()
