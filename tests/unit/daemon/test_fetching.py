"""A newcomer gets a shard from all its holders at once, whatever becomes of some of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ckptless.daemon.agent.versions import shares
from ckptless.daemon.agent.versions.serving import Serving
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.bulk import LOW_WATER_NBYTES, Pump

from .vaults import Nodes, payload_of, until

STEP, PAGE = 7, version.PAGE_NBYTES
NBYTES = 40 * PAGE + 77
PAYLOAD = payload_of(0, STEP, NBYTES)
HOLDERS = (1, 2, 3)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEAST_NBYTES", PAGE)
    monkeypatch.setattr(shares, "MOST_NBYTES", PAGE)


@contextlib.asynccontextmanager
async def world(*, twins: bool = False) -> AsyncIterator[Nodes]:
    """Node 0 has nothing, the others all of it; `twins`: each has made its own version of it."""
    async with Nodes(4) as nodes:
        for number in HOLDERS:
            nodes[number].hold(0, STEP, PAYLOAD, rank=number if twins else 0)
        nodes.follow(nodes.assignment([0], STEP))
        yield nodes


async def fetch(nodes: Nodes) -> bytes | None:
    await nodes[0].replicas.fetch_tensors(0, STEP, HOLDERS)
    return nodes[0].payload(0, STEP)


def on_chunk(monkeypatch: pytest.MonkeyPatch, number: int, then: Any) -> list[p.GetChunks]:
    """Before node `number` gives a chunk: `then(its serving, so many asked for)`. Who gave what to whom."""
    asked: list[p.GetChunks] = []
    give = Serving._give_chunks

    async def given(self: Serving, link: Any, wanted: p.GetChunks) -> None:
        if self._me == number:
            asked.append(wanted)
            await then(link, len(asked))
        await give(self, link, wanted)

    monkeypatch.setattr(Serving, "_give_chunks", given)
    return asked


async def nothing(_link: Any, _count: int) -> None:
    """Goes on as ever."""


@pytest.mark.parametrize("twins", [False, True])
def test_all_of_them_give_a_part(monkeypatch: pytest.MonkeyPatch, twins: bool) -> None:
    async def play() -> None:
        async with world(twins=twins) as nodes:
            counts = dict.fromkeys(HOLDERS, 0)
            give = Serving._give_chunks

            async def counted(self: Serving, link: Any, wanted: p.GetChunks) -> None:
                counts[self._me] += 1
                await give(self, link, wanted)

            monkeypatch.setattr(Serving, "_give_chunks", counted)
            assert await fetch(nodes) == PAYLOAD
            assert all(counts.values()), counts
            assert sum(counts.values()) == 41, "each piece is asked for once"
            assert nodes[0].events == []

    asyncio.run(play())


@pytest.mark.parametrize("at", [1, 2, 5])
def test_one_that_dies_leaves_its_chunks_to_the_others(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    async def dies(link: Any, count: int) -> None:
        if count == at:
            link.close()

    async def play() -> None:
        async with world() as nodes:
            asked = on_chunk(monkeypatch, 2, dies)
            assert await fetch(nodes) == PAYLOAD
            assert len(asked) <= at + 1
            assert len(nodes[0].told("source-failed")) == 1

    asyncio.run(play())


def test_a_bad_chunk_is_found_by_its_holder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its chunks are bad, so that whichever it gives is one; it holds it no more then."""

    async def play() -> None:
        async with world() as nodes:
            for offset in range(1, NBYTES, PAGE):
                nodes[2].spoil(0, STEP, -offset)
            asked = on_chunk(monkeypatch, 2, nothing)
            assert await fetch(nodes) == PAYLOAD
            assert [wanted.verify for wanted in asked].count(True) >= 1
            assert len(nodes[2].told("bad-version")) == 1
            assert nodes[2].vault.tensors(0, STEP) is None
            assert nodes[0].told("refused-version")

    asyncio.run(play())


def test_what_changes_on_the_wire_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    receive, flips = Pump.receive, [3]

    async def flipped(self: Pump, into: memoryview, came: Any) -> None:
        flips[0] -= 1
        todo = [1] if flips[0] == 0 else []

        def flip(nbytes: int) -> None:
            if todo:
                into[0] ^= todo.pop()
            came(nbytes)

        await receive(self, into, flip)

    async def play() -> None:
        async with world() as nodes:
            monkeypatch.setattr(Pump, "receive", flipped)
            assert await fetch(nodes) == PAYLOAD
            assert all(nodes[n].vault.tensors(0, STEP) is not None for n in HOLDERS)
            if flips[0] <= 0:  # small pieces may come with their message, past the pump
                assert len(nodes[0].told("refused-version")) == 1

    asyncio.run(play())


def test_one_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are idle and much faster: they take over what it owes."""
    monkeypatch.setattr(shares, "SLOW_S", 0.05)

    async def play() -> None:
        async with world() as nodes:
            for_ever = asyncio.Event()

            async def hangs(_link: Any, _count: int) -> None:
                await for_ever.wait()

            on_chunk(monkeypatch, 3, hangs)
            assert await fetch(nodes) == PAYLOAD
            assert any("much slower" in text for text in nodes[0].told("source-failed"))

    asyncio.run(play())


def test_a_transfer_may_take_long_but_something_has_to_move() -> None:
    """Ends some time after the last byte, not after the first; though so few do not wake the receiver."""

    async def play() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        loop = asyncio.get_running_loop()
        ours.setblocking(False)
        theirs.setblocking(False)
        with ours, theirs, memoryview(bytearray(2 * LOW_WATER_NBYTES)) as into:
            came: list[int] = []
            receiving = asyncio.create_task(Pump(ours, patience_s=2.0).receive(into, came.append))
            for _ in range(4):
                await asyncio.sleep(0.6)
                await loop.sock_sendall(theirs, b"x")
            with pytest.raises(TimeoutError, match="nothing more has moved"):
                await receiving
            assert came[-1] == 4, "2.4 s are more than it waits for one byte"

    asyncio.run(play())


def test_where_two_versions_are_held_one_of_them_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    other = payload_of(1, STEP, NBYTES)

    async def play() -> None:
        async with world() as nodes:
            nodes[1].vault.drop_after(None)
            nodes[1].hold(0, STEP, other)
            assert await fetch(nodes) in (PAYLOAD, other)
            told = nodes[0].told("source-failed")
            assert told
            assert all("another version" in text for text in told)

    asyncio.run(play())


def test_twins_differ_in_what_is_their_own_and_nobody_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As batch norm's statistics; the first to answer gives all of it, and another where that one fails."""
    others = [bytes([number]) + PAYLOAD[1:] for number in HOLDERS]

    async def dies(link: Any, count: int) -> None:
        if count == 2:
            link.close()

    async def play() -> None:
        async with Nodes(4) as nodes:
            for number, payload in zip(HOLDERS, others, strict=True):
                nodes[number].hold(0, STEP, payload, rank=number, twins="5a" * 16)
            nodes.follow(nodes.assignment([0], STEP))
            assert await fetch(nodes) in others
            assert nodes[0].events == []
            nodes[0].vault.drop_after(None)
            for number in HOLDERS[:2]:
                on_chunk(monkeypatch, number, dies)
            assert await fetch(nodes) in others
            assert all("another version" not in text for text in nodes[0].told("source-failed"))

    asyncio.run(play())


def test_nobody_has_it_any_more() -> None:
    async def play() -> None:
        async with world() as nodes:
            for number in HOLDERS:
                nodes[number].vault.drop_after(None)
            with pytest.raises(PeerError, match="nobody could give the tensors of step 7, shard 0"):
                await fetch(nodes)
            assert nodes[0].vault.tensors(0, STEP) is None
            assert not nodes[0].vault._writing

    asyncio.run(play())


def test_an_end_in_the_middle_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new generation: the fetch is cancelled, and the memory can be used for another."""

    async def play() -> None:
        async with world() as nodes:
            for_ever = asyncio.Event()

            async def hangs(_link: Any, count: int) -> None:
                if count > 2:
                    await for_ever.wait()

            asked = on_chunk(monkeypatch, 1, hangs)
            task = asyncio.create_task(nodes[0].replicas.fetch_tensors(0, STEP, [1]))
            await until(lambda: len(asked) > 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert nodes[0].vault.tensors(0, STEP) is None
            assert not nodes[0].vault._writing
            nodes[0].vault.close()
            assert not nodes[0].vault._regions

    asyncio.run(play())
