"""Writes a rank's versions into its agent's memory, and reads them back.

A version of step s is the record of every rank, and on each node the tensors once, written by one of the
node's twins (see daemon/protocol/version.py). Versions go into the slots of a memfd in turn. The main thread
copies, or a thread does while the training goes on (`overlap.py`); two threads of this object digest what was
copied, write the header and send the commit. They have one version at a time, and are idle whenever the main
thread has called `wait`.
"""

import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import xxhash
from msgspec import structs

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, StateUnavailableError
from ckptless.daemon.protocol.twins import Span, twin_digest
from ckptless.pytorch_hooks.agent_session.session import Session
from ckptless.pytorch_hooks.commit.overlap import BesideTraining
from ckptless.pytorch_hooks.commit.pinned import Pinned
from ckptless.pytorch_hooks.devices.arrival import Arrival, DeviceNumber
from ckptless.pytorch_hooks.errors import StateMoved
from ckptless.pytorch_hooks.state import Draft, TensorSet, private, raw

logger = logging.getLogger(__name__)

SLOTS = 3
THREADS = 2
# So many bad copies in a row: something is wrong that another one does not mend.
TRIES = 4


@dataclass
class _Mapped:
    """A memfd of the agent's, mapped as one uint8 tensor."""

    number: int
    slot_nbytes: int
    bytes: torch.Tensor
    last_slot: int

    def slot(self, index: int) -> torch.Tensor:
        return self.bytes[index * self.slot_nbytes : (index + 1) * self.slot_nbytes]


class Late(NamedTuple):
    """The parts that a commit lacks until a device has done its share."""

    draft: Draft | None
    loss: DeviceNumber | None


NOTHING = Late(None, None)


@dataclass(frozen=True)
class WrittenVersion:
    """A version whose payload is in its slot, or coming, and whose chunks are being digested."""

    header: version.Header
    at: m.TensorsAt
    slot: torch.Tensor
    chunks: list[Future[int]]
    arrival: Arrival
    coming: BesideTraining | None = None

    @property
    def payload(self) -> torch.Tensor:
        """The packed tensors."""
        return self.slot[self.header.header_nbytes :]


@dataclass(frozen=True)
class FetchedStep:
    """A committed step: the record, and the verified version of its tensors with its place."""

    record: bytes
    at: m.TensorsAt
    header: version.Header
    data: torch.Tensor

    @property
    def payload(self) -> torch.Tensor:
        """The packed tensors."""
        return self.data[self.header.header_nbytes :]


class Versions:
    """The versions of one rank, through its session. Main thread only.

    `pins`: for which kind of device the memory that versions are copied into is page-locked, if for one.
    `lasts(generation)`: whether nothing that a device has done so far was cut off by that generation's end.
    """

    def __init__(
        self,
        session: Session,
        chunk_nbytes: int = version.CHUNK_NBYTES,
        lasts: Callable[[int], bool] = lambda _generation: True,
    ) -> None:
        self._session, self._chunk_nbytes = session, chunk_nbytes
        self._lasts = lasts
        self.pins: str | None = None
        self._pinned: Pinned | None = None
        self._coming: BesideTraining | None = None
        self._mapped: _Mapped | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ckptless-version")
        # What the threads have of the newest commit: its chunks, then the rest of it.
        self._pending: list[Future[Any]] = []

    # ------------------------------------------------------------------------------------- write

    def write(self, tensors: TensorSet, step: int, generation: int, shard: int, rank: int) -> WrittenVersion:
        """Copy all tensors into the next slot. Raises GenerationEnded while asking for memory.

        What was written before must have been sent: `wait`.
        """
        written = self._place(tensors, step, generation, shard, rank)
        written = replace(written, arrival=tensors.queue(written.payload))
        payload, header = raw.window(written.payload), written.header
        written.chunks.extend(
            self._threads.submit(_digest, written.arrival, payload[start:end])
            for start, end in version.spans(header.nbytes, header.chunk_nbytes)
        )
        self._pending.extend(written.chunks)
        return written

    def begin(self, tensors: TensorSet, step: int, generation: int, shard: int, rank: int) -> WrittenVersion:
        """Begin as `write`; but copy what only an update changes beside the training, up to `fence`."""
        written = self._place(tensors, step, generation, shard, rank)
        now, later = tensors.copies(written.payload)
        private.copy_all([one.target for one in now], [one.source for one in now])
        self._coming = BesideTraining(later)
        return replace(written, coming=self._coming)

    def fence(self) -> None:
        """An update begins: it comes after the copies. Raises StateMoved. The thread that updates."""
        if self._coming is not None:
            self._coming.fence()

    def _place(self, tensors: TensorSet, step: int, generation: int, shard: int, rank: int) -> WrittenVersion:
        """The next slot, in which no version lies any more."""
        layout = tensors.layout
        header = version.Header(
            job=self._session.welcome.job,
            run=self._session.welcome.run,
            shard=shard,
            rank=rank,
            step=step,
            generation=generation,
            layout=layout.digest,
            nbytes=layout.nbytes,
            chunks=(),
            chunk_nbytes=self._chunk_nbytes,
        )
        nbytes = header.total_nbytes
        mapped = self._mapped
        if mapped is None or mapped.slot_nbytes < nbytes:
            mapped = self._allocate(generation, tensors, nbytes)
        if self.pins is not None and self._pinned is None:
            self._pinned = Pinned(mapped.bytes, self.pins)
        index = mapped.last_slot = (mapped.last_slot + 1) % SLOTS
        slot = mapped.slot(index)[:nbytes]
        # What lay there is no version from here on, whatever becomes of this process.
        version.invalidate(raw.window(slot))
        offset = index * mapped.slot_nbytes
        at = m.TensorsAt(region=mapped.number, offset=offset, nbytes=nbytes, digest="")
        return WrittenVersion(header, at, slot, [], Arrival(()))

    def _allocate(self, generation: int, tensors: TensorSet, nbytes: int) -> _Mapped:
        # The views that pack() keeps would hold the old mapping.
        tensors.release()
        self._unmap()
        page = version.PAGE_NBYTES
        slot_nbytes = -(-nbytes // page) * page
        reply, fd = self._session.allocate(generation, slot_nbytes, SLOTS)
        self._mapped = _map(fd, reply.region, slot_nbytes, last_slot=-1)
        return self._mapped

    def _unmap(self) -> None:
        self._unpin()
        self._mapped = None

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def send(
        self,
        commit: m.Commit,
        written: WrittenVersion | None = None,
        own: tuple[Span, ...] = (),
        late: Late = NOTHING,
    ) -> None:
        """Give a commit to the agent: at once, or with what was `written`, as soon as its header is there.

        `own` are the bytes of the payload that twins have each for itself. `late` completes the commit.
        """
        if written is None and late == NOTHING:
            self._session.send(commit)
        else:
            # The chunks stand before it in the threads' queue: it waits for none that has not begun.
            self._pending.append(self._threads.submit(self._complete, commit, written, own, late))

    def _complete(
        self,
        commit: m.Commit,
        written: WrittenVersion | None,
        own: tuple[Span, ...],
        late: Late,
    ) -> None:
        # no deadline: the device's own work; the end of the generation frees it
        if late.loss is not None:
            commit = structs.replace(commit, loss=late.loss.read())
        if late.draft is not None:
            record = late.draft.finish()
            commit = structs.replace(commit, record=record, digest=record_digest(record))
        if written is not None:
            self._finish(commit, written, own)
        elif self._lasts(commit.generation):
            self._session.send(commit)

    def _finish(self, commit: m.Commit, written: WrittenVersion, own: tuple[Span, ...]) -> None:
        if written.coming is None:
            # no deadline: hashes of memory, and the agent's answers; the control plane ends what hangs
            chunks = tuple(chunk.result() for chunk in written.chunks)
        else:
            digests = version.ChunkDigests(raw.window(written.payload), self._chunk_nbytes)
            written.coming.complete(digests.came)
            # What is torn gets no header, and nobody hears of it but the main thread.
            if written.coming.moved is not None:
                return
            chunks = digests.finish()
        # What was queued on a device behind collectives that were aborted since is garbage.
        if written.arrival.from_device and not self._lasts(commit.generation):
            return
        header = replace(written.header, chunks=chunks)
        window = raw.window(written.slot)
        header = replace(header, twins=twin_digest(header, window[header.header_nbytes :], own))
        digest = version.write_header(window, header)
        at = structs.replace(written.at, digest=digest)
        self._session.send(structs.replace(commit, tensors=at))

    def wait(self) -> None:
        """Wait until the last commit has been sent. Raises what went wrong with it, StateMoved among that."""
        pending, moved = self._settle()
        for future in pending:
            # no deadline: hashes of memory, and the agent's answers; the control plane ends what hangs
            future.result()
        if moved is not None:
            raise StateMoved(moved)

    def leave(self) -> str | None:
        """The generation is over: as `wait`, but what went wrong does not matter any more.

        What was written to while it was copied, if something was.
        """
        pending, moved = self._settle()
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            logger.warning("the last commit was not sent: %s", errors[0])
        return moved

    def _settle(self) -> tuple[list[Future[Any]], str | None]:
        """Finish what the threads had, as fast as memory is, and what has moved."""
        coming, self._coming = self._coming, None
        pending, self._pending = self._pending, []
        wait(pending)
        return pending, coming.moved if coming is not None else None

    def close(self) -> None:
        """End the threads."""
        self.leave()
        self._threads.shutdown()
        self._unpin()

    # -------------------------------------------------------------------------------------- read

    def fetch(self, generation: int, step: int, shard: int, tensors: TensorSet) -> FetchedStep:
        """Return a version of `step` that is sound to its last byte.

        A bad one is told to the agent, which gets another. Raises StateUnavailableError, GenerationEnded.
        The bytes are the agent's memory: copy them out before the next commit but one.
        """
        unsound, why = None, ""
        for _ in range(TRIES):
            reply, fd = self._session.fetch(generation, step, unsound, why)
            if reply.error is not None or reply.tensors is None or fd is None:
                raise StateUnavailableError(f"the state of step {step} is not to be had: {reply.error}")
            data = self._mapped_at(reply.tensors, fd, reply.slot_nbytes, tensors)
            try:
                header = version.decode(raw.window(data), reply.tensors.digest)
                welcome = self._session.welcome
                header.check(version.Origin(welcome.job, welcome.run), shard, step, generation)
                found = FetchedStep(reply.record, reply.tensors, header, data)
                self._verify(found)
                return found
            except (BadVersionError, StateUnavailableError) as error:
                unsound, why = reply.tensors, str(error)
        raise StateUnavailableError(f"the state of step {step}, shard {shard}, is bad again and again: {why}")

    def _mapped_at(self, at: m.TensorsAt, fd: int, slot_nbytes: int, tensors: TensorSet) -> torch.Tensor:
        if self._mapped is not None and self._mapped.number == at.region:
            os.close(fd)
        else:
            # The views that pack() keeps would hold the old mapping.
            tensors.release()
            self._unmap()
            self._mapped = _map(fd, at.region, slot_nbytes, last_slot=-1)
        self._mapped.last_slot = at.offset // slot_nbytes
        return self._mapped.bytes[at.offset : at.offset + at.nbytes]

    def _verify(self, found: FetchedStep) -> None:
        """Raise StateUnavailableError, which names the chunk, where the bytes are not those of the commit."""
        header, payload = found.header, raw.window(found.data)[found.header.header_nbytes :]
        if header.total_nbytes != len(found.data):
            raise StateUnavailableError(f"the tensors of step {header.step} are of another size")
        spans = version.spans(header.nbytes, header.chunk_nbytes)
        # All of them, also behind a bad one: nobody reads there any more when this returns.
        digests = list(self._threads.map(version.digest_of, [payload[start:end] for start, end in spans]))
        for index, digest in enumerate(digests):
            if digest != header.chunks[index]:
                raise StateUnavailableError(
                    f"the tensors of step {header.step}, shard {header.shard}, do not match their digest "
                    f"in chunk {index} of {len(header.chunks)}"
                )


def record_digest(record: bytes) -> str:
    """xxh3_128 of a record, hex, as the agent checks it."""
    return xxhash.xxh3_128_hexdigest(record)


def _digest(arrival: Arrival, chunk: memoryview) -> int:
    # no deadline: the device's own work; the end of the generation frees it
    arrival.wait()
    return version.digest_of(chunk)


def _map(fd: int, number: int, slot_nbytes: int, last_slot: int) -> _Mapped:
    try:
        mapping = mmap.mmap(fd, slot_nbytes * SLOTS)
    finally:
        os.close(fd)
    # The tensor keeps the mapping alive, and unmaps it when the last view of it is gone.
    return _Mapped(number, slot_nbytes, torch.frombuffer(mapping, dtype=torch.uint8), last_slot)
