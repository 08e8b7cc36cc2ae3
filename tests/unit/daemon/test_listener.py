"""Where others are listened for: who greets gets streams, and whoever does not costs little."""

import asyncio
import contextlib
import errno
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport import handshake, listener
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import Link

from .served import closed

HOST = "127.0.0.1"
KEY = b"the job's key"
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Listening:
    """A door, the streams that it has given, and whom it has refused, and why."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[Streams] = asyncio.Queue()
        self.refused: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.door = listener.Listener(
            lambda *streams: self.came.put_nowait(streams),
            lambda address, why: self.refused.put_nowait((address, why)),
        )
        self.at = (HOST, self.door.open(HOST))

    async def _dial(self) -> Link[p.AgentMessage]:
        link: Link[p.AgentMessage] = await Link.dial(
            self.at, ("job", 0), KeyCredentials(KEY), p.AgentMessage, 20.0
        )
        return link

    async def connect(self) -> tuple[Link[p.AgentMessage], Link[p.AgentMessage]]:
        """Both ends of a connection by the key."""
        dialling: asyncio.Task[Link[p.AgentMessage]] = asyncio.create_task(self._dial())
        theirs: Link[p.AgentMessage] = await Link.accept(
            await self.came.get(), lambda _job: 1, KeyCredentials(KEY), p.AgentMessage
        )
        return await dialling, theirs


def play(work: Callable[[Listening], Coroutine[Any, Any, None]]) -> None:
    async def to_its_end() -> None:
        listening = Listening()
        try:
            async with asyncio.timeout(60):
                await work(listening)
        finally:
            await listening.door.close()

    asyncio.run(to_its_end())


async def hang_up(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


OPENING = handshake.encode(handshake.opening("job", 0))
OPENINGS = {
    "an opening": OPENING,
    "and more": OPENING + b"more",
    "another version": handshake.encode(handshake.Opening(99, "job", 0, b"n" * 16)),
}
NO_OPENINGS = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "a short nonce": handshake.encode(handshake.Opening(1, "job", 0, b"short")),
    "too long": b"\xff" * 9000,
    "cut off": b"\x10\0\0\0cut off",
    "nothing": b"",
}


async def say(writer: asyncio.StreamWriter, said: bytes, pieces: int) -> None:
    for at in range(0, min(len(said), 300), pieces):
        writer.write(said[at : min(at + pieces, 300)])
        await asyncio.sleep(0)
    writer.write(said[300:])
    with contextlib.suppress(ConnectionError, OSError):
        writer.write_eof()


@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize("pieces", [1, 100_000])
def test_who_greets_gets_streams_with_all_that_was_said(name: str, pieces: int) -> None:
    async def work(listening: Listening) -> None:
        reader, writer = await asyncio.open_connection(*listening.at)
        await say(writer, OPENINGS[name], pieces)
        there, back = await listening.came.get()
        assert await there.read() == OPENINGS[name]
        back.write(b"answer")
        back.close()
        assert await reader.read() == b"answer"
        await hang_up(writer, back)
        assert listening.refused.empty()

    play(work)


@pytest.mark.parametrize("name", NO_OPENINGS)
@pytest.mark.parametrize("pieces", [1, 100_000])
def test_what_is_no_opening_is_refused_at_the_door(name: str, pieces: int) -> None:
    async def work(listening: Listening) -> None:
        reader, writer = await asyncio.open_connection(*listening.at)
        await say(writer, NO_OPENINGS[name], pieces)
        address, why = await listening.refused.get()
        assert address == HOST
        assert why
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        await hang_up(writer)
        assert listening.came.empty()

    play(work)


def test_one_that_says_nothing_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_DEADLINE_S", 0.05)

    async def work(listening: Listening) -> None:
        reader, writer = await asyncio.open_connection(*listening.at)
        assert "no greeting" in (await listening.refused.get())[1]
        assert await reader.read() == b""
        await hang_up(writer)

    play(work)


@pytest.mark.parametrize("said", [b"", OPENING], ids=["silent", "without a proof"])
def test_the_oldest_gives_way(said: bytes) -> None:
    """However many there are that prove nothing, so many are kept, and whoever comes is heard."""

    async def work(listening: Listening) -> None:
        listening.door._most = 8
        held = []
        for _ in range(30):
            held.append(await asyncio.open_connection(*listening.at))
            held[-1][1].write(said)
            if said:
                held.append(await listening.came.get())
        links = await listening.connect()
        assert 0 < len(listening.door._visitors) + len(listening.door._unproved) <= 8
        await hang_up(*(writer for _, writer in held))
        for link in links:
            link.close()
            await closed(link)

    play(work)


def test_from_one_address_no_more_come_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many at once; then they are hung up on, and others' get in as before."""
    monkeypatch.setattr(listener, "CONNECTIONS_PER_S", 0.001)
    monkeypatch.setattr(listener, "CONNECTIONS_AT_ONCE", 3.0)

    async def work(listening: Listening) -> None:
        for source, heard in [(HOST, True)] * 3 + [(HOST, False)] * 3 + [("127.0.0.2", True)] * 3:
            with contextlib.suppress(ConnectionError):
                reader, writer = await asyncio.open_connection(*listening.at, local_addr=(source, 0))
                with contextlib.closing(writer):
                    writer.write(NO_OPENINGS["HTTP"])
                    assert await reader.read() == b""
            if heard:
                assert (await listening.refused.get())[0] == source
            assert listening.refused.empty()
        for _ in range(20):  # transports that were closed end a little later
            await asyncio.sleep(0.001)

    play(work)


@pytest.mark.parametrize(("listens", "apart"), [("127.64.3.1", True), ("10.0.0.1", False)])
def test_all_of_loopback_is_one_address_to_a_node(
    monkeypatch: pytest.MonkeyPatch, listens: str, apart: bool
) -> None:
    """Any process may take one of them for its own; in local mode each is a node's."""
    monkeypatch.setattr(listener, "CONNECTIONS_AT_ONCE", 1.0)
    monkeypatch.setattr(listener, "CONNECTIONS_PER_S", 0.001)

    async def work() -> None:
        one = listener.Listener(lambda *_: None)
        one._host = listens
        came = [
            one._may_come(source) for source in ("127.0.0.1", "127.9.9.9", "10.0.0.2", "10.0.0.3", "10.0.0.3")
        ]
        assert came == [True, apart, True, True, False]

    asyncio.run(work())


def test_whoever_is_proved_never_gives_way() -> None:
    async def work(listening: Listening) -> None:
        listening.door._most = 4
        mine, theirs = await listening.connect()
        held = [await asyncio.open_connection(*listening.at) for _ in range(20)]
        mine.send(p.GetRecord(cut=1, rank=1, step=2))
        assert await theirs.receive() == p.GetRecord(cut=1, rank=1, step=2)
        for link in (mine, theirs):
            link.close()
            await closed(link)
        await hang_up(*(writer for _, writer in held))

    play(work)


def test_without_a_descriptor_a_connection_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "AGAIN_S", 0.01)

    async def work(listening: Listening) -> None:
        sock: Any = listening.door._sock
        failures = [errno.EMFILE, errno.ENFILE]

        class Full:
            def accept(self) -> Any:
                if failures:
                    raise OSError(failures.pop(), "planted")
                return sock.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(sock, name)

        listening.door._sock = Full()  # type: ignore[assignment]
        for link in await listening.connect():
            link.close()
            await closed(link)
        assert not failures

    play(work)
