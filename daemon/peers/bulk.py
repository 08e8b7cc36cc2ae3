"""Hundreds of megabytes over a connection: from memory to the socket, and from the socket into memory.

The bytes pass by asyncio's streams, which would copy them three times. The socket is read and written through
a file descriptor of its own, which the event loop may watch beside the transport's.

Not by sendfile: a region's pages are small, and to hand them over one by one took the sender more CPU time
than to copy them (over loopback 0.26 s/GB against 0.15 to 0.24), and the receiver more, too.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ckptless.daemon.peers.bucket import TokenBucket

# Of one call to the kernel, during which the event loop does nothing else: a millisecond at most.
SEND_NBYTES, RECEIVE_NBYTES = 1 << 20, 2 << 20
# The receiver is woken when so much is there, and not for every segment.
LOW_WATER_NBYTES = 1 << 20
# Under a limit, a chunk is what may be sent in so many seconds, within these bounds.
CHUNK_S = 0.05
# So long a transfer waits for the next byte, however long all of it takes.
PATIENCE_S = 15.0
CHUNK_MIN_NBYTES, CHUNK_MAX_NBYTES = 16 << 10, 4 << 20


class CountingReader(asyncio.StreamReader):
    """Knows how many bytes have come that nobody has read: `unread`."""

    unread = 0

    def feed_data(self, data: Any) -> None:
        """Bytes have come."""
        self.unread += len(data)
        super().feed_data(data)

    async def read(self, n: int = -1) -> bytes:
        """Up to `n` bytes."""
        data = await super().read(n)
        # All that there is, is read by calls with a number.
        self.unread -= len(data) if n >= 0 else 0
        return data

    async def readexactly(self, n: int) -> bytes:
        """As many as `n` bytes."""
        data = await super().readexactly(n)
        self.unread -= len(data)
        return data


class Pace:
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

    A transfer in which nothing moves for `patience_s` ends with TimeoutError.
    """

    def __init__(self, sock: Any, patience_s: float = PATIENCE_S) -> None:
        self._sock, self._patience_s = sock, patience_s
        self._open: set[socket.socket] = set()

    def stop(self) -> None:
        """The connection is being closed: both ends get ConnectionError out of what is on its way."""
        for sock in self._open:
            with contextlib.suppress(OSError):  # it is not connected any more
                sock.shutdown(socket.SHUT_RDWR)

    async def send(self, data: memoryview, pace: Pace) -> None:
        """All of `data`. Raises OSError."""
        loop = asyncio.get_running_loop()
        sent = upto = 0
        with self._socket() as sock:

            def step() -> bool:
                nonlocal sent
                sent += sock.send(data[sent : min(upto, sent + SEND_NBYTES)])
                return sent == upto

            while sent < len(data):
                upto = sent + await pace.turn(len(data) - sent)
                await self._each_time(loop.add_writer, loop.remove_writer, sock, step)

    async def receive(self, into: memoryview, came: Callable[[int], None]) -> None:
        """Fill `into`, and take not a byte more; `came(so many)` as it goes. Raises OSError."""
        loop = asyncio.get_running_loop()
        filled = 0
        with self._socket() as sock:

            def step() -> bool:
                nonlocal filled
                got = sock.recv_into(into[filled : filled + RECEIVE_NBYTES])
                if not got:
                    raise ConnectionResetError("the connection ended in the middle of a transfer")
                filled += got
                came(filled)
                left = len(into) - filled
                if left < LOW_WATER_NBYTES:
                    _wake_at(sock, left)
                return not left

            try:
                _wake_at(sock, len(into))
                await self._each_time(loop.add_reader, loop.remove_reader, sock, step)
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

    async def _each_time(
        self,
        watch: Callable[..., object],
        unwatch: Callable[[int], object],
        sock: socket.socket,
        step: Callable[[], bool],
    ) -> None:
        """`step` each time that the socket is ready, until it says that it was the last.

        Raises TimeoutError, which is an OSError, where it is not ready for long.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        try:
            async with asyncio.timeout(self._patience_s) as limit:

                def and_go_on() -> bool:
                    last = step()
                    limit.reschedule(loop.time() + self._patience_s)
                    return last

                watch(sock.fileno(), _step, and_go_on, done)
                try:
                    await done
                finally:
                    unwatch(sock.fileno())
        except TimeoutError:
            raise TimeoutError(f"nothing more has moved for {self._patience_s:.0f} s") from None


def _wake_at(sock: socket.socket, nbytes: int) -> None:
    """The socket is readable when so much has come, or the low-water mark; the end always wakes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, min(nbytes, LOW_WATER_NBYTES)))


def _step(step: Callable[[], bool], done: asyncio.Future[None]) -> None:
    if done.done():
        return
    try:
        last = step()
    except (BlockingIOError, InterruptedError):
        return
    except Exception as error:  # noqa: BLE001 - it is raised in the task that waits
        done.set_exception(error)
    else:
        if last:
            done.set_result(None)
