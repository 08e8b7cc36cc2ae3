"""A blocking connection to the agent's rings: framed messages, memfds beside them, and a way to be woken."""

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from typing import Any, Generic, TypeVar

from ckptless.daemon.protocol import ring as m
from ckptless.daemon.protocol.codec import RANK_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import PeerError, ProtocolError
from ckptless.daemon.protocol.peercred import unix_address

T = TypeVar("T", bound=m.ToRing)

SEND_DEADLINE_S = 30
READ_NBYTES = 1 << 18
MAX_FDS = 64
_FD_NBYTES = array.array("i").itemsize


class RingSocket(Generic[T]):
    """Hears messages of union type `kind`. One thread, but for `wake`; close it.

    Every call raises PeerError where the agent is gone.
    """

    def __init__(self, name: str, kind: Any) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # Not Python's own deadline, with which MSG_DONTWAIT would wait, too.
        timeval = struct.pack("ll", SEND_DEADLINE_S, 0)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        try:
            self._sock.connect(unix_address(name))
        except OSError as error:
            self._sock.close()
            raise PeerError(f"cannot reach the agent at {name}: {error}") from error
        self._decoder: Decoder[T] = Decoder(kind, RANK_LIMIT)
        self._messages: deque[T] = deque()
        self._fds: deque[int] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def send(self, message: m.FromRing) -> None:
        """Say something."""
        try:
            self._sock.sendall(encode(message))
        except OSError as error:
            raise PeerError(f"the agent is gone: {error}") from error

    def next(self) -> tuple[T, int | None] | None:
        """Return what has come, the oldest first, without waiting; the descriptor is the caller's."""
        if not self._messages:
            self._read()
        if not self._messages:
            return None
        message = self._messages.popleft()
        carries = isinstance(message, m.RingEntry | m.RingMake)
        if carries and not self._fds:
            raise ProtocolError(f"{type(message).__name__} came without its memory")
        return message, self._fds.popleft() if carries else None

    def wait(self, deadline_s: float | None) -> bool:
        """Wait until something has come or somebody woke this; False at the deadline (None: none)."""
        if self._messages:
            return True
        end = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            left = None if end is None else max(0.0, end - time.monotonic()) * 1000
            found = self._poll.poll(left)
            if any(fd == self._wake for fd, _ in found):
                os.eventfd_read(self._wake)
            if found or left == 0:
                return bool(found)

    def wait_hung_up(self, deadline_s: float) -> None:
        """Wait until the agent has hung up, or the deadline; what comes before that is not looked at."""
        end = time.monotonic() + deadline_s
        with contextlib.suppress(PeerError):
            while self.wait(max(0.0, end - time.monotonic())):
                while (found := self.next()) is not None:
                    if found[1] is not None:
                        os.close(found[1])

    def wake(self) -> None:
        """End a `wait`. Any thread."""
        os.eventfd_write(self._wake, 1)

    def _read(self) -> None:
        # Not socket.recv_fds: in Python 3.11 it takes flags and does not pass them on.
        room = socket.CMSG_SPACE(MAX_FDS * _FD_NBYTES)
        try:
            data, rest, flags, _ = self._sock.recvmsg(
                READ_NBYTES, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerError(f"the agent is gone: {error}") from error
        for level, kind, payload in rest:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) // _FD_NBYTES * _FD_NBYTES])
                self._fds.extend(fds)
        if not data:
            raise PeerError("the agent is gone: it hung up")
        if flags & socket.MSG_CTRUNC:
            raise PeerError("no file descriptors are left in this process: raise its limit (ulimit -n)")
        self._messages.extend(self._decoder.feed(data))

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
        os.close(self._wake)
        while self._fds:
            os.close(self._fds.popleft())
        self._messages.clear()
