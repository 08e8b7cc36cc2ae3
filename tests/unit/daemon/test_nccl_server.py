"""An agent's NCCL roots over real sockets: ranks of any layout, stale ones, hostile ones."""

import asyncio
import functools
import random
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.agent.nccl import server as nccl_server
from ckptless.daemon.agent.nccl import wire as nccl_wire
from ckptless.daemon.agent.nccl.blocks import (
    block,
)
from ckptless.daemon.agent.nccl.ids import NcclIds, magic_of
from ckptless.daemon.agent.nccl.server import NcclServer
from ckptless.daemon.agent.nccl.wire import (
    Address,
    CheckIn,
    encode_message,
)
from ckptless.daemon.protocol.errors import UsageError

from .nccl_rank import decode_id, encode_check_in, root_of

KEY = b"k" * 32
HOST = "127.0.0.1"
LONG_S = 20.0

P = ParamSpec("P")


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Agent:
    """A server, and what it has told."""

    def __init__(self) -> None:
        self.server = NcclServer()
        self.events: list[tuple[str, str]] = []
        self.unknown: list[str] = []
        self._new = asyncio.Event()
        self.server.on_event = self._told
        self.server.on_unknown = self.unknown.append
        self.port = 0

    def _told(self, kind: str, text: str) -> None:
        self.events.append((kind, text))
        self._new.set()

    async def tells(self, kind: str) -> None:
        async with asyncio.timeout(LONG_S):
            while kind not in self.kinds:
                self._new.clear()
                await self._new.wait()

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.events}


@asynccontextmanager
async def agents(count: int = 1, generation: int = 1, key: bytes | None = KEY) -> AsyncIterator[list[Agent]]:
    made = [Agent() for _ in range(count)]
    try:
        for agent in made:
            agent.port = await agent.server.start(HOST)
            if key is not None:
                agent.server.learn_key(key)
            agent.server.follow(generation)
        yield made
    finally:
        for agent in made:
            await agent.server.close()


class Rank:
    """What a rank of stock NCCL does until it knows whom to connect to."""

    def __init__(self, rank: int, ranks: int, ids: list[bytes], nbytes: int) -> None:
        self.rank, self.ranks, self.nbytes = rank, ranks, nbytes
        self.ids = [decode_id(data) for data in ids]
        self.ring = (b"ring of %d" % rank).ljust(nccl_wire.LAYOUTS[nbytes].next_nbytes, b"\0")
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def bootstrap(self) -> bytes:
        """Return what the next rank said of itself."""
        server = await asyncio.start_server(self._told, HOST, 0)
        try:
            self.listen = Address(HOST, server.sockets[0].getsockname()[1])
            roots = len(self.ids)
            mine, before = (root_of(r % self.ranks, self.ranks, roots) for r in (self.rank, self.rank - 1))
            if roots > 1 and block(mine, self.ranks, roots)[0] == self.rank:
                await self._report(before, (self.rank - 1) % self.ranks + 1)
            await self._report(mine, self.rank)
            async with asyncio.timeout(LONG_S):
                return await self._answer
        finally:
            server.close()

    async def _report(self, root: int, as_rank: int) -> None:
        said = CheckIn(as_rank, self.ranks, root, len(self.ids), 0, self.listen, self.ring)
        home = self.ids[root]
        await say(home.root.port, encode_message(home.magic, encode_check_in(said, self.nbytes)))

    async def _told(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        magic, kind, nbytes = struct.unpack("<QIi", await reader.readexactly(16))
        assert (magic, kind) == (self.ids[0].magic, nccl_wire.SOCKET_TYPE)
        self._answer.set_result(await reader.readexactly(nbytes))
        assert await reader.read() == b""
        writer.close()


async def say(port: int, data: bytes) -> None:
    _, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    await writer.drain()
    writer.close()


async def hung_up(port: int, *pieces: bytes) -> None:
    """Returns once the server has closed the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        async with asyncio.timeout(LONG_S):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            assert await reader.read() == b""
    except ConnectionError:
        pass
    finally:
        writer.close()


Late = Callable[[int], bool]


async def form(ids: list[bytes], ranks: int, nbytes: int, *, late: Late | None = None) -> None:
    """Every rank of a communicator; those that are `late` begin when the others wait."""
    all_ranks = [Rank(rank, ranks, ids, nbytes) for rank in range(ranks)]
    early = [r for r in all_ranks if late is None or not late(r.rank)]
    tasks = {rank.rank: asyncio.create_task(rank.bootstrap()) for rank in early}
    if late is not None:
        await asyncio.sleep(0.05)
        assert any(not task.done() for task in tasks.values())
        tasks |= {r.rank: asyncio.create_task(r.bootstrap()) for r in all_ranks if r.rank not in tasks}
    got = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    assert got == {rank: all_ranks[(rank + 1) % ranks].ring for rank in range(ranks)}


def ids_on(running: list[Agent], homes: list[int], generation: int = 1) -> NcclIds:
    return NcclIds(KEY, generation, [Address(HOST, running[node].port) for node in homes])


@pytest.mark.parametrize("nbytes", sorted(nccl_wire.LAYOUTS))
@in_a_loop
async def test_one_root(nbytes: int) -> None:
    async with agents() as running:
        for ranks in (1, 2, 5):
            await form(ids_on(running, [0]).ids(b"%d" % ranks, 0, 1), ranks, nbytes)


@pytest.mark.parametrize("nbytes", [172, 176])
@pytest.mark.parametrize("homes", [[0, 0, 0, 1, 2, 2], [0, 1, 0, 1], [0, 1], [2, 2, 1]], ids=str)
@in_a_loop
async def test_a_root_for_each_rank_uneven_and_interleaved_nodes(nbytes: int, homes: list[int]) -> None:
    async with agents(3) as running:
        await form(ids_on(running, homes).ids(b"g", 0, len(homes)), len(homes), nbytes)
        assert all(agent.events == [] for agent in running)


@in_a_loop
async def test_fewer_roots_than_ranks() -> None:
    async with agents(2) as running:
        await form(ids_on(running, [0, 0, 1, 1, 1]).ids(b"g", 0, 2), 5, 176)


@in_a_loop
async def test_many_groups_and_rounds_at_the_same_time() -> None:
    async with agents(3) as running:
        ids = ids_on(running, [0, 0, 1, 1, 2])
        forms = [form(ids.ids(b"%d" % g, r, 3), 3, 176) for g in range(5) for r in range(3)]
        await asyncio.gather(form(ids.ids(b"world", 0, 5), 5, 176), *forms)


@in_a_loop
async def test_a_late_node() -> None:
    async with agents(2) as running:
        ids = ids_on(running, [0, 0, 1, 1])
        await form(ids.ids(b"g", 0, 4), 4, 176, late=lambda rank: rank >= 2)


@in_a_loop
async def test_ranks_that_come_before_the_jobs_key_wait() -> None:
    async with agents(key=None) as running:
        ids = ids_on(running, [0, 0, 0])
        formed = asyncio.create_task(form(ids.ids(b"g", 0, 3), 3, 176))
        await asyncio.sleep(0.05)
        assert not formed.done()
        running[0].server.learn_key(KEY)
        await formed


@in_a_loop
async def test_a_node_that_has_not_heard_of_the_generation_yet() -> None:
    async with agents(2) as running:
        running[0].server.follow(2)
        await form(ids_on(running, [0, 0, 1, 1], generation=2).ids(b"g", 0, 4), 4, 176)


@in_a_loop
async def test_ranks_of_an_old_generation_are_hung_up_on_while_the_new_one_forms() -> None:
    async with agents() as running:
        (agent,) = running
        old = [Rank(rank, 4, ids_on(running, [0] * 4).ids(b"g", 0, 4), 176) for rank in range(4)]
        early = [asyncio.create_task(old[rank].bootstrap()) for rank in (0, 2)]
        await asyncio.sleep(0.05)
        agent.server.follow(2)
        late = [asyncio.create_task(old[rank].bootstrap()) for rank in (1, 3)]
        await form(ids_on(running, [0] * 4, generation=2).ids(b"g", 0, 4), 4, 176)
        assert not any(task.done() for task in (*early, *late))
        await agent.tells("nccl-stale")
        await agent.tells("nccl-incomplete")
        for task in (*early, *late):
            task.cancel()
        await asyncio.gather(*early, *late, return_exceptions=True)


@in_a_loop
async def test_an_unknown_length_is_refused_by_name_and_told() -> None:
    async with agents() as running:
        (agent,) = running
        magic = magic_of(KEY, 1, b"g", 0)
        await hung_up(agent.port, struct.pack("<QIi", magic, 1, 192), bytes(192))
        assert agent.kinds == {"nccl-unknown"}
        assert "192 bytes" in agent.unknown[0]


@in_a_loop
async def test_an_unknown_length_of_a_stranger_decides_nothing() -> None:
    async with agents() as running:
        (agent,) = running
        for magic in (magic_of(b"another job's", 1, b"g", 0), 0, 2**64 - 1, 0x0280028002800280):
            await hung_up(agent.port, struct.pack("<QIi", magic, 1, 192))
        assert (agent.unknown, agent.kinds, agent.server.refused) == ([], {"nccl-refused"}, 4)


@in_a_loop
async def test_a_stranger_makes_the_agent_connect_to_nobody() -> None:
    came: list[object] = []
    server = await asyncio.start_server(lambda *who: came.append(who), HOST, 0)
    async with agents() as running:
        listen = Address(HOST, server.sockets[0].getsockname()[1])
        said = encode_check_in(CheckIn(0, 1, 0, 1, 0, listen, b""), 176)
        await hung_up(running[0].port, encode_message(magic_of(b"another job's", 1, b"g", 0), said))
    server.close()
    await server.wait_closed()
    assert came == []


@in_a_loop
async def test_a_rank_that_has_died_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_server, "ANSWER_DEADLINE_S", 0.2)
    async with agents() as running:
        (agent,) = running
        ids = ids_on(running, [0]).ids(b"g", 0, 1)
        dead = Rank(0, 2, ids, 176)
        dead.listen = Address(HOST, 1)
        await dead._report(0, 0)
        other = await Rank(1, 2, ids, 176).bootstrap()
        assert other == dead.ring
        await agent.tells("nccl-unanswered")


@in_a_loop
async def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_server, "READ_DEADLINE_S", 0.1)
    async with agents() as running:
        await hung_up(running[0].port)
        await hung_up(running[0].port, struct.pack("<QIi", magic_of(KEY, 1, b"g", 0), 1, 176))
        assert running[0].server.refused == 2


@in_a_loop
async def test_many_who_say_nothing_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_server, "MAX_CONNECTIONS", 20)
    async with agents() as running:
        (agent,) = running
        silent = [await asyncio.open_connection(HOST, agent.port) for _ in range(60)]
        await form(ids_on(running, [0] * 4).ids(b"g", 0, 4), 4, 176)
        assert len(agent.server._ranks) <= 20
        assert [kind for kind, _ in agent.events] == ["nccl-refused"], "not one for each"
        for _, writer in silent:
            writer.close()


@in_a_loop
async def test_what_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptless.daemon.agent.nccl.root.DEADLINE_S", 0.1)
    async with agents() as running:
        (agent,) = running
        alone = Rank(0, 2, ids_on(running, [0, 0]).ids(b"g", 0, 2), 176)
        alone.listen = Address(HOST, 1)
        await alone._report(0, 0)
        await agent.tells("nccl-incomplete")
        assert agent.events == [
            ("nccl-incomplete", "root 0 of 2 ranks, generation 1, still waited for ranks 1")
        ]


@in_a_loop
async def test_a_name_is_no_address_to_listen_at() -> None:
    with pytest.raises(UsageError):
        await NcclServer().start("localhost")


def test_any_bytes_in_any_pieces_harm_nobody() -> None:
    magic = magic_of(KEY, 1, b"fuzz", 0)
    bodies = st.one_of(
        st.binary(max_size=400),
        st.builds(lambda body: encode_message(magic, body), st.binary(min_size=176, max_size=176)),
        st.builds(
            lambda ints, rest: encode_message(magic, struct.pack("<5i", *ints) + rest),
            st.tuples(*[st.integers(-2, 6)] * 5),
            st.binary(min_size=156, max_size=156),
        ),
        st.builds(lambda n: struct.pack("<QIi", magic, 1, n), st.integers(-(2**31), 2**31 - 1)),
    )

    @settings(max_examples=30, deadline=None)
    @given(st.lists(bodies, min_size=1, max_size=15), st.integers(0, 2**32))
    def fuzz(streams: list[bytes], seed: int) -> None:
        asyncio.run(_survives(streams, random.Random(seed)))

    fuzz()


async def _survives(streams: list[bytes], chance: random.Random) -> None:
    async with agents() as running:
        (agent,) = running
        for stream in streams:
            _, writer = await asyncio.open_connection(HOST, agent.port)
            while stream:
                size = chance.randint(1, len(stream))
                writer.write(stream[:size])
                stream = stream[size:]
                await asyncio.sleep(0)
            writer.close()
        await form(ids_on(running, [0] * 3).ids(b"g", 0, 3), 3, 176)
        assert agent.server._roots._kept <= len(streams)
