"""Writes a rank's versions into its agent's memory, and reads them back.

A version of step s is the record of every rank, and on each node the tensors once, written by one of the
node's twins (see daemon/protocol/version.py). Versions go into the slots of a memfd in turn. The main thread
copies, or a thread does while the training goes on (`overlap.py`); threads of this object digest what was
copied, write the header and send the commit. They have one version at a time, and are idle whenever the main
thread has called `wait`.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import xxhash
from msgspec import structs

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, StateUnavailableError
from ckptless.daemon.protocol.twins import Span, twin_digest
from ckptless.pytorch_hooks.agent_session.session import Session
from ckptless.pytorch_hooks.commit.device_overlap import BesideOnDevice
from ckptless.pytorch_hooks.commit.frozen import Frozen
from ckptless.pytorch_hooks.commit.overlap import BesideTraining
from ckptless.pytorch_hooks.commit.slots import SLOTS, Slots
from ckptless.pytorch_hooks.devices.arrival import Arrival, DeviceNumber
from ckptless.pytorch_hooks.devices.sums import summable
from ckptless.pytorch_hooks.errors import StateMoved
from ckptless.pytorch_hooks.state import Draft, TensorCopy, TensorSet, private, raw

logger = logging.getLogger(__name__)

# Sums of what a device has sent take as long as several digests.
THREADS = 4 if len(os.sched_getaffinity(0)) >= 8 else 2
# So many bad copies in a row: something is wrong that another one does not mend.
TRIES = 4


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
    index: int
    slot: torch.Tensor
    chunks: list[Future[int]]
    arrival: Arrival
    coming: BesideTraining | None = None
    # The names of tensors that were written to before a device had copied them.
    moved: list[Future[str | None]] = field(default_factory=list)

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
        self._coming: BesideTraining | BesideOnDevice | None = None
        self._slots: Slots | None = None
        self._frozen = Frozen(chunk_nbytes)
        # Before and after the copies that the training's stream has made.
        self._held: tuple[Arrival, Arrival] | None = None
        # Of the device, beside the training's.
        self._stream: torch.Stream | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ckptless-version")
        # What the threads have of the newest commit: its chunks, then the rest of it.
        self._pending: list[Future[Any]] = []
        # What has moved under the copies of the newest commit; written by a thread before `_pending` is done.
        self._moved: str | None = None

    # ------------------------------------------------------------------------------------- write

    def write(self, tensors: TensorSet, step: int, generation: int, shard: int, rank: int) -> WrittenVersion:
        """Copy all tensors into the next slot. Raises GenerationEnded while asking for memory.

        What was written before must have been sent: `wait`.
        """
        written = self._place(tensors, step, generation, shard, rank)
        device = tensors.device
        if device is None:
            return self._digested(replace(written, arrival=tensors.queue(written.payload)), {})
        began = Arrival([device])
        copies = tensors.copies(written.payload)
        needed = self._frozen.begin(written.index, copies, device, written.header.layout)
        arrival = _queue(needed.copies)
        self._held = began, Arrival([device])
        return self._digested(replace(written, arrival=arrival), needed.digests)

    def begin(self, tensors: TensorSet, step: int, generation: int, shard: int, rank: int) -> WrittenVersion:
        """Begin as `write`; but copy what only an update changes beside the training, up to `fence`."""
        written = self._place(tensors, step, generation, shard, rank)
        copies = tensors.copies(written.payload)
        device = tensors.device
        if device is None:
            now, later = _split(copies, lambda one: one.by_update)
            _queue(now)
            self._coming = BesideTraining(later)
            return replace(written, coming=self._coming)
        began = Arrival([device])
        needed = self._frozen.begin(written.index, copies, device, written.header.layout)
        # What is frozen is added up as such, and copied at few commits.
        now, later = _split(
            needed.copies, lambda one: one.by_update and not one.frozen and summable(one.source, device)
        )
        arrival = _queue(now)
        self._held = began, Arrival([device])
        if not later:
            return self._digested(replace(written, arrival=arrival), needed.digests)
        self._stream = self._stream or torch.Stream(device)
        self._coming = BesideOnDevice(later, self._stream)
        written = replace(written, arrival=arrival.together(self._coming.arrival))
        written.moved.extend(map(self._threads.submit, self._coming.checks()))
        self._pending.extend(written.moved)
        return self._digested(written, needed.digests)

    def held_s(self) -> float:
        """Return for how long the last copies held up a device, by its clock; once, where it is known."""
        held = self._held
        if held is None or not held[1].is_there:
            return 0.0
        self._held = None
        began, arrival = held
        return arrival.since(began)

    def _digested(self, written: WrittenVersion, known: Mapping[int, int]) -> WrittenVersion:
        """Have the threads digest its chunks, but for those that are `known`, each once all has arrived."""
        payload, header = raw.window(written.payload), written.header
        for number, (start, end) in enumerate(version.spans(header.nbytes, header.chunk_nbytes)):
            if number in known:
                there: Future[int] = Future()
                there.set_result(known[number])
            else:
                there = self._threads.submit(_digest, written.arrival, payload[start:end])
            written.chunks.append(there)
        self._pending.extend(written.chunks)
        return written

    def fence(self) -> None:
        """An update begins: it comes after the copies. Raises StateMoved. The thread that updates."""
        if self._coming is not None:
            self._coming.fence()

    def _place(self, tensors: TensorSet, step: int, generation: int, shard: int, rank: int) -> WrittenVersion:
        """Return the next slot, in which no version lies any more."""
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
        slots = self._slots
        if slots is None or slots.slot_nbytes < nbytes:
            slots = self._allocate(generation, tensors, nbytes)
        index = slots.take()
        slot = slots.slot(index)[:nbytes]
        # What lay there is no version from here on, whatever becomes of this process.
        version.invalidate(raw.window(slot))
        offset = index * slots.slot_nbytes
        at = m.TensorsAt(region=slots.number, offset=offset, nbytes=nbytes, digest="")
        return WrittenVersion(header, at, index, slot, [], Arrival(()))

    def scratch(self, tensors: TensorSet, generation: int, nbytes: int) -> torch.Tensor:
        """Return so many bytes, all 0 (uint8, 1-D), of a slot that the next two versions are not written to.

        No version lies in any yet. So a state that is put together takes no memory of its own. Raises
        GenerationEnded.
        """
        slots = self._slots
        if slots is None or slots.slot_nbytes < version.slot_nbytes(nbytes):
            slots = self._allocate(generation, tensors, version.slot_nbytes(nbytes))
        slots.next_slot = 0
        slot = slots.slot(SLOTS - 1)
        return slot[:nbytes].zero_()

    def _allocate(self, generation: int, tensors: TensorSet, nbytes: int) -> Slots:
        self._unmap(tensors)
        page = version.PAGE_NBYTES
        slot_nbytes = -(-nbytes // page) * page
        reply, fd = self._session.allocate(generation, slot_nbytes, SLOTS)
        self._slots = Slots(fd, reply.region, slot_nbytes, 0, _kind(tensors))
        return self._slots

    def _unmap(self, tensors: TensorSet | None = None) -> None:
        if tensors is not None:
            # The views that pack() keeps would hold the old mapping.
            tensors.release()
        self._frozen.forget()
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()

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
            self._moved = written.coming.moved
            chunks = digests.finish() if self._moved is None else ()
        # no deadline: sums of memory
        self._moved = next((name for one in written.moved if (name := one.result())), self._moved)
        # What is torn gets no header, and nobody hears of it but the main thread.
        if self._moved is not None:
            return
        # What was queued on a device behind collectives that were aborted since is garbage.
        if written.arrival.from_device and not self._lasts(commit.generation):
            return
        self._frozen.end()
        header = replace(written.header, chunks=chunks)
        window = raw.window(written.slot)
        header = replace(header, twins=twin_digest(header, window[header.header_nbytes :], own))
        digest = version.write_header(window, header)
        self._frozen.sealed(written.index, chunks)
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
        self._frozen.forget()
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            logger.warning("the last commit was not sent: %s", errors[0])
        return moved

    def _settle(self) -> tuple[list[Future[Any]], str | None]:
        """Finish what the threads had, as fast as memory is, and what has moved."""
        self._coming = None
        pending, self._pending = self._pending, []
        wait(pending)
        moved, self._moved = self._moved, None
        return pending, moved

    def forget(self, tensors: TensorSet | None) -> None:
        """Let go of the memory that was written to, and of these tensors, which are not written again."""
        self.leave()
        self._held = None
        self._unmap(tensors)

    def close(self) -> None:
        """End the threads."""
        self.leave()
        self._threads.shutdown()
        self._unmap()

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
        following = (at.offset // slot_nbytes + 1) % SLOTS
        if self._slots is not None and self._slots.number == at.region:
            os.close(fd)
            self._slots.next_slot = following
        else:
            self._unmap(tensors)
            self._slots = Slots(fd, at.region, slot_nbytes, following, _kind(tensors))
        return self._slots.bytes[at.offset : at.offset + at.nbytes]

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


def _queue(copies: Sequence[TensorCopy]) -> Arrival:
    return private.queue_copies([one.target for one in copies], [one.source for one in copies])


def _split(
    copies: Sequence[TensorCopy], later: Callable[[TensorCopy], bool]
) -> tuple[list[TensorCopy], list[TensorCopy]]:
    both: tuple[list[TensorCopy], list[TensorCopy]] = [], []
    for one in copies:
        both[later(one)].append(one)
    return both


def _kind(tensors: TensorSet) -> str | None:
    return None if tensors.device is None else tensors.device.type
