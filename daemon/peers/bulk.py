"""Hundreds of megabytes over a connection: from a file to the socket, and from the socket into memory.

The bytes pass by asyncio's streams, which would copy them three times. The socket is read and written through
a file descriptor of its own, which the event loop may watch beside the transport's.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ckptless.daemon.peers.bucket import TokenBucket

# Of one call to the kernel, during which the event loop does nothing else: some hundred microseconds.
STEP_NBYTES = 1 << 20
# Under a limit, a chunk is what may be sent in so many seconds, within these bounds.
CHUNK_S = 0.05
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
    """Moves bytes through one connection's socket; `stop` ends what is on its way."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._open: set[socket.socket] = set()

    def stop(self) -> None:
        """The connection is being closed: both ends get ConnectionError out of what is on its way."""
        for sock in self._open:
            with contextlib.suppress(OSError):  # it is not connected any more
                sock.shutdown(socket.SHUT_RDWR)

    async def send(self, fd: int, offset: int, nbytes: int, pace: Pace) -> None:
        """Bytes of a file, without a copy: they must not change until the other end has them.

        Raises OSError. `fd` may be closed as soon as this runs; its position is not used.
        """
        loop = asyncio.get_running_loop()
        upto, end = offset, offset + nbytes
        source = os.dup(fd)
        try:
            with self._socket() as sock:

                def step() -> bool:
                    nonlocal offset
                    sent = os.sendfile(sock.fileno(), source, offset, min(upto - offset, STEP_NBYTES))
                    if not sent:
                        raise OSError(f"nothing lies at byte {offset} of what is to be sent")
                    offset += sent
                    return offset == upto

                while offset < end:
                    upto = offset + await pace.turn(end - offset)
                    await _each_time(loop.add_writer, loop.remove_writer, sock, step)
        finally:
            os.close(source)

    async def receive(self, into: memoryview, came: Callable[[int], None]) -> None:
        """Fill `into`, and take not a byte more; `came(so many)` as it goes. Raises OSError."""
        loop = asyncio.get_running_loop()
        filled = 0
        with self._socket() as sock:

            def step() -> bool:
                nonlocal filled
                got = sock.recv_into(into[filled : filled + STEP_NBYTES])
                if not got:
                    raise ConnectionResetError("the connection ended in the middle of a transfer")
                filled += got
                came(filled)
                return filled == len(into)

            await _each_time(loop.add_reader, loop.remove_reader, sock, step)

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
    watch: Callable[..., object],
    unwatch: Callable[[int], object],
    sock: socket.socket,
    step: Callable[[], bool],
) -> None:
    """`step` each time that the socket is ready, until it says that it was the last."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watch(sock.fileno(), _step, step, done)
    try:
        await done
    finally:
        unwatch(sock.fileno())


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
