"""Listens for agents and daemons: who greets gets streams, and a `Link` then does the handshake.

What is no greeting is refused here, at little cost.

Anybody can connect. So those that have proved nothing yet are few: one more, and the oldest that has not even
greeted gives way, else the oldest. Nobody is refused for others that are there: who greets at once gets in.
But from one address so many come in a second as leave time for others: the rest is hung up on at once, which
takes less time than to connect does, so that the kernel's queue has room for whoever else connects.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import struct
from collections.abc import Callable
from typing import TypeAlias

from ckptless.daemon.protocol.errors import MismatchError, ProtocolError, UsageError
from ckptless.daemon.transport import handshake
from ckptless.daemon.transport.bucket import TokenBucket
from ckptless.daemon.transport.bulk import CountingReader, Streams
from ckptless.daemon.transport.link import GREETING_BUFFER_BYTES, HANDSHAKE_DEADLINE_S
from ckptless.daemon.transport.tasks import Tasks, end_all

logger = logging.getLogger(__name__)

# All ranks, or agents, of a job may connect in the same moment; and where it is full, the kernel drops who
# connects, whose kernel tries again a second later.
BACKLOG = 4096
# Between two looks at connections that have something to say. asyncio takes its backlog for both.
ACCEPT_AT_ONCE = 32
# That have proved nothing yet, many more than `ACCEPT_AT_ONCE`; a quarter of the descriptors, where these are
# few.
MOST_UNPROVED = 512
# From one address, in a second and at once: more than all agents of a node ever need. Of the rest so many are
# hung up on between two looks at the others.
CONNECTIONS_PER_S, CONNECTIONS_AT_ONCE = 200.0, 512.0
CUT_AT_ONCE = 256
# Addresses that are remembered for this.
MOST_SOURCES = 4096
_RESET = struct.pack("ii", 1, 0)
# No descriptor is left: connections wait in the kernel until then.
AGAIN_S = 1.0
OnStreams: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
OnRefused: TypeAlias = Callable[[str, str], None]
"""Hears of an address, and why whoever connected from there is hung up on."""


def most_unproved() -> int:
    """Return how many connections may be there of which nothing is proved."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_UNPROVED if soft == resource.RLIM_INFINITY else min(MOST_UNPROVED, max(16, soft // 4))


class Listener:
    """`on_streams(reader, writer)` owns what it is given; nothing has been proved by anybody then.

    Streams are counted here until they are proved (`CountingReader.widen`) or closed. One of another version
    gets them, too, to be told of it.
    """

    def __init__(
        self,
        on_streams: OnStreams,
        on_refused: OnRefused = lambda _address, _why: None,
    ) -> None:
        self._on_streams, self._on_refused = on_streams, on_refused
        self._sock: socket.socket | None = None
        # Both in the order in which they came.
        self._visitors: dict[_Visitor, None] = {}
        self._unproved: dict[_Streams, None] = {}
        self._most = most_unproved()
        self._sources: dict[str, TokenBucket] = {}
        self._host = ""
        self._again: asyncio.TimerHandle | None = None
        self._tasks = Tasks()

    def open(self, host: str, port: int = 0) -> int:
        """Listen at a numeric address; the port. Raises OSError."""
        self._sock, self._host = listen(host, port), host
        asyncio.get_running_loop().add_reader(self._sock, self._accept)
        return int(self._sock.getsockname()[1])

    def _accept(self) -> None:
        assert self._sock is not None
        taken = 0
        for _ in range(CUT_AT_ONCE):
            try:
                # no deadline: the socket does not block
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                logger.warning("no connection of another agent can be taken: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._sock)
                self._again = loop.call_later(AGAIN_S, loop.add_reader, self._sock, self._accept)
                return
            if not self._may_come(address[0]):
                # Without this the kernel would remember each for a minute.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.close()
                continue
            sock.setblocking(False)
            self._make_room()
            visitor = _Visitor(sock, address[0], self._greeted)
            self._visitors[visitor] = None
            # What it says first has mostly come with it.
            visitor.look()
            taken += 1
            if taken == ACCEPT_AT_ONCE:
                return

    def _may_come(self, address: str) -> bool:
        """Whether from there no more have come lately than may."""
        # Any process has all of 127/8 for its own addresses.
        if address.startswith("127.") and not self._host.startswith("127."):
            address = "127."
        if len(self._sources) > MOST_SOURCES:
            self._sources.clear()
        bucket = self._sources.get(address)
        if bucket is None:
            bucket = self._sources[address] = TokenBucket(CONNECTIONS_PER_S, CONNECTIONS_AT_ONCE)
        return bucket.spend(1, asyncio.get_running_loop().time())

    def _make_room(self) -> None:
        if len(self._visitors) + len(self._unproved) < self._most:
            return
        logger.debug("%d connections are here of which nothing is proved: the oldest gives way", self._most)
        if self._visitors:
            oldest = next(iter(self._visitors))
            del self._visitors[oldest]
            oldest.leave()
            oldest.sock.close()
        else:
            streams = next(iter(self._unproved))
            del self._unproved[streams]
            streams.hang_up()

    def _greeted(self, visitor: "_Visitor", refused: str | None) -> None:
        self._visitors.pop(visitor, None)
        if refused is not None:
            visitor.sock.close()
            self._on_refused(visitor.address, refused)
            return
        self._tasks.spawn(self._give_streams(visitor.sock, bytes(visitor.came)))

    async def _give_streams(self, sock: socket.socket, came: bytes) -> None:
        loop = asyncio.get_running_loop()
        reader = CountingReader(GREETING_BUFFER_BYTES, loop)
        reader.feed_data(came)
        protocol = _Streams(reader, self._on_streams, self._settled)
        reader.on_wide = lambda: self._settled(protocol)
        self._unproved[protocol] = None
        try:
            await loop.connect_accepted_socket(lambda: protocol, sock)
        except BaseException:
            self._settled(protocol)
            sock.close()
            raise

    def _settled(self, streams: "_Streams") -> None:
        """Note that a connection has proved who it is, or is gone."""
        self._unproved.pop(streams, None)

    async def close(self) -> None:
        """Listen no more, and hang up on whoever has said nothing yet. Harmless when it is closed."""
        if self._sock is None:
            return
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._sock = None
        for visitor in list(self._visitors):
            visitor.leave()
            visitor.sock.close()
        self._visitors.clear()
        await end_all(self._tasks)


class _Streams(Streams):
    """Streams of which `gone` hears when their connection is closed."""

    def __init__(
        self, reader: asyncio.StreamReader, on_streams: OnStreams, gone: Callable[["_Streams"], None]
    ) -> None:
        super().__init__(reader, on_streams, asyncio.get_running_loop())
        self._gone = gone
        self._connection: asyncio.BaseTransport | None = None
        self._given_up = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection = transport
        super().connection_made(transport)
        if self._given_up:
            self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._gone(self)

    def hang_up(self) -> None:
        """Without a word, as soon as there is a connection."""
        self._given_up = True
        if isinstance(self._connection, asyncio.Transport):
            self._connection.abort()


class _Visitor:
    """A connection that has not greeted yet. `done` hears once: None, it has; or why it is refused."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        done: Callable[["_Visitor", str | None], None],
    ) -> None:
        self.sock, self.address, self._done = sock, address, done
        self.came = bytearray()
        self._waits = False
        self._deadline: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """At what has come."""
        try:
            # no deadline: the socket does not block
            data = self.sock.recv(handshake.LENGTH_BYTES + handshake.GREETING_LIMIT)
        except (BlockingIOError, InterruptedError):
            self._wait()
            return
        except OSError:
            data = b""
        self.came += data
        if not data:
            self._leave_as("the other end hung up during the greeting")
            return
        try:
            greeted = _has_greeted(self.came)
        except ProtocolError as error:
            self._leave_as(str(error))
            return
        if greeted:
            self._leave_as(None)
        else:
            self._wait()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            loop = asyncio.get_running_loop()
            loop.add_reader(self.sock, self.look)
            why = f"no greeting has come in {HANDSHAKE_DEADLINE_S:g} s"
            self._deadline = loop.call_later(HANDSHAKE_DEADLINE_S, self._leave_as, why)

    def _leave_as(self, refused: str | None) -> None:
        self.leave()
        self._done(self, refused)

    def leave(self) -> None:
        """Watch the socket no more."""
        if self._waits:
            self._waits = False
            asyncio.get_running_loop().remove_reader(self.sock)
        if self._deadline is not None:
            self._deadline.cancel()


def _has_greeted(came: bytearray) -> bool:
    """Return whether an opening has come, also one of another version. Raises ProtocolError."""
    if len(came) < handshake.LENGTH_BYTES:
        return False
    end = handshake.LENGTH_BYTES + handshake.parse_length(bytes(came[: handshake.LENGTH_BYTES]))
    if len(came) < end:
        return False
    with contextlib.suppress(MismatchError):
        handshake.check_opening(
            handshake.decode(bytes(came[handshake.LENGTH_BYTES : end]), handshake.Opening)
        )
    return True


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at a numeric address, and does not block. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock


async def serve(host: str, make: Callable[[], asyncio.BaseProtocol]) -> tuple[asyncio.Server, int]:
    """A server at a numeric address, and its port, which the system chooses. Raises OSError, UsageError."""
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        # A name may stand for several addresses, which would get a port each.
        raise UsageError(f"an agent listens at a numeric address, not at {host!r}") from error
    sock = listen(host)
    port = int(sock.getsockname()[1])
    try:
        server = await asyncio.get_running_loop().create_server(make, sock=sock, backlog=ACCEPT_AT_ONCE)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return server, port
