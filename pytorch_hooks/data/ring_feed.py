"""A loader's batches by way of its node's ring: which number each of them has, who makes it, who takes it.

A ring's stream is one replica's batches of all epochs, one after the other, without an end: batch b of epoch
e, of n in each, is number e n + b. So only sources that know their length have one. The stream's number is
the replica's: ranks of one replica share their batches, and one producer makes those of all replicas on its
node, with as many workers for each as the loader has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from ckptless.daemon.api.errors import DataError, PeerError, ProtocolError
from ckptless.pytorch_hooks.data.identity import Manifest
from ckptless.pytorch_hooks.data.order import Layout, Position, position_of
from ckptless.pytorch_hooks.data.pool import Pool
from ckptless.pytorch_hooks.data.production import Production
from ckptless.pytorch_hooks.data.ring_reader import Limits, Reader, RingName
from ckptless.pytorch_hooks.errors import GenerationEnded


class Place(NamedTuple):
    """Number `seq` of `stream`."""

    stream: int
    seq: int


class Batch(NamedTuple):
    """A batch, of each record left out of it why, and (kind, text) of what went wrong on the way."""

    value: Any
    skipped: list[str]
    events: list[tuple[str, str]]


@dataclass(frozen=True)
class Numbered:
    """What a ring has of a loader: the batches of `production`, of which an epoch has `batches`."""

    production: Production
    manifest: Manifest
    batches: int
    workers: int
    timeout_s: float
    limits: Limits

    @cached_property
    def digest(self) -> str:
        """Of all that makes batches different but for the replica, which the stream tells: 32 hex digits."""
        return self.manifest.digest_of_all(self.production.layout.replicas)

    def place(self, position: Position) -> Place:
        """Of the batch that follows this position."""
        return Place(self.production.layout.replica, position.epoch * self.batches + position.batch)

    def number_of(self, saved: dict[str, Any]) -> int:
        """Of the batch that follows a position of `state_dict`. For each step: so it is not read strictly."""
        number: int = saved["epoch"] * self.batches + saved["batch"]
        return number

    def before(self, position: Position) -> dict[str, Any]:
        """The position as a ring compares it: the end of an epoch is the begin of the next one."""
        if position.batch >= self.batches:
            position = Position(epoch=position.epoch + 1)
        return msgspec.structs.asdict(position)

    def produce(self, stream: int, saved: Any) -> Iterator[tuple[int, Any, Any]]:
        """In the producer: a stream's batches from a position on. See ring_reader.Produce."""
        events: list[list[str]] = []
        pool = Pool(self.workers, self.timeout_s, lambda kind, text: events.append([kind, text]))
        own = self.production.of(Layout(stream, self.production.layout.replicas))
        position = position_of(saved)
        try:
            while True:
                for value, after, skipped in pool.epoch(own, position):
                    told, events[:] = list(events), []
                    yield self.place(after).seq - 1, [value, list(skipped), told], self.before(after)
                position = Position(epoch=position.epoch + 1)
        finally:
            pool.close()


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

    def take(self, numbered: Numbered, position: Position) -> Batch:
        """The batch after `position`. Raises GenerationEnded, DataError, PeerError where there is no ring."""
        place, reader = numbered.place(position), self._opened(numbered)
        if self._at != place:
            reader.seek(place.stream, place.seq, numbered.before(position))
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
            raise ProtocolError(f"the stream of {self._name!r}, which has no end, ended before {place}")
        self._at = Place(place.stream, place.seq + 1)
        value, skipped, events = taken.batch
        return Batch(value, skipped, [(kind, text) for kind, text in events])

    def _opened(self, numbered: Numbered) -> Reader:
        digest = numbered.digest
        if self._reader is not None and self._digest == digest:
            return self._reader
        self.close()
        name = RingName(self._name, digest)
        reader = Reader(self._agent_socket, name, self._slot, numbered.produce, numbered.limits)
        with self._lock:
            self._reader, self._digest = reader, digest
        return reader

    def committed(self, numbered: Numbered, saved: dict[str, Any]) -> None:
        """No recovery goes back behind this position of `state_dict`: the batches before it may go."""
        if self._reader is not None and self._digest == numbered.digest:
            self._reader.committed(numbered.number_of(saved))

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
