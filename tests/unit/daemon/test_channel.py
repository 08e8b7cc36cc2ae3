"""Channels over real sockets: large messages, ends that are silent, wrong or gone; whom a door lets in."""

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from played_store import PlayedStore

from ckptless.daemon.api.errors import PeerError, ProtocolError
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import door, handshake
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.link import GreetingCutError, Link
from ckptless.daemon.peers.vouch import KeyVouch

KEY = b"k" * 32
HOST = "127.0.0.1"


class Two:
    """Node 0, which dials, and node 1, whose door is open."""

    def __init__(self, key: bytes = KEY) -> None:
        self.near, self.far = PlayedStore(0, KEY, ready=False), PlayedStore(1, key, ready=False)
        self.info = NodeInfo(node=1, name="n1", address=HOST, agent_port=self.far.door.open(HOST))

    async def connect(self) -> None:
        """Both are proved."""
        self.near.dial(self.info)
        await self.near.until("proved")
        await self.far.until("proved")


def play(work: Callable[[Two], Coroutine[Any, Any, None]], key: bytes = KEY) -> None:
    """And no descriptor is left."""

    async def to_its_end() -> None:
        two = Two(key)
        try:
            async with asyncio.timeout(60):
                await work(two)
        finally:
            await two.near.close()
            await two.far.close()

    async def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def both() -> None:
        before = await count()
        await to_its_end()
        assert await count() == before

    asyncio.run(both())


def said(nbytes: int) -> p.StoreSaid:
    return p.StoreSaid(generation=1, body=bytes([nbytes % 251]) * nbytes)


def test_messages_of_all_sizes_both_ways() -> None:
    """Also such as no socket's buffer takes at once."""
    sizes = [0, 1, 65535, 8 << 20, 3, (1 << 20) + 1, 0]

    async def work(two: Two) -> None:
        await two.connect()
        for size in sizes:
            two.near.send(said(size))
            two.far.send(said(size))
        for end in (two.far, two.near):
            assert [await end.until("heard") for _ in sizes] == [said(size) for size in sizes]

    play(work)


def test_a_connection_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As to another machine: the kernel takes nothing before it stands."""

    class Slow(socket.socket):
        tries = 0

        def send(self, *args: Any) -> int:
            Slow.tries += 1
            if Slow.tries < 3:
                raise BlockingIOError
            return super().send(*args)

    async def work(two: Two) -> None:
        monkeypatch.setattr("ckptless.daemon.peers.channel.socket.socket", Slow)
        await two.connect()
        monkeypatch.undo()
        assert Slow.tries >= 3
        two.near.send(said(70000))
        assert await two.far.until("heard") == said(70000)

    play(work)


def test_another_key_ends_at_both_ends() -> None:
    async def work(two: Two) -> None:
        two.near.dial(two.info)
        error = await two.near.until("ended")
        assert isinstance(error, PeerError)
        assert "key" in str(error)
        assert isinstance(await two.far.until("ended"), GreetingCutError)

    play(work, b"x" * 32)


def test_another_node_is_not_taken() -> None:
    async def work(two: Two) -> None:
        two.near.dial(msgspec.structs.replace(two.info, node=5))
        assert "node-1 answers in place of node-5" in str(await two.near.until("ended"))

    play(work)


def test_one_that_has_no_key_yet_hangs_up_without_a_word() -> None:
    async def work(two: Two) -> None:
        two.far.peers._key = lambda: None
        two.near.dial(two.info)
        assert isinstance(await two.near.until("ended"), GreetingCutError)

    play(work)


def test_nobody_is_there() -> None:
    async def work(two: Two) -> None:
        await two.far.door.close()
        try:
            two.near.dial(two.info)
            error = await two.near.until("ended")
        except OSError as found:
            error = found
        assert isinstance(error, ConnectionRefusedError)

    play(work)


@pytest.mark.parametrize("silent", ["near", "far"])
def test_one_that_says_nothing_in_the_handshake(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setattr("ckptless.daemon.peers.channel.HANDSHAKE_DEADLINE_S", 0.2)

    async def work(two: Two) -> None:
        taken: list[Any] = []
        if silent == "far":
            two.far.door._on_store = lambda sock, _opening: taken.append(sock)
        two.near.dial(two.info)
        if silent == "near":
            assert two.near.channel is not None
            asyncio.get_running_loop().remove_reader(two.near.channel._fd)
        talks = two.near if silent == "far" else two.far
        assert isinstance(await talks.until("ended"), TimeoutError)
        for sock in taken:
            sock.close()

    play(work)


def test_the_last_word_arrives_whatever_is_unread() -> None:
    async def work(two: Two) -> None:
        two.near.dial(two.info)
        await two.near.until("proved")
        for _ in range(8):
            two.near.send(said(1 << 20))
        await two.far.until("proved")
        assert two.far.channel is not None
        two.far.channel.refuse(p.StoreYield())
        assert await two.near.until("heard") == p.StoreYield()
        assert two.near.channel is not None
        two.near.channel.close()
        assert isinstance(await two.far.until("ended"), ConnectionError)

    play(work)


def test_a_mistake_of_ours_ends_the_channel_and_is_told() -> None:
    async def work(two: Two) -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: told.append(what["exception"]))
        await two.connect()

        def wrong(_channel: object, _message: object) -> None:
            raise KeyError("planted")

        two.far.heard = wrong  # type: ignore[method-assign, assignment]
        two.near.send(p.StorePing())
        assert "KeyError" in str(await two.far.until("ended"))
        assert isinstance(told[0], KeyError)

    play(work)


# ---------------------------------------------------------------------------------------- the door


class Streams:
    """What comes to a door that is for nobody's store."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came.put_nowait((reader, writer))


OPENING = handshake.encode(handshake.opening("job", 0))
FOR_THE_STORE = handshake.encode(handshake.opening("job", 0, store=True))


OTHERS = {
    "an opening": OPENING,
    "and more": OPENING + b"more",
    "another version": handshake.encode(handshake.Opening(99, "job", 0, b"n" * 16, store=True)),
}
NO_OPENINGS = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "a short nonce": handshake.encode(handshake.Opening(1, "job", 0, b"short", store=True)),
    "too long": b"\xff" * 9000,
    "cut off": b"\x10\0\0\0cut off",
    "nothing": b"",
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("pieces", [1, 100_000])
def test_what_is_not_for_the_store_gets_streams_with_all_of_it(name: str, pieces: int) -> None:
    said = OTHERS[name]

    async def work(two: Two) -> None:
        streams = Streams()
        two.far.door._on_streams = streams.take
        reader, writer = await asyncio.open_connection(HOST, two.info.agent_port)
        for at in range(0, min(len(said), 300), pieces):
            writer.write(said[at : min(at + pieces, 300)])
            await asyncio.sleep(0)
        writer.write(said[300:])
        writer.write_eof()
        there, back = await streams.came.get()
        assert await there.read() == said
        back.write(b"answer")
        back.close()
        assert await reader.read() == b"answer"
        writer.close()
        await writer.wait_closed()
        await back.wait_closed()
        assert two.far.events.empty()

    play(work)


@pytest.mark.parametrize("at_once", [True, False])
def test_one_that_says_more_before_it_is_answered(at_once: bool) -> None:
    """No agent does. Where it is seen at once the connection is none of the store's."""

    async def work(two: Two) -> None:
        streams = Streams()
        two.far.door._on_streams = streams.take
        _, writer = await asyncio.open_connection(HOST, two.info.agent_port)
        more = b"\xff" * 50
        if at_once:
            writer.write(FOR_THE_STORE + more)
            there, back = await streams.came.get()
            assert await there.readexactly(len(FOR_THE_STORE + more)) == FOR_THE_STORE + more
            back.close()
            await back.wait_closed()
        else:
            writer.write(FOR_THE_STORE)
            await two.far.until("came")
            writer.write(more)
            assert isinstance(await two.far.until("ended"), ProtocolError)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    play(work)


def test_an_opening_in_pieces_is_taken() -> None:
    async def work(two: Two) -> None:
        reader, writer = await asyncio.open_connection(HOST, two.info.agent_port)
        for byte in FOR_THE_STORE:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        length = handshake.parse_length(await reader.readexactly(handshake.LENGTH_BYTES))
        answer = handshake.decode(await reader.readexactly(length), handshake.Answer)
        assert answer.opening.node == 1
        writer.close()
        await writer.wait_closed()
        assert isinstance(await two.far.until("ended"), GreetingCutError)

    play(work)


class Refusals:
    """What a door refuses."""

    def __init__(self, of: door.Door) -> None:
        self.told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        of._on_refused = lambda address, why: self.told.put_nowait((address, why))


@pytest.mark.parametrize("name", NO_OPENINGS)
@pytest.mark.parametrize("pieces", [1, 100_000])
def test_what_is_no_opening_is_refused_at_the_door(name: str, pieces: int) -> None:
    said = NO_OPENINGS[name]

    async def work(two: Two) -> None:
        refusals = Refusals(two.far.door)
        reader, writer = await asyncio.open_connection(HOST, two.info.agent_port)
        for at in range(0, min(len(said), 300), pieces):
            writer.write(said[at : min(at + pieces, 300)])
            await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
        address, why = await refusals.told.get()
        assert address == HOST
        assert why
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert two.far.events.empty()

    play(work)


def test_one_that_says_nothing_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_DEADLINE_S", 0.05)

    async def work(two: Two) -> None:
        refusals = Refusals(two.far.door)
        reader, writer = await asyncio.open_connection(HOST, two.info.agent_port)
        assert "no greeting" in (await refusals.told.get())[1]
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()

    play(work)


@pytest.mark.parametrize("said", [b"", OPENING], ids=["silent", "without a proof"])
def test_the_oldest_gives_way(said: bytes) -> None:
    """However many there are that prove nothing, so many are kept, and whoever comes is heard."""

    async def work(two: Two) -> None:
        two.far.door._most = 8
        streams = Streams()
        two.far.door._on_streams = streams.take
        held = []
        for _ in range(30):
            held.append(await asyncio.open_connection(HOST, two.info.agent_port))
            held[-1][1].write(said)
            if said:
                held.append(await streams.came.get())
        await two.connect()
        unproved = len(two.far.door._visitors) + len(two.far.door._unproved)
        assert 0 < unproved <= 8
        for _, writer in held:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    play(work)


def test_from_one_address_no_more_come_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many at once; then they are hung up on, and others' get in as before."""
    monkeypatch.setattr(door, "CONNECTIONS_PER_S", 0.001)
    monkeypatch.setattr(door, "CONNECTIONS_AT_ONCE", 3.0)
    said = NO_OPENINGS["HTTP"]

    async def work(two: Two) -> None:
        refusals = Refusals(two.far.door)
        at = (HOST, two.info.agent_port)
        for source, heard in [(HOST, True)] * 3 + [(HOST, False)] * 3 + [("127.0.0.2", True)] * 3:
            with contextlib.suppress(ConnectionError):
                reader, writer = await asyncio.open_connection(*at, local_addr=(source, 0))
                with contextlib.closing(writer):
                    writer.write(said)
                    assert await reader.read() == b""
            if heard:
                assert (await refusals.told.get())[0] == source
            assert refusals.told.empty()
        for _ in range(20):  # transports that were closed end a little later
            await asyncio.sleep(0.001)

    play(work)


@pytest.mark.parametrize(("listens", "apart"), [("127.64.3.1", True), ("10.0.0.1", False)])
def test_all_of_loopback_is_one_address_to_a_node(
    monkeypatch: pytest.MonkeyPatch, listens: str, apart: bool
) -> None:
    """Any process may take one of them for its own; in local mode each is a node's."""
    monkeypatch.setattr(door, "CONNECTIONS_AT_ONCE", 1.0)
    monkeypatch.setattr(door, "CONNECTIONS_PER_S", 0.001)

    async def work() -> None:
        one = door.Door(lambda *_: None)
        one._host = listens
        came = [
            one._may_come(source) for source in ("127.0.0.1", "127.9.9.9", "10.0.0.2", "10.0.0.3", "10.0.0.3")
        ]
        assert came == [True, apart, True, True, False]

    asyncio.run(work())


def test_whoever_is_proved_never_gives_way() -> None:
    async def work(two: Two) -> None:
        two.far.door._most = 4
        links: asyncio.Queue[Link[p.AgentMessage]] = asyncio.Queue()
        tasks = []

        async def accept(*streams: Any) -> None:
            links.put_nowait(await Link.accept(streams, lambda _job: 1, KeyVouch(KEY), p.AgentMessage))

        two.far.door._on_streams = lambda *streams: tasks.append(asyncio.create_task(accept(*streams)))
        at = (HOST, two.info.agent_port)
        mine: Link[p.AgentMessage] = await Link.dial(at, ("job", 0), KeyVouch(KEY), p.AgentMessage, 20.0)
        theirs = await links.get()
        held = [await asyncio.open_connection(*at) for _ in range(20)]
        mine.send(p.GetRecord(rank=1, step=2))
        assert await theirs.receive() == p.GetRecord(rank=1, step=2)
        for link in (mine, theirs):
            link.close()
            await link.closed()
        for _, writer in held:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    play(work)


def test_without_a_descriptor_a_connection_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "AGAIN_S", 0.01)

    async def work(two: Two) -> None:
        listening: Any = two.far.door._sock
        failures = [errno.EMFILE, errno.ENFILE]

        class Full:
            def accept(self) -> Any:
                if failures:
                    raise OSError(failures.pop(), "planted")
                return listening.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(listening, name)

        two.far.door._sock = Full()  # type: ignore[assignment]
        await two.connect()
        assert not failures

    play(work)
