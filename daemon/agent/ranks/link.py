"""The agent's Unix socket for its ranks: framed messages, and memfds beside them (SCM_RIGHTS).

asyncio's transports cannot pass descriptors, so this drives non-blocking sockets from the loop itself.
"""

import array
import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from ckptless.daemon.protocol.codec import RANK_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.messages import FromRank, ToRank
from ckptless.daemon.protocol.peercred import peer_credentials
from ckptless.daemon.protocol.ring import FromRing, ToRing
from ckptless.daemon.protocol.saving import FromWriter, ToWriter

logger = logging.getLogger(__name__)

Heard: TypeAlias = FromRank | FromWriter | FromRing

READ_NBYTES = 1 << 18
# A rank that does not read its agent's few small messages any more is as good as dead.
UNSENT_LIMIT = 64 << 20


class RankLink:
    """The connection of one training process. Owned by the agent's event loop."""

    def __init__(self, sock: socket.socket, on_message: "OnMessage", on_close: "OnClose") -> None:
        self.pid, self.uid = peer_credentials(sock)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._decoder: Decoder[Heard] = Decoder(FromRank | FromWriter | FromRing, RANK_LIMIT)
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._unsent_nbytes = 0
        self._on_message, self._on_close = on_message, on_close
        self.open = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def send(self, message: ToRank | ToWriter | ToRing, fd: int | None = None) -> None:
        """Queue a message; `fd` goes with its first byte and stays the caller's."""
        if not self.open:
            return
        data = memoryview(encode(message))
        self._unsent.append((data, os.dup(fd) if fd is not None else None))
        self._unsent_nbytes += len(data)
        if self._unsent_nbytes > UNSENT_LIMIT:
            logger.warning("process %d does not read its messages: hanging up", self.pid)
            self.close()
        else:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                data, fd = self._unsent[0]
                rights = []
                if fd is not None:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                sent = self._sock.sendmsg([data], rights)
                self._unsent_nbytes -= sent
                if fd is not None:
                    os.close(fd)
                if sent < len(data):
                    self._unsent[0] = (data[sent:], None)
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._writable)
        except OSError as error:
            logger.debug("process %d: %s", self.pid, error)
            self.close()

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock)
        self._flush()

    def _readable(self) -> None:
        try:
            # no deadline: the socket does not block
            data = self._sock.recv(READ_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("process %d: %s", self.pid, error)
            data = b""
        if not data:
            self.close()
            return
        try:
            for message in self._decoder.feed(data):
                self._on_message(self, message)
        except ProtocolError as error:
            logger.warning("process %d: %s", self.pid, error)
            self.close()

    def close(self) -> None:
        """End the connection; `on_close` is told once."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for _, fd in self._unsent:
            if fd is not None:
                os.close(fd)
        self._unsent.clear()
        self._on_close(self)


OnMessage = Callable[[RankLink, Heard], None]
OnClose = Callable[[RankLink], None]


class RankServer:
    """Accepts the ranks of this node; processes of other users are refused."""

    def __init__(self, name: str, on_message: OnMessage, on_close: OnClose) -> None:
        self._name = name
        self._on_message, self._on_close = on_message, on_close
        self._links: set[RankLink] = set()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)

    def start(self) -> None:
        """Listen. Raises OSError."""
        Path(self._name).unlink(missing_ok=True)
        self._sock.bind(self._name)
        Path(self._name).chmod(0o600)
        self._sock.listen(128)
        self._sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self._sock, self._acceptable)

    def _acceptable(self) -> None:
        try:
            # no deadline: the socket does not block
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        link = RankLink(sock, self._on_message, self._closed)
        self._links.add(link)
        if link.uid != os.getuid():
            logger.warning("refused process %d of uid %d", link.pid, link.uid)
            link.close()

    def _closed(self, link: RankLink) -> None:
        self._links.discard(link)
        self._on_close(link)

    def close(self) -> None:
        """Hang up on everybody and remove the socket."""
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        for link in list(self._links):
            link.close()
        Path(self._name).unlink(missing_ok=True)
