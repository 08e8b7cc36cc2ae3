"""Where an agent listens for others: each connection goes to whom its first greeting is for.

One for the key-value store becomes a `Channel`, of which there may be hundreds in one moment; every other one
gets streams, and a `Link` then does the handshake. So does whatever is no greeting: it is refused there.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import TypeAlias

from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.peers import handshake
from ckptless.daemon.peers.bulk import CountingReader
from ckptless.daemon.peers.link import GREETING_BUFFER_BYTES, HANDSHAKE_DEADLINE_S

logger = logging.getLogger(__name__)

# All agents of a job may connect in the same moment.
BACKLOG = 1024
# Between two looks at connections that have something to say.
ACCEPT_AT_ONCE = 64
# No descriptor is left: connections wait in the kernel until then.
AGAIN_S = 1.0
OnStreams: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
OnStore: TypeAlias = Callable[[socket.socket, handshake.Opening], None]


class Door:
    """`on_streams(reader, writer)` and `on_store(socket, opening)` own what they are given.

    Nothing has been proved by anybody then. Who opens for the store and says more before it is answered is
    not heard: that is no agent.
    """

    def __init__(self, on_streams: OnStreams, on_store: OnStore) -> None:
        self._on_streams, self._on_store = on_streams, on_store
        self._sock: socket.socket | None = None
        self._visitors: set[_Visitor] = set()
        self._again: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, host: str, port: int = 0) -> int:
        """Listen at a numeric address; the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self._sock, self._accept)
        return int(self._sock.getsockname()[1])

    def _accept(self) -> None:
        assert self._sock is not None
        for _ in range(ACCEPT_AT_ONCE):
            try:
                # no deadline: the socket does not block
                sock, _ = self._sock.accept()
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
            sock.setblocking(False)
            visitor = _Visitor(sock, self._greeted)
            self._visitors.add(visitor)
            # What it says first has mostly come with it.
            visitor.look()

    def _greeted(self, visitor: "_Visitor", opening: handshake.Opening | None) -> None:
        self._visitors.discard(visitor)
        if opening is not None:
            self._on_store(visitor.sock, opening)
            return
        task = asyncio.create_task(self._give_streams(visitor.sock, bytes(visitor.came)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give_streams(self, sock: socket.socket, came: bytes) -> None:
        loop = asyncio.get_running_loop()
        reader = CountingReader(GREETING_BUFFER_BYTES, loop)
        reader.feed_data(came)
        protocol = asyncio.StreamReaderProtocol(reader, self._on_streams, loop)
        try:
            await loop.connect_accepted_socket(lambda: protocol, sock)
        except BaseException:
            sock.close()
            raise

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
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Visitor:
    """A connection of which is not known yet what it is for. `done` hears once: None, it gets streams."""

    def __init__(
        self, sock: socket.socket, done: Callable[["_Visitor", handshake.Opening | None], None]
    ) -> None:
        self.sock, self._done = sock, done
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
            data = b""  # the streams meet it again
        self.came += data
        if not data or (known := _read(self.came)) is True:
            self._leave_as(None)
        elif known is False:
            self._wait()
        else:
            self._leave_as(known)

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            loop = asyncio.get_running_loop()
            loop.add_reader(self.sock, self.look)
            self._deadline = loop.call_later(HANDSHAKE_DEADLINE_S, self._leave_as, None)

    def _leave_as(self, opening: handshake.Opening | None) -> None:
        self.leave()
        self._done(self, opening)

    def leave(self) -> None:
        """Watch the socket no more."""
        if self._waits:
            self._waits = False
            asyncio.get_running_loop().remove_reader(self.sock)
        if self._deadline is not None:
            self._deadline.cancel()


def _read(came: bytearray) -> handshake.Opening | bool:
    """An opening for the store; False: more must come; True: it is something else."""
    if len(came) < handshake.LENGTH_BYTES:
        return False
    try:
        end = handshake.LENGTH_BYTES + handshake.parse_length(bytes(came[: handshake.LENGTH_BYTES]))
        if len(came) < end:
            return False
        opening = handshake.decode(bytes(came[handshake.LENGTH_BYTES : end]), handshake.Opening)
        handshake.check_opening(opening)
    except ProtocolError:
        return True
    return opening if opening.store and len(came) == end else True
