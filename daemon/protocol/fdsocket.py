"""Messages and file descriptors in turn over a Unix socket, for asyncio, whose streams lose descriptors."""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import PeerError, ProtocolError
from ckptless.daemon.protocol.peercred import daemon_credentials, unix_address

T = TypeVar("T")
R = TypeVar("R")


def take_descriptor(sock: socket.socket, room: int = 1) -> int:
    """Receive the one descriptor that comes next, and one byte. Raises OSError, PeerError, ProtocolError.

    `sock` does not block. The kernel closes descriptors that there is no `room` for.
    """
    # One more, to see that there is one too many.
    # no deadline: the socket does not block
    data, fds, _flags, _ = socket.recv_fds(sock, 1, room + 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise PeerError("the other end hung up")
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ProtocolError(f"{len(fds)} file descriptors where one was to come")
    return fds[0]


class FdSocket(Generic[T]):
    """A connected, non-blocking socket whose messages are of union type `kind`; `close` it.

    Never reads ahead: a descriptor comes with the one byte that is asked for it. One task at a time, and
    whoever calls sets the deadline. Every call raises OSError, and PeerError where the other end has hung up.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self._decoder: Decoder[T] = Decoder(kind, CONTROL_LIMIT)
        sock.setblocking(False)

    @classmethod
    async def connect(cls, name: str, kind: Any) -> Self:
        """Connect to the daemon that listens under this name. Raises PeerError where it is somebody else."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        link = cls(sock, kind)
        try:
            # no deadline: the caller's, for all of what it exchanges
            await link._loop.sock_connect(sock, unix_address(name))
            daemon_credentials(sock, name)
        except BaseException:
            sock.close()
            raise
        return link

    async def send(self, message: object) -> None:
        """Send a message."""
        # no deadline: the caller's, for all of what it exchanges
        await self._loop.sock_sendall(self._sock, encode(message))

    async def receive(self) -> T:
        """The next message, and not a byte more. Raises ProtocolError."""
        while not (messages := self._decoder.feed(await self._some(self._decoder.missing))):
            pass
        return messages[0]

    async def _some(self, nbytes: int) -> bytes:
        # no deadline: the caller's, for all of what it exchanges
        data = await self._loop.sock_recv(self._sock, nbytes)
        if not data:
            raise PeerError("the other end hung up")
        return data

    async def send_fd(self, fd: int) -> None:
        """Pass a descriptor, which stays the caller's."""
        await self._when_ready(self._loop.add_writer, lambda: socket.send_fds(self._sock, [b"\0"], [fd]))

    async def receive_fd(self) -> int:
        """A descriptor, which is the caller's from here on. Raises ProtocolError where none comes."""
        return await self._when_ready(self._loop.add_reader, lambda: take_descriptor(self._sock))

    async def _when_ready(self, watch: Callable[..., Any], do: Callable[[], R]) -> R:
        """Do it as soon as the socket lets it."""
        while True:
            try:
                return do()
            except BlockingIOError:
                await self._ready(watch)

    async def _ready(self, watch: Callable[..., Any]) -> None:
        ready = asyncio.Event()
        watch(self._sock, ready.set)
        try:
            # no deadline: the caller's, for all of what it exchanges
            await ready.wait()
        finally:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)

    def close(self) -> None:
        """Hang up, at this end of it."""
        self._sock.close()
