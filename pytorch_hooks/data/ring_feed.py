"""A loader's batches by way of its node's ring: which number each of them has, who makes it, who takes it.

Of a source that knows its length, a ring's stream is one replica's batches of all epochs, one after the
other, without an end: batch b of epoch e, of n in each, is number e n + b. Of any other source each epoch of
a replica is a stream of its own, and only its end tells how many batches it has. Ranks of one replica share
their batches, and one producer makes those of all replicas on its node, with as many workers for each as the
loader has. A DataLoader has one replica's part only: of each there is a ring.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from ckptless.daemon.api.errors import DataError, PeerError
from ckptless.daemon.api.ring import STREAMS
from ckptless.daemon.api.ring_entry import POSITION_LIMIT
from ckptless.pytorch_hooks.data.identity import Manifest
from ckptless.pytorch_hooks.data.order import Layout, Position, position_of
from ckptless.pytorch_hooks.data.pool import Pool
from ckptless.pytorch_hooks.data.producer import Made
from ckptless.pytorch_hooks.data.production import Production
from ckptless.pytorch_hooks.data.ring_reader import Limits, Reader, RingName, Taken
from ckptless.pytorch_hooks.data.streams import Stream
from ckptless.pytorch_hooks.errors import GenerationEnded
from ckptless.pytorch_hooks.state import codec

STATE_LIMIT = POSITION_LIMIT - 1024


class Place(NamedTuple):
    """Number `seq` of `stream`."""

    stream: int
    seq: int


class Batch(NamedTuple):
    """A batch, the position after it, of each record left out of it why, and (kind, text) of what went wrong
    on the way.
    """

    value: Any
    after: Position
    skipped: list[str]
    events: list[tuple[str, str]]


class _Makers(NamedTuple):
    """Workers of one replica, and what they have told since the last batch."""

    pool: Pool
    events: list[list[str]]


@dataclass(frozen=True)
class Numbered:
    """What a ring has of a loader: the batches of `production`, of which an epoch has `batches`, if that is
    known.
    """

    production: Production
    manifest: Manifest
    batches: int | None
    workers: int
    timeout_s: float
    limits: Limits
    # In the producer: those that have come to an epoch's end, and stand at the begin of the next one.
    waiting: dict[int, _Makers] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Of all that makes batches different but for the replica, which the stream tells: 32 hex digits."""
        return self.manifest.digest_of_all(self.production.layout.replicas)

    @cached_property
    def owner(self) -> str:
        """Whose the ring is, where it is not that of all replicas."""
        source = self.production.source
        batched = isinstance(source, Stream) and source.batched
        return f" of replica {self.production.layout.replica}" if batched else ""

    def place(self, epoch: int, batch: int) -> Place:
        """Of a batch of this replica."""
        replica = self.production.layout.replica
        if self.batches is None:
            return Place(epoch * STREAMS + replica, batch)
        return Place(replica, epoch * self.batches + batch)

    def is_end(self, position: Position) -> bool:
        """Whether it is known that the epoch has no batch after it."""
        return self.batches is not None and position.batch >= self.batches

    def before(self, position: Position) -> dict[str, Any]:
        """The position as a ring compares it: the end of an epoch is the begin of the next one."""
        if self.is_end(position):
            position = Position(epoch=position.epoch + 1)
        return msgspec.structs.asdict(position)

    def after(self, position: Position, taken: Taken) -> Position:
        """The position after a batch, which was taken at `position`."""
        if self.batches is None:
            return position_of(taken.position)
        return Position(position.epoch, position.batch + 1, position.skipped + len(taken.batch[1]))

    def produce(self, stream: int, saved: Any) -> Iterator[Made]:
        """In the producer: a stream's batches from a position on. See ring_reader.Produce."""
        position = position_of(saved)
        if self.batches is None:
            yield from self._epoch(stream % STREAMS, position)
            return
        while True:
            for _batch, made, after in self._epoch(stream, position):
                seq = self.place(after["epoch"], after["batch"]).seq - 1
                yield seq, made, self.before(position_of(after))
            position = Position(epoch=position.epoch + 1)

    def _epoch(self, replica: int, position: Position) -> Iterator[Made]:
        """The rest of an epoch; each batch has its number in that, and a position as a dict."""
        if replica not in self.waiting:
            self.waiting[replica] = self._makers()
        pool, events = self.waiting.pop(replica)
        own = self.production.of(Layout(replica, self.production.layout.replicas))
        try:
            for value, after, skipped in pool.epoch(own, position):
                saved = _storable(after, events)
                told, events[:] = list(events), []
                yield after.batch - 1, [value, list(skipped), told], saved
        except BaseException:
            pool.close()
            raise
        self.waiting[replica] = _Makers(pool, events)

    def _makers(self) -> _Makers:
        events: list[list[str]] = []
        pool = Pool(self.workers, self.timeout_s, lambda kind, text: events.append([kind, text]))
        return _Makers(pool, events)


def _storable(position: Position, events: list[list[str]]) -> dict[str, Any]:
    """With the source's state, where a ring has room for it."""
    saved = msgspec.structs.asdict(position)
    if position.stream is not None:
        nbytes = len(codec.pack(saved))
        if nbytes > STATE_LIMIT:
            text = (
                f"the source's state takes {nbytes} bytes, of {STATE_LIMIT} that a ring has room for: after "
                "a fault it is read from the epoch's begin"
            )
            events.append(["data-state", text])
            saved["stream"] = None
    return saved


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
        self._at: Place | None = None
        self._stream = -1
        # `stop` wakes a reader, which must not be closed meanwhile.
        self._lock = threading.Lock()
        self._generation = self._stopped = 0

    def enter(self, generation: int) -> None:
        """What is taken from here on is for this generation."""
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

    def take(self, numbered: Numbered, position: Position) -> Batch | None:
        """The batch after `position`; None where the epoch has none.

        Raises GenerationEnded, DataError, PeerError where there is no ring.
        """
        place, reader = numbered.place(position.epoch, position.batch), self._opened(numbered)
        if self._at != place:
            reader.seek(place.stream, place.seq, numbered.before(position))
            self._stream = place.stream
        self._at = None
        if self._stopped >= self._generation:
            # It may have been told before it was sought, which makes it forget.
            raise GenerationEnded(self._ended())
        try:
            taken = reader.take(numbered.timeout_s)
        except TimeoutError as error:
            raise DataError(
                f"{error}: look at what the transform does, or give the loader a larger timeout_s"
            ) from error
        if taken is None:
            return None
        self._at = Place(place.stream, place.seq + 1)
        value, skipped, events = taken.batch
        after = numbered.after(position, taken)
        return Batch(value, after, skipped, [(kind, text) for kind, text in events])

    def _opened(self, numbered: Numbered) -> Reader:
        digest = numbered.digest
        if self._reader is not None and self._digest == digest:
            return self._reader
        self.close()
        name = RingName(self._name + numbered.owner, digest)
        reader = Reader(self._agent_socket, name, self._slot, numbered.produce, numbered.limits)
        with self._lock:
            self._reader, self._digest = reader, digest
        return reader

    def committed(self, numbered: Numbered, saved: dict[str, Any]) -> None:
        """No recovery goes back behind this position of `state_dict`: the batches before it may go."""
        if self._reader is not None and self._digest == numbered.digest:
            # For each step: so it is not read strictly.
            place = numbered.place(saved["epoch"], saved["batch"])
            if place.stream == self._stream:
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
