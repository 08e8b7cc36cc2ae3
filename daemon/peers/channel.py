"""One authenticated connection whose messages are handed on as they come: no task, and no stream.

An agent may have one with each other agent of its job. With a task, streams and timeouts for each, these took
more time than everything that is said over them.
"""

import asyncio
import errno
import os
import socket
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from ckptless.daemon.api.errors import CkptlessError, PeerError, ProtocolError
from ckptless.daemon.peers.keyed import Keyed
from ckptless.daemon.peers.link import HANDSHAKE_DEADLINE_S, GreetingCutError, Route

M = TypeVar("M")
Heard = TypeVar("Heard", contravariant=True)

# Of one call to the kernel: the usual one, and the most of a frame that is known to be larger.
READ_NBYTES, MOST_READ_NBYTES = 64 << 10, 1 << 20
_ENCODER = msgspec.msgpack.Encoder()


class Handler(Protocol[Heard]):
    """Who hears of a channel, in the loop's thread; of `ended` never before `dial` or `accept` returns."""

    def proved(self, channel: Any) -> None:
        """The other end holds the key, and is node `channel.node`: it may be sent to."""

    def heard(self, channel: Any, message: Heard) -> None:
        """The next message. May raise CkptlessError, by which the channel ends."""

    def ended(self, channel: Any, error: Exception) -> None:
        """Other than by `close` at this end; once."""


class Ends(NamedTuple, Generic[M]):
    """What goes on at this end of a channel, whose messages are those that `decoder` takes."""

    keyed: Keyed
    handler: Handler[M]
    decoder: "msgspec.msgpack.Decoder[M]"


class Channel(Generic[M]):
    """Owned by the event loop that it was made in.

    Where the other end has not proved itself in `HANDSHAKE_DEADLINE_S` it ends with TimeoutError; with
    GreetingCutError where that hung up first, which is ordinary while it has not heard of the job yet.
    """

    def __init__(self, sock: socket.socket, ends: Ends[M]) -> None:
        self._loop = asyncio.get_running_loop()
        # The loop is given the number: for a socket it would ask the kernel for both its ends' addresses.
        self._sock, self._fd, self._ends = sock, sock.fileno(), ends
        self._unsent = bytearray()
        # What is sent while something that came is dealt with goes out with one call.
        self._corked = self._waits_to_write = False
        self._closed = self._refused = False
        self._deadline = self._loop.call_later(HANDSHAKE_DEADLINE_S, self._late)

    @classmethod
    def dial(cls, route: Route, ends: Ends[M]) -> "Channel[M]":
        """Begin to connect to a numeric address. Raises OSError."""
        family = socket.AF_INET6 if ":" in route.address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if route.source is not None:
                sock.bind((route.source, 0))
            found = sock.connect_ex(route.address)
            if found not in (0, errno.EINPROGRESS):
                raise OSError(found, f"{os.strerror(found)}: {route.address[0]} port {route.address[1]}")
        except BaseException:
            sock.close()
            raise
        return cls._begin(sock, ends)

    @classmethod
    def accept(cls, sock: socket.socket, ends: Ends[M]) -> "Channel[M]":
        """Take a non-blocking connection, whose dialler has opened. Raises OSError, PeerError."""
        return cls._begin(sock, ends)

    @classmethod
    def _begin(cls, sock: socket.socket, ends: Ends[M]) -> "Channel[M]":
        channel = cls(sock, ends)
        try:
            # Messages are answered: Nagle's algorithm would add 40 ms to some of them.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel._unsent += ends.keyed.begin()
            # Within a machine it is connected at once; else the kernel says to try again.
            channel._write_out()
            channel._loop.add_reader(channel._fd, channel._readable)
        except BaseException:
            channel.close()
            raise
        return channel

    @property
    def node(self) -> int:
        """The other end; that it is, it may not have proved yet."""
        return self._ends.keyed.node

    @property
    def is_proved(self) -> bool:
        """Whether it has."""
        return self._ends.keyed.proved

    # ------------------------------------------------------------------------------------ send

    def send(self, message: M) -> None:
        """Soon, in order, unless the channel ends before."""
        if self._closed:
            return
        self._unsent += self._ends.keyed.seal(_ENCODER.encode(message))
        if self._corked or self._waits_to_write:
            return
        try:
            self._write_out()
        except OSError as error:
            self._loop.call_soon(self._end, error)

    def _write_out(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent == len(self._unsent):
            self._unsent.clear()
            if self._waits_to_write:
                self._waits_to_write = False
                self._loop.remove_writer(self._fd)
            return
        del self._unsent[:sent]
        if not self._waits_to_write:
            self._waits_to_write = True
            self._loop.add_writer(self._fd, self._writable)

    def _write_rest(self) -> None:
        if self._unsent and not self._waits_to_write and not self._closed:
            self._writable()

    def _writable(self) -> None:
        try:
            self._write_out()
        except OSError as error:
            self._end(error)

    # --------------------------------------------------------------------------------- receive

    def _readable(self) -> None:
        try:
            # no deadline: the socket does not block
            data = self._sock.recv(min(max(self._ends.keyed.missing_nbytes, READ_NBYTES), MOST_READ_NBYTES))
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError as error:
            # So it ends, too, where the other end has hung up before it read the greeting.
            self._end(error if self.is_proved else self._cut())
            return
        except OSError as error:
            self._end(error)
            return
        if not data:
            self._end(ConnectionResetError("the other end hung up") if self.is_proved else self._cut())
        elif not self._refused:
            self._take(data)

    @staticmethod
    def _cut() -> Exception:
        return GreetingCutError("the other end hung up during the greeting")

    def _take(self, data: bytes) -> None:
        self._corked = True
        try:
            self._deal_with(data)
            if self._unsent and not self._waits_to_write:
                # What follows from it may be said a little later in this turn of the loop.
                self._loop.call_soon(self._write_rest)
        except (CkptlessError, OSError) as error:
            self._end(error)
        except BaseException as error:
            # A mistake of ours: who waits for the other end is told, and the loop says what it was.
            self._end(PeerError(f"{type(error).__name__} while its message was dealt with"))
            raise
        finally:
            self._corked = False

    def _deal_with(self, data: bytes) -> None:
        keyed, handler, decoder = self._ends
        was_proved = keyed.proved
        reply, bodies = keyed.feed(data)
        self._unsent += reply
        if keyed.proved and not was_proved:
            self._deadline.cancel()
            handler.proved(self)
        for body in bodies:
            if self._closed or self._refused:
                return
            try:
                message = decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"not a message of this edge: {error}") from error
            handler.heard(self, message)

    # ------------------------------------------------------------------------------------- end

    def _late(self) -> None:
        self._end(TimeoutError(f"nothing has come for {HANDSHAKE_DEADLINE_S:g} s"))

    def _end(self, error: Exception) -> None:
        if self._closed:
            return
        self.close()
        self._ends.handler.ended(self, error)

    def refuse(self, message: M) -> None:
        """The last one. What the other end still says is not heard; it is the one that hangs up.

        If this end did, while something is unread, the kernel might not deliver the message.
        """
        self.send(message)
        self._refused = True
        self._deadline = self._loop.call_later(HANDSHAKE_DEADLINE_S, self._late)

    def close(self) -> None:
        """End the connection, without what is still to be sent."""
        if self._closed:
            return
        self._closed = True
        self._deadline.cancel()
        self._loop.remove_reader(self._fd)
        if self._waits_to_write:
            self._loop.remove_writer(self._fd)
        self._sock.close()
