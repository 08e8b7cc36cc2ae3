"""A rank's end of a ring: takes its stream's batches, which lie once on the node, without copying them.

A batch's memory is mapped privately: a script may write to its tensors, as to any others, and only this
process sees that. It goes when the last tensor of the batch does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptless.daemon.protocol import ring as m
from ckptless.daemon.protocol.errors import DataError, PeerError, ProtocolError
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.pytorch_hooks.data.order import DataPosition, position_of
from ckptless.pytorch_hooks.data.producer import BatchId, Numbered, Produce, Producer, encode_position
from ckptless.pytorch_hooks.data.ring_socket import RingSocket
from ckptless.pytorch_hooks.errors import GenerationEnded
from ckptless.pytorch_hooks.state import codec

PREFETCH = 8
BUDGET_NBYTES = 1 << 30
TAKE_DEADLINE_S = 1800.0
# So long the agent may take to hear that a reader is done.
DONE_DEADLINE_S = 10.0
# Where fewer lie here the agent is told of each that is taken: it may have no room for more, and has to hear
# of it before it has the next one made.
FEW = 2


@dataclass(frozen=True)
class RingName:
    """The name of a loader's batches, and the digest of all that they depend on (32 hex digits)."""

    loader: str
    manifest: str


@dataclass(frozen=True)
class ReadAhead:
    """`window` batches of each stream are made ahead; all that lie on the node take `budget_nbytes` bytes."""

    window: int = PREFETCH
    budget_nbytes: int = BUDGET_NBYTES


class TakenBatch(NamedTuple):
    """Batch `seq`."""

    seq: int
    batch: Any


class Reader:
    """One process's. Main thread only, but for `interrupt`: it forks there. Close it.

    `slot` is the process's number on its node: one that takes its place goes on under the same. `produce`
    makes batches where the agent wants this process to have it done. Every call raises PeerError where the
    agent is gone.
    """

    def __init__(
        self, agent_socket: str, name: RingName, slot: int, produce: Produce, limits: ReadAhead | None = None
    ) -> None:
        limits = limits or ReadAhead()
        self._agent_socket, self._name, self._produce = agent_socket, name, produce
        self._socket: RingSocket[m.ToReader] = RingSocket(agent_socket, m.ToReader)
        self._producer: Producer | None = None
        # What was sent ahead, and what there is behind it.
        self._ahead: deque[TakenBatch] = deque()
        self._verdict: m.RingEnd | m.RingBroken | None = None
        # Batches that the agent has not been told of, how often one was waited for, and for how long. It is
        # heard and told of several at once: right after a step of training either takes long.
        self._untold, self._told_every = 0, max(1, min(limits.window, m.AHEAD) // 2)
        self._waits, self._waited_s = 0, 0.0
        # Granted, and no producer started yet.
        self._lease: int | None = None
        self._number = 0
        self._stream = self._next = self._done = 0
        self._interrupted: BaseException | None = None
        opening = m.RingOpen(
            protocol=PROTOCOL,
            loader=name.loader,
            manifest=name.manifest,
            reader=slot,
            window=limits.window,
            budget_nbytes=limits.budget_nbytes,
        )
        self._socket.send(opening)

    def seek(self, stream: int, seq: int, position: object) -> None:
        """Have `take` give the batches of `stream` from `seq` on, which follow `position`."""
        encoded = encode_position(position)
        self._tell()
        self._forget_ahead()
        self._number += 1
        self._stream, self._next, self._done = stream, seq, seq
        self._socket.send(m.RingSeek(number=self._number, stream=stream, seq=seq, position=encoded))

    def take(self, deadline_s: float = TAKE_DEADLINE_S) -> TakenBatch | None:
        """The next batch; None at the stream's end. Its tensors are valid for as long as somebody has them.

        Raises DataError where it could not be made, with what was raised, or does not come in time, and what
        `interrupt` was told.
        """
        self._start_producer()
        if self._untold >= self._told_every or len(self._ahead) < FEW:
            self._hear()
            self._tell()
        if not self._ahead and not self._comes(deadline_s):
            return None
        taken = self._ahead.popleft()
        if taken.seq != self._next:
            raise ProtocolError(f"batch {taken.seq} came in place of batch {self._next}")
        self._next += 1
        self._untold += 1
        return taken

    def _comes(self, deadline_s: float) -> bool:
        """Wait for the next batch; False where there is none. Raises as `take` does."""
        begin_s = time.monotonic()
        while not self._ahead:
            if self._interrupted is not None:
                raise self._interrupted
            if isinstance(self._verdict, m.RingBroken):
                raise DataError(
                    f"batch {self._verdict.seq} of loader {self._name.loader!r} could not be made:\n"
                    f"{self._verdict.text}"
                )
            if self._verdict is not None:
                return False
            self._start_producer()
            if not self._socket.wait(begin_s + deadline_s - time.monotonic()):
                raise DataError(
                    f"no batch {self._next} of {self._name.loader!r} in {deadline_s:g} s: look at what the "
                    "transform does, or give the loader a larger timeout_s"
                )
            self._hear()
        self._waits += 1
        self._waited_s += time.monotonic() - begin_s
        return True

    def committed(self, seq: int) -> None:
        """Tell the agent, with one of the next messages, that no recovery needs a batch before `seq`."""
        self._done = max(self._done, min(seq, self._next))

    def interrupt(self, error: BaseException) -> None:
        """Have a `take` that waits raise `error`, until `resume`. Any thread."""
        self._interrupted = error
        self._socket.wake()

    def resume(self) -> None:
        """Forget what `interrupt` was told."""
        self._interrupted = None

    def close(self) -> None:
        """Close the ring: neither this process nor one in its place needs it any more."""
        try:
            self._socket.send(m.RingDone())
            self._socket.wait_hung_up(DONE_DEADLINE_S)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go, and leave the batches for whoever takes this process's place."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None
        self._forget_ahead()
        self._socket.close()

    def _tell(self) -> None:
        """Tell the agent what was taken, and is not needed again."""
        if not self._untold:
            return
        took = m.RingTook(
            number=self._number,
            seq=self._next - 1,
            done=self._done,
            count=self._untold,
            waits=self._waits,
            waited_s=self._waited_s,
        )
        self._socket.send(took)
        self._untold, self._waits, self._waited_s = 0, 0, 0.0

    def _hear(self) -> None:
        while (found := self._socket.next()) is not None:
            message, fd = found
            match message:
                case m.RingLease():
                    self._lease = message.lease
                case m.RingEntry() if fd is not None:
                    if message.number == self._number:
                        self._ahead.append(self._mapped(message.seq, message.nbytes, fd))
                    else:
                        os.close(fd)
                case m.RingEnd() | m.RingBroken():
                    if message.number == self._number:
                        self._verdict = message

    def _start_producer(self) -> None:
        """Act on a lease: after a batch that is there was given out, since to fork takes long."""
        if self._lease is None:
            return
        lease, self._lease = self._lease, None
        if self._producer is not None:
            # Its end is why there is another one.
            self._producer.close()
        self._producer = Producer(self._agent_socket, lease, self._name.manifest, self._produce)

    def _mapped(self, seq: int, nbytes: int, fd: int) -> TakenBatch:
        try:
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        found = codec.decode_apart(mapping, 0, nbytes)
        wanted = [self._name.manifest, self._stream, seq]
        if type(found) is not list or len(found) != 2 or found[0] != wanted:
            raise ProtocolError(f"another batch came in place of {wanted}")
        return TakenBatch(seq, found[1])

    def _forget_ahead(self) -> None:
        self._verdict = None
        self._ahead.clear()


class Batch(NamedTuple):
    """A batch, the position after it, of each record left out of it why, and (kind, text) of what went wrong
    on the way.
    """

    value: Any
    after: DataPosition
    skipped: list[str]
    events: list[tuple[str, str]]


class RingFeed:
    """One process's end of one loader's ring, over all generations. Main thread only, but for `stop`.

    `slot` is the process's number on its node, `name` the loader's in the script.
    """

    def __init__(self, agent_socket: str, slot: int, name: str) -> None:
        self._agent_socket, self._slot = agent_socket, slot
        self._name = f"batches {name}" if name else "batches"
        self._reader: Reader | None = None
        self._digest = ""
        # Which batch the reader gives next; None where it has to be told.
        self._at: BatchId | None = None
        self._stream = -1
        # `stop` wakes a reader, which must not be closed meanwhile.
        self._lock = threading.Lock()
        self._generation = self._stopped = 0

    def enter(self, generation: int) -> None:
        """Take batches for this generation from here on."""
        with self._lock:
            self._generation = generation
            if self._reader is not None and self._stopped < generation:
                self._reader.resume()

    def stop(self, generation: int) -> None:
        """A generation is over: who waits for one of its batches is woken. Any thread."""
        with self._lock:
            self._stopped = max(self._stopped, generation)
            if self._reader is not None and self._stopped >= self._generation:
                self._reader.interrupt(GenerationEnded(self._ended()))

    def _ended(self) -> str:
        return f"generation {self._generation} ended while waiting for a batch"

    def take(self, numbered: Numbered, limits: ReadAhead, position: DataPosition) -> Batch | None:
        """The batch after `position`; None where the epoch has none.

        Raises GenerationEnded, DataError, PeerError where there is no ring.
        """
        place, reader = numbered.place(position), self._opened(numbered, limits)
        if self._at != place:
            reader.seek(place.stream, place.seq, numbered.before(position))
            self._stream = place.stream
        self._at = None
        if self._stopped >= self._generation:
            raise GenerationEnded(self._ended())
        taken = reader.take(numbered.timeout_s)
        if taken is None:
            return None
        self._at = BatchId(place.stream, place.seq + 1)
        value, after, skipped, events = taken.batch
        return Batch(value, position_of(after), skipped, [(kind, text) for kind, text in events])

    def _opened(self, numbered: Numbered, limits: ReadAhead) -> Reader:
        if self._reader is not None and self._digest == numbered.digest:
            return self._reader
        self.close()
        name = RingName(self._name + numbered.owner, numbered.digest)
        reader = Reader(self._agent_socket, name, self._slot, numbered.produce, limits)
        with self._lock:
            self._reader, self._digest = reader, numbered.digest
        return reader

    def committed(self, numbered: Numbered, position: DataPosition) -> None:
        """Let the batches before this position go: no recovery goes back behind it."""
        place = numbered.place(position)
        if self._reader is not None and self._digest == numbered.digest and place.stream == self._stream:
            self._reader.committed(place.seq)

    def close(self) -> None:
        """The batches are not needed any more, nor will a process in this one's place need them."""
        reader = self._let_go()
        if reader is not None:
            # Suppressed: the agent may have ended first, and its batches with it.
            with contextlib.suppress(PeerError):
                reader.close()

    def abandon(self) -> None:
        """Let go, and leave the batches for whoever takes this process's place."""
        reader = self._let_go()
        if reader is not None:
            reader.abandon()

    def _let_go(self) -> Reader | None:
        with self._lock:
            reader, self._reader, self._at = self._reader, None, None
        return reader
