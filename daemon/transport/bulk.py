"""Hundreds of megabytes over a connection: from memory to the socket, and from the socket into memory.

The bytes pass by asyncio's streams, which would copy them three times. The socket is read and written by a
thread of the transfer's own, through a file descriptor of its own: neither the kernel's copying nor what
`came` does with the bytes, while the caches have them, keeps the event loop or other transfers waiting.

Not by sendfile: a region's pages are small, and to hand them over one by one took the sender more CPU time
than to copy them (over loopback 0.26 s/GB against 0.15 to 0.24), and the receiver more, too.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ckptless.daemon.transport.bucket import TokenBucket

# Of one call to the kernel. After each one the thread needs the interpreter again, for which it may have to
# wait: with 1 MiB at a time three transfers took a third more CPU time; and the caches still have 4 MiB.
SEND_NBYTES, RECEIVE_NBYTES = 16 << 20, 4 << 20
# The receiver is woken when so much is there, and not for every segment.
LOW_WATER_NBYTES = 1 << 20
# Under a limit, a chunk is what may be sent in so many seconds, within these bounds.
CHUNK_S = 0.05
# So long a transfer waits for the next byte, however long all of it takes.
PATIENCE_S = 15.0
CHUNK_MIN_NBYTES, CHUNK_MAX_NBYTES = 16 << 10, 4 << 20


class CountingReader(asyncio.StreamReader):
    """Knows how many bytes have come that nobody has read: `unread`. `on_wide` hears of `widen`."""

    unread = 0
    on_wide: Callable[[], None] | None = None

    def feed_data(self, data: Any) -> None:
        """Bytes have come."""
        self.unread += len(data)
        super().feed_data(data)

    def widen(self, limit: int) -> None:
        """Take up to so many bytes from now on (twice, as asyncio counts) before somebody reads them."""
        self._limit = limit  # asyncio gives no other way, and an end must not have its room before its proof
        if self.on_wide is not None:
            self.on_wide()

    async def read(self, n: int = -1) -> bytes:
        """Up to `n` bytes."""
        data = await super().read(n)
        # All that there is, is read by calls with a number.
        self.unread -= len(data) if n >= 0 else 0
        return data

    async def readexactly(self, n: int) -> bytes:
        """Return up to `n` bytes."""
        # no deadline: the caller's, as with any stream
        data = await super().readexactly(n)
        self.unread -= len(data)
        return data


class Streams(asyncio.StreamReaderProtocol):
    """asyncio's, but for a loss of the connection of which nobody asks.

    asyncio asks for it itself as this is deleted; where that is in a cycle (the error knows the frames that
    it came through), the future may be deleted before, and prints a traceback.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        """Note it."""
        super().connection_lost(exc)
        closed: asyncio.Future[None] = self._closed  # type: ignore[attr-defined]
        if closed.done() and not closed.cancelled():
            closed.exception()


class SendRate:
    """Bytes per second that all transfers together may send; 0: as many as they can."""

    def __init__(self, rate: float = 0) -> None:
        self._bucket: TokenBucket | None = None
        self._chunk = 0
        if rate:
            self._chunk = int(min(max(rate * CHUNK_S, CHUNK_MIN_NBYTES), CHUNK_MAX_NBYTES))
            self._bucket = TokenBucket(rate, self._chunk)

    async def turn(self, left: int) -> int:
        """Wait until some of the `left` bytes may be sent; how many."""
        if self._bucket is None:
            return left
        nbytes = min(left, self._chunk)
        await asyncio.sleep(self._bucket.take(nbytes, asyncio.get_running_loop().time()))
        return nbytes


class Pump:
    """Moves bytes through one connection's socket; `stop` ends what is on its way.

    A transfer's thread has ended when the transfer has, however that ends. One in which nothing moves for
    `patience_s` ends with TimeoutError.
    """

    def __init__(self, sock: Any, patience_s: float = PATIENCE_S) -> None:
        self._sock, self._patience_s = sock, patience_s
        self._open: set[socket.socket] = set()

    def stop(self) -> None:
        """The connection is being closed: both ends get ConnectionError out of what is on its way."""
        for sock in self._open:
            with contextlib.suppress(OSError):  # it is not connected any more
                sock.shutdown(socket.SHUT_RDWR)

    async def send(self, data: memoryview, pace: SendRate) -> None:
        """All of `data`. Raises OSError."""
        sent = 0
        with self._socket() as sock:
            sock.settimeout(self._patience_s)
            while sent < len(data):
                upto = sent + await pace.turn(len(data) - sent)
                with data[sent:upto] as part:
                    await self._move(partial(_send, sock, part))
                sent = upto

    async def receive(self, into: memoryview, came: Callable[[int], None]) -> None:
        """Fill `into`, and take not a byte more. Raises OSError.

        `came(so many)` is called as it goes, in the transfer's thread.
        """
        with self._socket() as sock:
            # It waits twice, see `_receive_some`.
            sock.settimeout(self._patience_s / 2)
            try:
                await self._move(partial(_receive, sock, into, came))
            finally:
                # It is a setting of the connection, not of this descriptor.
                _wake_at(sock, 1)

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """The same connection, by a descriptor of which the transport knows nothing. Raises OSError."""
        with self._sock.dup() as sock:
            self._open.add(sock)
            try:
                yield sock
            finally:
                self._open.discard(sock)

    async def _move(self, work: Callable[[], None]) -> None:
        try:
            await in_thread(work, self.stop)
        except TimeoutError:
            raise TimeoutError(f"nothing more has moved for {self._patience_s:.0f} s") from None


async def in_thread(work: Callable[[], None], stop: Callable[[], None]) -> None:
    """Do it in a thread of its own, which has ended when this has: `stop` ends it where this is cancelled.

    Raises what it raises, and OSError where there is no thread to be had.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    failed: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the task that waits
            failed.append(error)
        loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=body, name="ckptless-bulk")
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(f"no thread for a transfer: {error}") from error
    cancelled = False
    while not done.is_set():
        try:
            # no deadline: the thread gives up when nothing moves for its patience, or at `stop`
            await done.wait()
        except asyncio.CancelledError:
            cancelled = True
            stop()
    # no deadline: its last act was to set `done`
    thread.join()
    if cancelled:
        raise asyncio.CancelledError
    if failed:
        raise failed.pop()


def _send(sock: socket.socket, data: memoryview) -> None:
    sent = 0
    while sent < len(data):
        with data[sent : sent + SEND_NBYTES] as part:
            sent += sock.send(part)


def _receive(sock: socket.socket, into: memoryview, came: Callable[[int], None]) -> None:
    filled = 0
    while filled < len(into):
        with into[filled : filled + RECEIVE_NBYTES] as part:
            got = _receive_some(sock, part)
        if not got:
            raise ConnectionResetError("the connection ended in the middle of a transfer")
        filled += got
        came(filled)


def _receive_some(sock: socket.socket, into: memoryview) -> int:
    _wake_at(sock, len(into))
    try:
        # no deadline: the socket has one
        return sock.recv_into(into)
    except TimeoutError:
        # What comes slowly has come nevertheless.
        _wake_at(sock, 1)
        # no deadline: the socket has one
        return sock.recv_into(into)


def _wake_at(sock: socket.socket, nbytes: int) -> None:
    """The socket is readable when so much has come, or the low-water mark; the end always wakes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, min(nbytes, LOW_WATER_NBYTES)))
