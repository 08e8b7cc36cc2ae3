"""A rank's end of a ring: takes its stream's batches, which lie once on the node, without copying them.

A batch's memory is mapped privately: a script may write to its tensors, as to any others, and only this
process sees that. It goes when the last tensor of the batch does.
"""

import mmap
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from ckptless.daemon.api import ring as m
from ckptless.daemon.api import ring_entry as entry
from ckptless.daemon.api.errors import DataError, ProtocolError
from ckptless.daemon.api.messages import PROTOCOL
from ckptless.pytorch_hooks.data import batch_codec
from ckptless.pytorch_hooks.data.producer import Produce, ProducerProcess
from ckptless.pytorch_hooks.data.ring_socket import RingSocket
from ckptless.pytorch_hooks.state import codec

PREFETCH = 8
BUDGET_NBYTES = 1 << 30
TAKE_DEADLINE_S = 1800.0
# So long the agent may take to hear that a reader is done.
DONE_DEADLINE_S = 10.0
# So often the agent is heard at least: it may want a producer.
HEAR_S = 1.0


@dataclass(frozen=True)
class RingName:
    """Which loader's batches: its name, and the digest of all that they depend on (32 hex digits)."""

    loader: str
    manifest: str


@dataclass(frozen=True)
class Limits:
    """`window` batches of each stream are made ahead; all that lie on the node take `budget_nbytes` bytes."""

    window: int = PREFETCH
    budget_nbytes: int = BUDGET_NBYTES


@dataclass(frozen=True)
class Taken:
    """Batch `seq`, and the position after it, as it was encoded."""

    seq: int
    batch: Any
    encoded_position: bytes

    @property
    def position(self) -> Any:
        """The position after the batch, from which the next one can be made again."""
        return codec.decode(self.encoded_position)


def encode_position(position: object) -> bytes:
    """As rings compare and keep it."""
    return codec.encode(position, name="position", limit=entry.POSITION_LIMIT)


class Reader:
    """One process's. Main thread only, but for `interrupt`: it forks there. Close it.

    `slot` is the process's number on its node: one that takes its place goes on under the same. `produce`
    makes batches where the agent wants this process to have it done. Every call raises PeerError where the
    agent is gone.
    """

    def __init__(
        self, agent_socket: str, name: RingName, slot: int, produce: Produce, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        self._agent_socket, self._name, self._produce = agent_socket, name, produce
        self._socket: RingSocket[m.ToReader] = RingSocket(agent_socket, m.ToReader)
        self._producer: ProducerProcess | None = None
        # What was sent ahead.
        self._ahead: deque[Taken] = deque()
        # The agent is heard and told of several batches at once, and what it sent is mapped then: right after
        # a step of training anything takes ten times as long as when it is done again.
        self._untold, self._told_every = 0, max(1, min(limits.window, m.AHEAD) // 2)
        # What it has not told of yet: batches from before it was sent elsewhere, waits, their seconds.
        self._unsaid, self._waits, self._waited_s = 0, 0, 0.0
        self._heard_s = 0.0
        # The agent is told when fewer lie here: 2 where they ran out, as it may have no room for more, and
        # has to hear of each that is taken before it has the next one made.
        self._few = 1
        # What was mapped, by number: let go of together, too, where the agent gives it back.
        self._mappings: deque[tuple[int, mmap.mmap]] = deque()
        self._verdict: m.RingEnd | m.RingBroken | None = None
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
        """From here on `take` gives the batches of `stream` from `seq` on, which follow `position`."""
        self._interrupted = None
        self._forget_ahead()
        self._number += 1
        self._stream, self._next, self._done = stream, seq, seq
        encoded = encode_position(position)
        self._socket.send(m.RingSeek(number=self._number, stream=stream, seq=seq, position=encoded))

    def take(self, deadline_s: float = TAKE_DEADLINE_S) -> Taken | None:
        """The next batch; None at the stream's end. Its tensors are valid for as long as somebody has them.

        Raises DataError where it could not be made, with what was raised, TimeoutError, and what `interrupt`
        was told.
        """
        now_s = time.monotonic()
        self._act_on_lease()
        due = self._untold >= self._told_every or now_s - self._heard_s >= HEAR_S
        if due or len(self._ahead) < self._few:
            self._heard_s = now_s
            self._hear()
            if due or len(self._ahead) < self._few:
                self._tell()
            if len(self._ahead) >= self._told_every:
                self._few = 1
        if not self._ahead and not self._came(now_s, deadline_s):
            return None
        taken = self._ahead.popleft()
        if taken.seq != self._next:
            raise ProtocolError(f"batch {taken.seq} came in place of batch {self._next}")
        self._next += 1
        self._untold += 1
        return taken

    def _came(self, now_s: float, deadline_s: float) -> bool:
        """Wait for the next batch; False where there is none. Raises as `take` does."""
        begin_s = time.monotonic()
        while not self._ahead:
            if self._interrupted is not None:
                raise self._interrupted
            if self._verdict is not None:
                self._raise_if_broken(self._verdict)
                return False
            self._act_on_lease()
            self._few = 2
            if not self._socket.wait(now_s + deadline_s - time.monotonic()):
                raise TimeoutError(f"no batch {self._next} of {self._name.loader!r} in {deadline_s:g} s")
            self._hear()
        self._waits += 1
        self._waited_s += time.monotonic() - begin_s
        return True

    def _tell(self) -> None:
        """What was taken, and is not needed again."""
        if self._untold:
            took = m.RingTook(
                number=self._number,
                seq=self._next - 1,
                done=self._done,
                count=self._unsaid + self._untold,
                waits=self._waits,
                waited_s=self._waited_s,
            )
            self._socket.send(took)
            self._untold = self._unsaid = self._waits = 0
            self._waited_s = 0.0
            # A script that never commits does not keep all it has seen.
            few = 2 * self._told_every
            while self._mappings and (self._mappings[0][0] < self._done or len(self._mappings) > few):
                self._mappings.popleft()

    def committed(self, seq: int) -> None:
        """No recovery will ask for a batch before number `seq`: the agent hears it with one of the next."""
        self._done = max(self._done, min(seq, self._next))

    def interrupt(self, error: BaseException) -> None:
        """Have `take` raise `error`, also one that waits, until the next `seek` or `resume`. Any thread."""
        self._interrupted = error
        self._socket.wake()

    def resume(self) -> None:
        """Forget what `interrupt` was told."""
        self._interrupted = None

    def close(self) -> None:
        """This process does not need the ring any more, nor will one in its place."""
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

    # ------------------------------------------------------------------------------------- hear

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

    def _act_on_lease(self) -> None:
        """Start the producer: after a batch that is there was given out, since to fork takes long."""
        if self._lease is None:
            return
        lease, self._lease = self._lease, None
        if self._producer is not None:
            # Its end is why there is another one.
            self._producer.close()
        self._producer = ProducerProcess(self._agent_socket, lease, self._name.manifest, self._produce)

    def _raise_if_broken(self, verdict: m.RingEnd | m.RingBroken) -> None:
        if isinstance(verdict, m.RingBroken):
            raise DataError(
                f"batch {verdict.seq} of loader {self._name.loader!r} could not be made:\n{verdict.text}"
            )

    def _mapped(self, seq: int, nbytes: int, fd: int) -> Taken:
        try:
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        with memoryview(mapping) as view:
            header = entry.decode(view)
            header.check(self._name.manifest, self._stream, seq)
            position = entry.position_of(view, header)
        self._mappings.append((seq, mapping))
        return Taken(seq, batch_codec.decode(mapping, header.batch_at, header.batch_nbytes), position)

    def _forget_ahead(self) -> None:
        self._verdict = None
        self._unsaid, self._untold = self._unsaid + self._untold, 0
        self._ahead.clear()
        self._mappings.clear()
