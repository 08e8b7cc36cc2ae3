"""Bulk transfers: every size arrives, nothing around it is lost, and what ends one ends it at both ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.versions.integrity import STEP_NBYTES, ArrivalCheck
from ckptless.daemon.agent.versions.serving import receive_payload
from ckptless.daemon.agent.versions.store import PAGE_NBYTES, Region, VersionStore
from ckptless.daemon.protocol.errors import BadVersionError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.version import (
    CHUNK_NBYTES,
    Header,
    decode,
    digest_of,
    header_nbytes,
    spans,
    verify,
    write_header,
)
from ckptless.daemon.transport import link
from ckptless.daemon.transport.bucket import TokenBucket
from ckptless.daemon.transport.bulk import CHUNK_MIN_NBYTES, Pump, SendRate
from ckptless.daemon.transport.credentials import KeyCredentials

from .served import closed, serve

JOB = "a-job"
DEADLINE_S = 60.0
DIAL_S = 20.0
# More than the kernel keeps on its way, so that a sender has to wait for the receiver.
LARGE = 64 << 20
AgentLink = link.Link[p.AgentMessage]
Pair = tuple[AgentLink, AgentLink]


@contextlib.asynccontextmanager
async def links() -> AsyncIterator[Pair]:
    """Both ends of a connection; closed at the end, until nothing of it is left."""
    streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server, port = await serve("127.0.0.1", 0, lambda *pair: streams.put_nowait(pair))
    address, credentials = ("127.0.0.1", port), KeyCredentials(b"k" * 32)
    dialling: asyncio.Task[AgentLink] = asyncio.create_task(
        link.Link.dial(address, (JOB, 0), credentials, p.AgentMessage, DIAL_S)
    )
    accepted: AgentLink = await link.Link.accept(
        await streams.get(), lambda _job: 1, credentials, p.AgentMessage
    )
    dialled: AgentLink = await dialling
    try:
        yield dialled, accepted
    finally:
        for end in (dialled, accepted):
            end.close()
            await closed(end)
        server.close()
        await server.wait_closed()


def run(scenario: Callable[[AgentLink, AgentLink], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), links() as (dialled, accepted):
            await scenario(dialled, accepted)

    asyncio.run(main())


def held(step: int) -> p.Held:
    return p.Held(generation=1, rank=2, step=step)


# ------------------------------------------------------------------------------------ what arrives


@contextlib.contextmanager
def regions() -> Iterator[tuple[Region, Region]]:
    """Two, as they are at the two ends."""
    both = Region(1, 0, LARGE, 1), Region(2, 0, LARGE, 1)
    try:
        yield both
    finally:
        for region in both:
            region.close()


@pytest.mark.parametrize(
    "nbytes", [0, 1, PAGE_NBYTES + 1, link.READ_BUFFER_BYTES * 3 + 7, STEP_NBYTES * 2 + 1]
)
def test_sizes(nbytes: int) -> None:
    data, offset = os.urandom(nbytes), 4321

    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        with (
            regions() as (one, other),
            one.view(offset, nbytes) as source,
            other.view(0, nbytes) as view,
        ):
            source[:] = data
            came: list[int] = []
            async with asyncio.TaskGroup() as group:
                group.create_task(sender.send_bulk(source))
                await receiver.receive_bulk(view, came.append)
            assert view == data
            assert came == sorted(came)
            assert came[-1:] in ([nbytes], [])

    run(scenario)


def test_bulks_and_messages_both_ways_at_the_same_time() -> None:
    """Each end sends while it receives; messages stand right before and right after each transfer."""
    sizes = [3, 0, 700_001, 5_000_000, 1, LARGE // 2]

    async def give(end: AgentLink, data: bytes) -> None:
        for step, nbytes in enumerate(sizes):
            end.send(held(step))
            bulk = asyncio.create_task(end.send_bulk(memoryview(data)[step : step + nbytes]))
            await asyncio.sleep(0)
            # In the middle of the transfer: it goes out after it.
            end.send(held(step + 100))
            await bulk
            end.send(held(step + 200))

    async def take(end: AgentLink, data: bytes) -> None:
        filled = bytearray(len(data))
        for step, nbytes in enumerate(sizes):
            assert await end.receive() == held(step)
            with memoryview(filled)[:nbytes] as view:
                await end.receive_bulk(view)
                assert view == data[step : step + nbytes]
            assert await end.receive() == held(step + 100)
            assert await end.receive() == held(step + 200)

    async def scenario(one: AgentLink, other: AgentLink) -> None:
        data = os.urandom(max(sizes) + len(sizes))
        async with asyncio.TaskGroup() as group:
            for end in (one, other):
                group.create_task(give(end, data))
                group.create_task(take(end, data))

    run(scenario)


def test_what_has_come_before_it_is_asked_for() -> None:
    """All of it, and the messages after it, lie in the stream's buffer already."""

    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        data = os.urandom(100_000)
        sender.send(held(0))
        await sender.send_bulk(memoryview(data))
        sender.send(held(1))
        await sender.send_bulk(memoryview(data))
        await sender.drain()
        assert await receiver.receive() == held(0)
        filled = bytearray(len(data))
        for glued in (held(1), None):
            await receiver.receive_bulk(memoryview(filled))
            assert filled == data
            if glued:
                assert await receiver.receive() == glued
        receiver.send(held(2))
        assert await sender.receive() == held(2)

    run(scenario)


async def until_it_reads_no_more(receiver: AgentLink) -> None:
    transport = receiver._writer.transport
    assert isinstance(transport, asyncio.Transport)
    while transport.is_reading():  # noqa: ASYNC110 - asyncio tells nobody
        await asyncio.sleep(0.001)


def test_a_receiver_that_is_late() -> None:
    """Far more than its buffer: the stream has stopped reading when the transfer is asked for."""

    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        data = os.urandom(LARGE)
        sending = asyncio.create_task(sender.send_bulk(memoryview(data)))
        await until_it_reads_no_more(receiver)
        sender.send(held(1))
        filled = bytearray(len(data))
        await receiver.receive_bulk(memoryview(filled))
        await sending
        assert filled == data
        assert await receiver.receive() == held(1)

    run(scenario)


# ------------------------------------------------------------------------------------ what ends it


async def begun(sender: AgentLink, receiver: AgentLink) -> list[asyncio.Task[None]]:
    """A transfer of which some has come: its sending and its receiving task."""
    loop, some = asyncio.get_running_loop(), asyncio.Event()

    def begins(_nbytes: int) -> None:
        loop.call_soon_threadsafe(some.set)

    # So slow that it stays in the middle.
    sending = asyncio.create_task(sender.send_bulk(memoryview(bytes(LARGE)), SendRate(LARGE / 10)))
    receiving = asyncio.create_task(receiver.receive_bulk(memoryview(bytearray(LARGE)), begins))
    await some.wait()
    return [sending, receiving]


@pytest.mark.parametrize("who", [0, 1], ids=["sender", "receiver"])
def test_an_end_hangs_up_in_the_middle(who: int) -> None:
    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        ends = sender, receiver
        tasks = await begun(*ends)
        ends[who].close()
        for task in tasks:
            with pytest.raises(ConnectionError):
                await task

    run(scenario)


@pytest.mark.parametrize("who", [0, 1], ids=["sender", "receiver"])
def test_cancelled_in_the_middle(who: int) -> None:
    """What is left on the wire is no message: so it ends the connection, for both."""

    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        ends = sender, receiver
        tasks = await begun(*ends)
        tasks[who].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[who]
        with pytest.raises(ConnectionError):
            await tasks[1 - who]
        for end in ends:
            with pytest.raises(ConnectionError):
                await end.receive()

    run(scenario)


def test_a_deadline_in_the_middle() -> None:
    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        data = bytes(LARGE)
        sending = asyncio.create_task(sender.send_bulk(memoryview(data)[: LARGE // 2]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await receiver.receive_bulk(memoryview(bytearray(LARGE)))
        with contextlib.suppress(ConnectionError):  # it may have been through
            await sending
        with pytest.raises(ConnectionError):
            await sender.receive()

    run(scenario)


def test_a_sender_nobody_reads_from_hears_that_the_link_is_closed() -> None:
    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        data = bytes(LARGE)
        sending = asyncio.create_task(sender.send_bulk(memoryview(data)))
        assert await asyncio.wait([sending], timeout=0.2) == (set(), {sending})
        sender.close()
        with pytest.raises(ConnectionError):
            await sending
        with pytest.raises(ConnectionError):
            await receiver.receive_bulk(memoryview(bytearray(LARGE)))

    run(scenario)


def transfers() -> list[str]:
    """Threads of transfers."""
    return [thread.name for thread in threading.enumerate() if thread.name == "ckptless-bulk"]


@contextlib.contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The ends of a connection over TCP, as a transport has them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


@pytest.mark.parametrize("ending", ["cancelled", "cancelled twice", "stopped", "reset", "silent"])
@pytest.mark.parametrize("way", ["send", "receive"])
def test_however_a_transfer_ends_no_thread_is_left_and_its_memory_can_be_given_back(
    ending: str, way: str
) -> None:
    async def scenario() -> None:
        with sockets() as (ours, theirs):
            memory = mmap.mmap(-1, LARGE)
            view = memoryview(memory)
            pump = Pump(ours, patience_s=0.5 if ending == "silent" else DEADLINE_S)
            if way == "send":
                moving = asyncio.create_task(pump.send(view, SendRate()))
            else:
                theirs.send(b"x")
                moving = asyncio.create_task(pump.receive(view, lambda _nbytes: None))
            while not transfers():  # noqa: ASYNC110 - a thread tells nobody that it has begun
                await asyncio.sleep(0)
            expected: type[BaseException] = ConnectionError
            if ending.startswith("cancelled"):
                expected = asyncio.CancelledError
                moving.cancel()
                if ending == "cancelled twice":
                    asyncio.get_running_loop().call_soon(moving.cancel)
            elif ending == "stopped":
                pump.stop()
            elif ending == "reset":
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                theirs.close()
            else:
                expected = TimeoutError
            with pytest.raises(expected) as kept:
                await moving
            assert transfers() == []
            view.release()
            memory.close()  # though the error and all its frames are kept
            assert kept.value is not None

    asyncio.run(scenario())


def test_where_no_thread_is_to_be_had_the_transfer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario(sender: AgentLink, _receiver: AgentLink) -> None:
        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(OSError, match="no thread for a transfer"):
            await sender.send_bulk(memoryview(b"some"))

    run(scenario)


# ---------------------------------------------------------------------------------- what it checks


def version(slot: memoryview, nbytes: int) -> Header:
    """Make a version of what lies in a slot behind its header, which it returns."""
    data = slot[-nbytes:]
    chunks = tuple(digest_of(data[start:end]) for start, end in spans(nbytes))
    write_header(slot, Header(JOB, 5, 0, 7, 1, "0" * 32, nbytes, chunks))
    return decode(slot)


@pytest.mark.parametrize("at", [0, STEP_NBYTES - 1, 3 * STEP_NBYTES, None])
def test_a_changed_byte_is_found(at: int | None) -> None:
    nbytes = 3 * STEP_NBYTES + 1
    data = bytearray(os.urandom(header_nbytes(nbytes) + nbytes))
    header = version(memoryview(data), nbytes)
    payload = memoryview(data)[-nbytes:]
    if at is not None:
        payload[at] ^= 1

    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        store = VersionStore()
        sending = asyncio.create_task(sender.send_bulk(payload))
        with store.incoming(header) as coming:
            taking = receive_payload(receiver, coming)
            if at is None:
                await taking
                assert coming.finish().digest == header.digest
                assert verify(coming.slot, header.digest) == header
            else:
                with pytest.raises(BadVersionError):
                    await taking
        await sending
        store.close()

    run(scenario)


def test_a_region_that_is_received_into_can_be_given_back_after_a_cancellation() -> None:
    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        store = VersionStore()
        data = bytes(LARGE)
        sending = asyncio.create_task(sender.send_bulk(memoryview(data)))
        header = Header(JOB, 5, 0, 7, 1, "0" * 32, LARGE + 1, (0,) * (LARGE // CHUNK_NBYTES + 1))

        async def take() -> None:
            with store.incoming(header) as coming:
                await receive_payload(receiver, coming)

        taking = asyncio.create_task(take())
        await sending
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        store.close()  # nothing, not even a thread, looks at it any more

    run(scenario)


# ------------------------------------------------------------------------------- what it costs


def test_no_descriptor_is_left() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        data = os.urandom(100_003)
        filled = bytearray(len(data))
        before = open_files()
        for _ in range(50):
            async with asyncio.TaskGroup() as group:
                group.create_task(sender.send_bulk(memoryview(data)))
                group.create_task(receiver.receive_bulk(memoryview(filled)))
        assert open_files() == before
        for who in range(2):
            async with links() as ends:
                tasks = await begun(*ends)
                tasks[who].cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        assert open_files() <= before

    run(scenario)


def test_others_get_their_turns_meanwhile() -> None:
    """Both ends are in this loop, and hash; yet it goes round hundreds of times while 256 MB move."""
    nbytes = 256 << 20

    async def scenario(sender: AgentLink, receiver: AgentLink) -> None:
        loop = asyncio.get_running_loop()
        turns: list[float] = []

        async def ticker() -> None:
            while True:
                turns.append(loop.time())
                await asyncio.sleep(0)

        source, view = (memoryview(mmap.mmap(-1, nbytes)) for _ in range(2))
        header = version(source, nbytes - header_nbytes(nbytes))
        ticking = asyncio.create_task(ticker())
        payload = view[header.header_nbytes :]
        check = ArrivalCheck(payload, header)
        async with asyncio.TaskGroup() as group:
            group.create_task(sender.send_bulk(source[header.header_nbytes :]))
            await receiver.receive_bulk(payload, check.feed)
            assert await check.fault() is None
        ticking.cancel()
        assert len(turns) >= 250
        longest = max(later - earlier for earlier, later in itertools.pairwise(turns))
        assert longest < (turns[-1] - turns[0]) / 4

    run(scenario)


# ---------------------------------------------------------------------------------- the limit


def test_a_bucket_gives_what_it_has_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=10, burst=5)
    assert bucket.take(5, now=100.0) == 0
    assert bucket.take(1, now=100.0) == pytest.approx(0.1)
    assert bucket.take(4, now=100.0) == pytest.approx(0.5)
    assert bucket.take(0, now=100.5) == 0
    assert bucket.take(1, now=100.5) == pytest.approx(0.1)
    # It keeps no more than its burst, however long nobody comes.
    assert bucket.take(5, now=999.0) == 0
    assert bucket.take(5, now=999.0) == pytest.approx(0.5)
    # A clock that goes back gives nothing.
    assert bucket.take(0, now=0.0) == pytest.approx(0.5)
    assert bucket.take(0, now=999.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, -1)])
def test_a_bucket_that_cannot_be(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="a bucket of"):
        TokenBucket(rate, burst)


@given(
    st.floats(0.5, 1000),
    st.floats(0, 100),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 50)), min_size=1, max_size=50),
)
def test_never_more_than_burst_and_rate(rate: float, burst: float, takes: list[tuple[float, float]]) -> None:
    """Whoever waits as told has never sent more than the rate and one burst allow; and waits no longer."""
    bucket, now, sent = TokenBucket(rate, burst), 0.0, 0.0
    for pause, count in takes:
        now += pause
        sent += count
        wait = bucket.take(count, now)
        assert sent <= burst + rate * (now + wait) + 1e-6
        assert wait <= sent / rate + 1e-6


def test_a_limit_holds_for_all_transfers_together() -> None:
    """By the clock of the loop: it takes at least as long as the rate says."""
    rate, nbytes = 4e6, 600_000

    async def main() -> None:
        pace = SendRate(rate)

        async def one() -> None:
            async with links() as (sender, receiver):
                data = os.urandom(nbytes)
                filled = bytearray(nbytes)
                async with asyncio.TaskGroup() as group:
                    group.create_task(sender.send_bulk(memoryview(data), pace))
                    group.create_task(receiver.receive_bulk(memoryview(filled)))
                assert filled == data

        loop = asyncio.get_running_loop()
        begin = loop.time()
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(one())
        assert loop.time() - begin >= (2 * nbytes - rate * 0.05) / rate

    asyncio.run(main())


def test_a_slow_limit_still_moves_whole_chunks() -> None:
    async def main() -> None:
        assert await SendRate(1.0).turn(CHUNK_MIN_NBYTES * 9) == CHUNK_MIN_NBYTES
        assert await SendRate(1.0).turn(5) == 5
        assert await SendRate().turn(1 << 40) == 1 << 40

    asyncio.run(main())
