"""A rank's conversation with its agent.

Two threads: a listener, which alone receives, and the main thread, which asks and waits here. What the
listener learns stands under one condition variable. STOP is acted on in the listener itself: it aborts the
process groups, which frees a main thread that is stuck in a collective.
"""

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn, TypeAlias

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import RANK_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import NoRoomError, PeerError, ProtocolError
from ckptless.daemon.protocol.peercred import unix_address
from ckptless.pytorch_hooks.agent_session.page import Page
from ckptless.pytorch_hooks.errors import GenerationEnded

HELLO_DEADLINE_S = 30.0
READ_NBYTES = 1 << 18
_Request: TypeAlias = m.Allocate | m.Fetch | m.FetchRecord | m.FetchSpans
_Reply: TypeAlias = m.Allocated | m.Fetched | m.FetchedRecord | m.FetchedSpans
MAX_FDS = 16
# The exit code of a rank whose agent is gone: sysexits(3) EX_UNAVAILABLE.
EXIT_NO_AGENT = 69


class Session:
    """The connection to `agent_socket`, and what has come over it.

    `on_stop(generation)` is called in the listener thread.
    """

    def __init__(self, agent_socket: str) -> None:
        self.agent_socket = agent_socket
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sock.settimeout(HELLO_DEADLINE_S)
        try:
            self._sock.connect(unix_address(agent_socket))
        except OSError as error:
            raise PeerError(f"cannot reach the agent at {agent_socket}: {error}") from error
        self.on_stop: Callable[[int], None] = lambda _generation: None
        self._decoder: Decoder[m.ToRank] = Decoder(m.ToRank, RANK_LIMIT)
        self._fds: deque[int] = deque()
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._assigned: m.Assigned | None = None
        # The ids of the newest faults that this rank has heard of, for its log.
        self.faults: tuple[str, ...] = ()
        self._ended = 0
        self._went = 0
        self._released = 0
        self._acked: tuple[int, int] = (0, -1)
        self._writes: tuple[int, bool] = (0, False)
        self._reply: tuple[_Reply, int | None] | None = None
        self._closing = False
        self.welcome = self._greet()
        # The agent's; memory of this process's own where it has sent none.
        self.page = Page(self._fds.popleft() if self._fds else None)
        # Waits are bounded by the control plane's deadlines from here on, not by the socket.
        self._sock.settimeout(None)
        self._listener = threading.Thread(target=self._listen, name="ckptless-listener", daemon=True)
        self._listener.start()

    def _greet(self) -> m.Welcome:
        self.send(m.Hello(protocol=m.PROTOCOL))
        try:
            while not (messages := self._receive()):
                pass
        except PeerError as error:
            self._sock.close()
            raise PeerError(
                f"the agent does not take this process ({error}): its log says why, as where it is of "
                "another version of ckptless"
            ) from error
        if not isinstance(messages[0], m.Welcome):
            raise ProtocolError(f"the agent answered Hello with {type(messages[0]).__name__}")
        # The first assignment may be in the same breath.
        for message in messages[1:]:
            self._take(message)
        return messages[0]

    # ---------------------------------------------------------------------------------- listener

    def _listen(self) -> None:
        try:
            while True:
                for message in self._receive():
                    self._take(message)
        except (OSError, ProtocolError, PeerError) as error:
            if not self._closing:
                self._give_up(error)

    def _give_up(self, error: Exception) -> NoReturn:
        """Without its agent a rank can neither be stopped nor restored: it must not go on."""
        sys.stderr.write(f"ckptless: the agent is gone ({error}); this rank ends\n")
        sys.stderr.flush()
        os._exit(EXIT_NO_AGENT)

    def _receive(self) -> list[m.ToRank]:
        # no deadline: the agent's life is this one's; its end is the end of the connection
        data, fds, _, _ = socket.recv_fds(self._sock, READ_NBYTES, MAX_FDS)
        self._fds.extend(fds)
        if not data:
            raise PeerError("it hung up")
        return self._decoder.feed(data)

    def _take(self, message: m.ToRank) -> None:
        match message:
            case m.Ping():
                self.send(m.Pong(seq=message.seq))
                return
            case m.Stop():
                self.on_stop(message.generation)
        with self._news:
            self._note(message)
            self._news.notify_all()

    def _note(self, message: m.ToRank) -> None:
        match message:
            case m.Assigned():
                self._assigned, self.faults = message, message.faults
                # Everything before the newest assignment is over, whether or not its STOP came.
                self._ended = max(self._ended, message.generation - 1)
            case m.Stop():
                self._ended = max(self._ended, message.generation)
                self.faults = message.faults
            case m.Go():
                self._went = max(self._went, message.generation)
            case m.Release():
                self._released = max(self._released, message.generation)
            case m.Acked():
                self._acked = max(self._acked, (message.generation, message.step))
            case m.Writes():
                self._writes = (message.generation, message.writes)
            case m.Allocated() | m.FetchedSpans():
                self._reply = (message, self._fds.popleft() if message.error is None else None)
            case m.Fetched():
                fd = self._fds.popleft() if message.tensors is not None else None
                self._reply = (message, fd)
            case m.FetchedRecord():
                self._reply = (message, None)

    # ------------------------------------------------------------------------------- main thread

    def send(self, message: m.FromRank) -> None:
        """Say something. Any thread."""
        data = encode(message)
        with self._sending:
            self._sock.sendall(data)

    def ended(self, generation: int) -> bool:
        """Whether a generation is over."""
        return self._ended >= generation

    def wait_assigned(self, after: int) -> m.Assigned | None:
        """The newest assignment beyond generation `after`; a spare may wait for as long as the job lasts.

        None where none comes: every rank had finished in `after`. Then its STOP was that of a leader which
        did not know yet that another one leads.
        """
        with self._news:
            # no deadline: a spare waits as long as the job lasts; the agent's end is its own
            self._news.wait_for(lambda: self._is_new(after) or 0 < after <= self._released)
            return self._assigned if self._is_new(after) else None

    def wait_needed(self) -> m.Assigned:
        """Return this rank's part once what it was told ahead has come; the others train until then."""
        with self._news:
            # no deadline: as for a spare; the agent ends a process that has built for something else
            self._news.wait_for(lambda: self._assigned is not None and not self._assigned.ahead)
            assert self._assigned is not None
            return self._assigned

    def _is_new(self, after: int) -> bool:
        return self._assigned is not None and self._assigned.generation > after

    def _wait(self, generation: int, done: Callable[[], bool], what: str) -> None:
        """Wait for word of the agent; the control plane's deadlines end a generation that hangs here."""
        with self._news:
            self.page.waits(for_agent=True)
            try:
                # no deadline: the control plane's end a generation that hangs here
                self._news.wait_for(lambda: done() or self._ended >= generation)
            finally:
                self.page.waits(for_agent=False)
            if not done():
                raise GenerationEnded(f"generation {generation} ended while waiting for {what}")

    def wait_go(self, generation: int) -> None:
        """Wait until every rank has joined. Raises GenerationEnded."""
        self._wait(generation, lambda: self._went >= generation, "the other ranks")
        if self.ended(generation):
            raise GenerationEnded(f"generation {generation} ended before it began")

    def wait_acked(self, generation: int, step: int) -> float:
        """Wait until the record of `step` is held elsewhere; return the seconds. Raises GenerationEnded."""
        if self._acked >= (generation, step):
            return 0.0
        start = time.monotonic()
        self._wait(generation, lambda: self._acked >= (generation, step), f"holders of step {step}")
        return time.monotonic() - start

    def wait_writes(self, generation: int) -> bool:
        """Whether this rank writes the tensors for its twins on this node. Raises GenerationEnded."""
        self._wait(generation, lambda: self._writes[0] >= generation, "who writes the tensors")
        return self._writes[1]

    def wait_released(self, generation: int) -> None:
        """Wait until every rank's training function has returned. Raises GenerationEnded."""
        self._wait(generation, lambda: self._released >= generation, "the other ranks to finish")

    def allocate(self, generation: int, slot_nbytes: int, slots: int) -> tuple[m.Allocated, int]:
        """A memfd for tensors; the descriptor is the caller's. Raises NoRoomError, GenerationEnded."""
        request = m.Allocate(generation=generation, slot_nbytes=slot_nbytes, slots=slots)
        reply, fd = self._ask(request, generation)
        if isinstance(reply, m.Allocated) and reply.error is not None:
            raise NoRoomError(reply.error)
        if not isinstance(reply, m.Allocated) or fd is None:
            raise ProtocolError(f"{type(reply).__name__} is no answer to Allocate")
        return reply, fd

    def fetch(
        self, generation: int, step: int, unsound: m.TensorsAt | None = None, why: str = ""
    ) -> tuple[m.Fetched, int | None]:
        """Return this rank's state of `step`; the descriptor is the caller's. Raises GenerationEnded.

        `unsound` is what came before and does not verify, `why` the sentence that says where.
        """
        request = m.Fetch(generation=generation, step=step, unsound=unsound, why=why)
        reply, fd = self._ask(request, generation)
        if not isinstance(reply, m.Fetched):
            raise ProtocolError(f"{type(reply).__name__} is no answer to Fetch")
        return reply, fd

    def fetch_record(self, generation: int, rank: int) -> m.FetchedRecord:
        """Return a former rank's record of the restored step. Raises GenerationEnded."""
        reply, _fd = self._ask(m.FetchRecord(generation=generation, rank=rank), generation)
        if not isinstance(reply, m.FetchedRecord):
            raise ProtocolError(f"{type(reply).__name__} is no answer to FetchRecord")
        return reply

    def fetch_spans(
        self, generation: int, shard: int, layout: str, spans: tuple[tuple[int, int], ...]
    ) -> tuple[m.FetchedSpans, int | None]:
        """Return parts (start, nbytes) of a former shard's payload; the descriptor is the caller's.

        At most MOST_SPANS. `layout` is the digest of that which they are packed by. Raises GenerationEnded.
        """
        request = m.FetchSpans(generation=generation, shard=shard, layout=layout, spans=spans)
        reply, fd = self._ask(request, generation)
        if not isinstance(reply, m.FetchedSpans):
            raise ProtocolError(f"{type(reply).__name__} is no answer to FetchSpans")
        return reply, fd

    def _ask(self, request: _Request, generation: int) -> tuple[_Reply, int | None]:
        with self._news:
            self._drop_reply()
        self.send(request)
        self._wait(generation, lambda: self._reply is not None, type(request).__name__)
        with self._news:
            assert self._reply is not None
            reply, self._reply = self._reply, None
        return reply

    def _drop_reply(self) -> None:
        """An answer that came after its generation had ended."""
        if self._reply is not None and self._reply[1] is not None:
            os.close(self._reply[1])
        self._reply = None

    def close(self) -> None:
        """Hang up; the listener ends."""
        self._closing = True
        self._sock.shutdown(socket.SHUT_RDWR)
        self._listener.join(timeout=HELLO_DEADLINE_S)
        self._sock.close()
