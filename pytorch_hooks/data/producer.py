"""The producer: a process, forked from a rank as a DataLoader's workers are, that makes a node's batches.

It has the data set because the rank has it: nothing is pickled. It is forked in the rank's main thread,
between two steps, and ends with its rank, and with its agent.

Of a source that knows its length, a ring's stream is one replica's batches of all epochs, one after the
other, without an end: batch b of epoch e, of n in each, is number e n + b. Of any other source each epoch of
a replica is a stream of its own, and only its end tells how many batches it has. Ranks of one replica share
their batches, and one producer makes those of all replicas on its node, with as many workers for each as the
loader has. A DataLoader has one replica's part only: of each there is a ring.
"""

from __future__ import annotations

import fcntl
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from ckptless.daemon.protocol import ring as m
from ckptless.daemon.protocol.errors import CkptlessError, PeerError, ProtocolError
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.pytorch_hooks.data.identity import DataIdentity
from ckptless.pytorch_hooks.data.order import DataPosition, DataReplica, position_of
from ckptless.pytorch_hooks.data.production import Production
from ckptless.pytorch_hooks.data.ring_socket import RingSocket
from ckptless.pytorch_hooks.data.streams import Stream
from ckptless.pytorch_hooks.data.workers import Child, Pool
from ckptless.pytorch_hooks.state import codec

Made: TypeAlias = tuple[int, Any, Any]
"""(Sequence number, batch, position after it)."""
Produce: TypeAlias = Callable[[int, Any], Iterator[Made]]
"""Of a stream, from a position on, to the stream's end."""

STATE_LIMIT = m.POSITION_LIMIT - 1024
PROCESS_NAME = "ckptless-data"
NICE = 5


class BatchId(NamedTuple):
    """Number `seq` of `stream`."""

    stream: int
    seq: int


class Numbered:
    """A loader's batches as a ring has them: which number each of them has, and who makes it."""

    def __init__(
        self, production: Production, manifest: DataIdentity, workers: int, timeout_s: float
    ) -> None:
        self.production, self.timeout_s = production, timeout_s
        self._workers = workers
        source, layout = production.source, production.layout
        batched = isinstance(source, Stream) and source.batched
        # Whose the ring is, where it is not that of all replicas.
        self.owner = f" of replica {layout.replica}" if batched else ""
        # Of all that makes batches different but for the replica, which the stream tells: 32 hex digits.
        self.digest = manifest.digest_of_all(layout.replicas, layout.virtual)
        # In the producer: of each replica the workers, and what they have told since the last batch.
        self._pools: dict[int, tuple[Pool, list[list[str]]]] = {}

    def place(self, position: DataPosition) -> BatchId:
        """Return the place of the batch of this replica that follows a position."""
        replica, batches = self.production.layout.replica, self.production.batches
        if batches is None:
            return BatchId(position.epoch * m.STREAMS + replica, position.batch)
        return BatchId(replica, position.epoch * batches + position.batch)

    def is_end(self, position: DataPosition) -> bool:
        """Whether it is known that the epoch has no batch after it."""
        return self.production.batches is not None and position.batch >= self.production.batches

    def before(self, position: DataPosition) -> dict[str, Any]:
        """The position as a ring compares it: the end of an epoch is the begin of the next one."""
        return msgspec.structs.asdict(DataPosition(position.epoch + 1) if self.is_end(position) else position)

    def produce(self, stream: int, saved: Any) -> Iterator[Made]:
        """Give a stream's batches in the producer, with what goes with each. See Produce."""
        position, replica = position_of(saved), stream % m.STREAMS
        while True:
            for batch, after, skipped, events in self._epoch(replica, position):
                seq = self.place(msgspec.structs.replace(after, batch=after.batch - 1)).seq
                content = [batch, msgspec.structs.asdict(after), list(skipped), events]
                yield seq, content, self.before(after)
            if self.production.batches is None:
                return
            position = DataPosition(epoch=position.epoch + 1)

    def _epoch(
        self, replica: int, position: DataPosition
    ) -> Iterator[tuple[Any, DataPosition, Any, list[list[str]]]]:
        """The rest of an epoch: batch, the position after it, what was skipped, what workers have told."""
        if replica not in self._pools:
            told: list[list[str]] = []
            pool = Pool(self._workers, self.timeout_s, lambda kind, text: told.append([kind, text]))
            self._pools[replica] = (pool, told)
        pool, told = self._pools[replica]
        layout = self.production.layout
        own = self.production.of(DataReplica(replica, layout.replicas, layout.virtual))
        for batch, after, skipped in pool.epoch(own, position):
            after = _storable(after, told)
            events, told[:] = list(told), []
            yield batch, after, skipped, events


def _storable(position: DataPosition, events: list[list[str]]) -> DataPosition:
    """Return the batch with the source's state, where a ring has room for it."""
    if position.stream is None:
        return position
    nbytes = len(codec.pack(msgspec.structs.asdict(position)))
    if nbytes <= STATE_LIMIT:
        return position
    text = (
        f"the source's state takes {nbytes} bytes, of {STATE_LIMIT} that a ring has room for: after "
        "a fault it is read from the epoch's begin"
    )
    events.append(["data-state", text])
    return msgspec.structs.replace(position, stream=None)


class _Standing(NamedTuple):
    """The position of the maker of a replica's batches: it makes number `seq` of a stream's history next."""

    stream: int
    history: int
    seq: int
    batches: Iterator[Made]


class Producer(Child):
    """A child that makes batches; `close` it."""

    def __init__(self, agent_socket: str, lease: int, manifest: str, produce: Produce) -> None:
        def work() -> None:
            Path("/proc/self/comm").write_text(PROCESS_NAME)
            os.nice(NICE)
            _Maker(manifest, produce).work(agent_socket, lease)

        super().__init__(work)


class _Maker:
    """Makes what it is asked for, one after the other."""

    def __init__(self, manifest: str, produce: Produce) -> None:
        self._manifest, self._produce = manifest, produce
        # By replica. Who was in the middle of another epoch is not asked for the rest of it any more.
        self._standing: dict[int, _Standing] = {}

    def work(self, agent_socket: str, lease: int) -> None:
        """Produce until the agent hangs up: it does not want this producer any more, or is gone."""
        try:
            connection: RingSocket[m.ToProducer] = RingSocket(agent_socket, m.ToProducer)
            connection.send(m.ProducerHello(protocol=PROTOCOL, lease=lease))
            while True:
                found = connection.next()
                if found is None:
                    # no deadline: to wait is what a producer does; the agent's end is its own
                    connection.wait(None)
                    continue
                job, fd = found
                assert fd is not None
                try:
                    answer = self._make(job, fd)
                finally:
                    os.close(fd)
                connection.send(answer)
        except PeerError:
            return

    def _make(self, job: m.RingMake, fd: int) -> m.FromProducer:
        try:
            made = self._next(job)
            if made is None:
                return m.RingAtEnd(stream=job.stream, seq=job.seq)
            batch, after = made
            position = encode_position(after)
            nbytes = _write(fd, [[self._manifest, job.stream, job.seq], batch])
            return m.RingMade(stream=job.stream, seq=job.seq, nbytes=nbytes, position=position)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything; the rank raises it
            self._standing.pop(job.stream % m.STREAMS, None)
            return m.RingFailed(stream=job.stream, seq=job.seq, text=_text_of(error))

    def _next(self, job: m.RingMake) -> tuple[Any, Any] | None:
        """The batch, and the position after it; None at the stream's end."""
        replica = job.stream % m.STREAMS
        found = self._standing.pop(replica, None)
        if found is None or found[:3] != (job.stream, job.history, job.seq):
            batches = self._produce(job.stream, codec.decode(job.position))
            found = _Standing(job.stream, job.history, job.base, batches)
        for expected, (number, batch, after) in enumerate(found.batches, found.seq):
            if number != expected:
                raise ProtocolError(f"the loader made batch {number} in place of batch {expected}")
            if number == job.seq:
                self._standing[replica] = found._replace(seq=number + 1)
                return batch, after
        # What was asked for behind the end is not there either.
        self._standing[replica] = found._replace(seq=job.seq + 1, batches=iter(()))
        return None


def encode_position(position: object) -> bytes:
    """Return a position as rings compare and keep it."""
    return codec.encode(position, name="position", limit=m.POSITION_LIMIT)


def _write(fd: int, content: object) -> int:
    """Fill an empty memfd for good: its bytes. Raises UsageError, OSError."""
    encoded = codec.encode_apart(content)
    os.ftruncate(fd, encoded.nbytes)
    for offset, part in encoded.parts:
        done = 0
        while done < len(part):
            done += os.pwrite(fd, part[done:], offset + done)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, m.ALL_SEALS)
    return encoded.nbytes


def _text_of(error: Exception) -> str:
    if isinstance(error, CkptlessError):
        # The notes have the traceback of what failed in a worker.
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return text[: m.TEXT_LIMIT]
    # The last lines tell more than the first.
    return "".join(traceback.format_exception(error))[-m.TEXT_LIMIT :]
