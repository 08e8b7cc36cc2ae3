"""Connections between nodes: who does not hold the key, or changes a byte, is not heard."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.codec import CONTROL_LIMIT
from ckptless.daemon.protocol.errors import CkptlessError, MismatchError, PeerError, ProtocolError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.membership import Beat
from ckptless.daemon.transport import handshake, link
from ckptless.daemon.transport.credentials import KeyCredentials

from .served import serve

KEY = b"k" * 32
JOB = "a-job"
DEADLINE_S = 20.0
DIAL_S = 5.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
AgentLink = link.Link[p.AgentMessage]


class Acceptor:
    """A server that accepts links and keeps what it got."""

    def __init__(self, key: bytes = KEY) -> None:
        self._key = key
        self.links: asyncio.Queue[AgentLink | BaseException] = asyncio.Queue()
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def _connected(self, *streams: Any) -> None:
        self._tasks.add(asyncio.create_task(self._handle(streams)))

    async def _handle(self, streams: Any) -> None:
        try:
            made: AgentLink = await link.Link.accept(
                streams, lambda _job: 1, KeyCredentials(self._key), p.AgentMessage
            )
        except (OSError, TimeoutError, CkptlessError) as error:
            self.links.put_nowait(error)
        else:
            self.links.put_nowait(made)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Acceptor]:
        server, self.port = await serve("127.0.0.1", 0, self._connected)
        try:
            yield self
        finally:
            server.close()

    async def dial(self, key: bytes = KEY, port: int = 0) -> AgentLink:
        address = ("127.0.0.1", port or self.port)
        return await link.Link.dial(address, (JOB, 0), KeyCredentials(key), p.AgentMessage, DIAL_S)

    async def accepted(self) -> AgentLink:
        found = await self.links.get()
        assert isinstance(found, link.Link), found
        return found

    async def refused(self) -> BaseException:
        found = await self.links.get()
        assert isinstance(found, BaseException)
        return found


def run(scenario: Callable[[Acceptor], Awaitable[None]], key: bytes = KEY) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), Acceptor(key).serve() as acceptor:
            await scenario(acceptor)
        await settle()

    asyncio.run(main())


async def settle() -> None:
    """Transports that were closed end a little later."""
    for _ in range(20):
        await asyncio.sleep(0.001)


class Middle:
    """Somebody on the wire: passes everything on, but what the dialler says goes through `meddle`."""

    def __init__(self, port: int, meddle: Callable[[bytes], bytes]) -> None:
        self._port, self._meddle = port, meddle
        self.armed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink, theirs in ((reader, onward[1], True), (onward[0], writer, False)):
            task = asyncio.create_task(self._pass(source, sink, theirs))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, theirs: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(self._meddle(data) if theirs and self.armed else data)
        except ConnectionError:
            pass
        finally:
            sink.close()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def record(step: int) -> p.PutRecord:
    return p.PutRecord(generation=1, rank=2, shard=2, step=step, record=b"r" * 100, digest="d")


def test_messages_and_bulk_both_ways() -> None:
    async def scenario(acceptor: Acceptor) -> None:
        dialled = await acceptor.dial()
        accepted = await acceptor.accepted()
        assert (dialled.node, accepted.node) == (1, 0)
        for step in range(5):
            dialled.send(record(step))
            accepted.send(p.Held(generation=1, rank=2, step=step))
        assert [await accepted.receive() for _ in range(5)] == [record(step) for step in range(5)]
        assert (await dialled.receive()) == p.Held(generation=1, rank=2, step=0)
        data = os.urandom(3_000_000)
        filled = bytearray(len(data))
        sending = asyncio.create_task(accepted.send_bulk(memoryview(data)))
        for _ in range(4):
            await dialled.receive()
        await dialled.receive_bulk(memoryview(filled))
        await sending
        assert filled == data
        accepted.send(p.Held(generation=1, rank=2, step=9))
        assert (await dialled.receive()) == p.Held(generation=1, rank=2, step=9)
        accepted.close()
        with pytest.raises(ConnectionError):
            await dialled.receive()
        dialled.close()

    run(scenario)


def test_the_end_in_the_middle_of_a_transfer() -> None:
    async def scenario(acceptor: Acceptor) -> None:
        dialled = await acceptor.dial()
        accepted = await acceptor.accepted()
        await accepted.send_bulk(memoryview(b"half"))
        accepted.close()
        with pytest.raises(ConnectionError):
            await dialled.receive_bulk(memoryview(bytearray(8)))
        dialled.close()

    run(scenario)


def test_another_key_is_refused_by_both_ends() -> None:
    async def scenario(acceptor: Acceptor) -> None:
        with pytest.raises(PeerError, match="does not hold the key"):
            await acceptor.dial(b"x" * 32)
        assert isinstance(await acceptor.refused(), PeerError | ConnectionError)

    run(scenario)


def test_a_dialler_that_only_pretends_is_refused() -> None:
    """It listens to the proof of the acceptor, and has none of its own."""

    async def scenario(acceptor: Acceptor) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", acceptor.port)
        writer.write(_greeting(handshake.opening(JOB, 0)))
        length = int.from_bytes(await reader.readexactly(4), "little")
        answer = msgspec.msgpack.decode(await reader.readexactly(length), type=handshake.Answer)
        writer.write(_greeting(handshake.Proof(answer.proof)))
        refusal = await acceptor.refused()
        assert isinstance(refusal, PeerError)
        assert "key" in str(refusal)
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def _greeting(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (_greeting(handshake.Opening(99, JOB, 0, b"n" * 16)), MismatchError),
        (_greeting({"protocol": 99, "what": "is not known yet"}), MismatchError),
        (_greeting(handshake.Opening(1, JOB, 0, b"short")), ProtocolError),
        (_greeting({"protocol": 1}), ProtocolError),
        (_greeting(b"\xff" * 100), ProtocolError),
        ((1 << 30).to_bytes(4, "little"), ProtocolError),
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError),
        (b"\x01", PeerError),
    ],
)
def test_greetings_that_are_none(first: bytes, kind: type[CkptlessError]) -> None:
    async def scenario(acceptor: Acceptor) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", acceptor.port)
        writer.write(first)
        writer.write_eof()
        assert isinstance(await acceptor.refused(), kind)
        await reader.read()
        writer.close()

    run(scenario)


OTHERS = [
    pytest.param(lambda opening: opening, id="the same fields"),
    pytest.param(lambda opening: {**msgspec.structs.asdict(opening), "more": 1}, id="others"),
]
SAYS = "the other end speaks protocol 99, this end 1: both need the same version of ckptless"


@pytest.mark.parametrize("written", OTHERS)
def test_a_dialler_of_another_version_is_told_of_ours(written: Callable[[Any], object]) -> None:
    async def scenario(acceptor: Acceptor) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", acceptor.port)
        writer.write(_greeting(written(handshake.Opening(99, JOB, 0, b"n" * 16))))
        length = int.from_bytes(await reader.readexactly(4), "little")
        answer = msgspec.msgpack.decode(await reader.readexactly(length), type=handshake.Answer)
        assert (answer.opening.protocol, answer.proof) == (1, b"")
        assert str(await acceptor.refused()) == SAYS
        assert await reader.read() == b""
        writer.close()

    run(scenario)


@pytest.mark.parametrize("written", OTHERS)
def test_an_acceptor_of_another_version(written: Callable[[Any], object]) -> None:
    """It is not taken for one that has not heard of the job yet, which hangs up without a word."""

    async def play() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(4)
            theirs = handshake.Opening(99, JOB, 0, b"n" * 16)
            writer.write(_greeting({"opening": written(theirs), "proof": b""}))
            await reader.read()
            writer.close()
            await writer.wait_closed()
            gone.set()

        gone = asyncio.Event()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = server.sockets[0].getsockname()
            with pytest.raises(MismatchError) as caught:
                await link.Link.dial(address, (JOB, 1), KeyCredentials(KEY), p.AgentMessage, DIAL_S)
            assert str(caught.value) == SAYS
            async with asyncio.timeout(DEADLINE_S):
                await gone.wait()

    asyncio.run(play())


async def three_times(receiver: AgentLink) -> None:
    for _ in range(3):
        assert (await receiver.receive()) == record(3)


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "meddle",
    [
        pytest.param(_flip, id="changed"),
        pytest.param(lambda data: data * 2, id="replayed"),
        pytest.param(lambda data: data[len(data) // 2 :], id="first one dropped"),
        pytest.param(lambda data: data[len(data) // 2 :] + data[: len(data) // 2], id="reordered"),
        pytest.param(lambda data: b"\xff\xff\xff\x7f" + data[4:], id="longer than the limit"),
    ],
)
def test_frames_that_were_not_sent_so(meddle: Callable[[bytes], bytes]) -> None:
    async def scenario(acceptor: Acceptor) -> None:
        middle = Middle(acceptor.port, meddle)
        async with middle.serve() as port:
            dialled = await acceptor.dial(port=port)
            accepted = await acceptor.accepted()
            middle.armed = True
            # Two frames of one length, in one write.
            dialled.send(record(3))
            dialled.send(record(3))
            with pytest.raises(ProtocolError):
                await three_times(accepted)
            accepted.close()
            dialled.close()

    run(scenario)


def test_a_frame_of_another_connection_or_direction_is_no_frame() -> None:
    a, b = handshake.opening(JOB, 0), handshake.opening(JOB, 1)
    other = handshake.opening(JOB, 0)
    head = handshake.Sealer(KEY, b"dialler", (a, b)).seal(b"body")
    _, mac = handshake.Sealer.parse_head(head, CONTROL_LIMIT)
    assert handshake.Sealer(KEY, b"dialler", (a, b)).open(mac, b"body") == b"body"
    for taker in (
        handshake.Sealer(KEY, b"acceptor", (a, b)),
        handshake.Sealer(KEY, b"dialler", (other, b)),
        handshake.Sealer(b"x" * 32, b"dialler", (a, b)),
    ):
        with pytest.raises(ProtocolError):
            taker.open(mac, b"body")


def test_a_sound_frame_of_another_edge_is_refused() -> None:
    async def scenario(acceptor: Acceptor) -> None:
        other: link.Link[Any] = await link.Link.dial(
            ("127.0.0.1", acceptor.port), (JOB, 0), KeyCredentials(KEY), p.DaemonMessage, DIAL_S
        )
        accepted = await acceptor.accepted()
        other.send(Beat())
        with pytest.raises(ProtocolError, match="not a message of this edge"):
            await accepted.receive()
        accepted.close()
        other.close()

    run(scenario)


def test_nobody_answers_in_time() -> None:
    async def main() -> None:
        def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)

        writers: list[asyncio.StreamWriter] = []
        server, port = await serve("127.0.0.1", 0, silent)
        with pytest.raises(TimeoutError):
            await link.Link.dial(("127.0.0.1", port), (JOB, 0), KeyCredentials(KEY), p.AgentMessage, 0.3)
        for writer in writers:
            writer.close()
        server.close()
        await settle()

    asyncio.run(main())


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300))
def test_noise_in_the_handshake_is_only_refused(noise: bytes) -> None:
    async def scenario(acceptor: Acceptor) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", acceptor.port)
        writer.write(noise)
        writer.write_eof()
        assert isinstance(await acceptor.refused(), CkptlessError | ConnectionError)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    run(scenario)
