"""The version store of an agent: tensors of its node, records of its ranks, and both of other nodes' ranks.

Tensors lie in memfds, which ranks map and which vanish with the last process that holds them. A record is
given out only if it matches its digest; tensors are verified by whoever gets them (integrity.py, for what
lies here). The newest `KEEP` steps of each rank and shard are kept; an older one is never asked for: a rank
commits step s only after its replicas of s-1 are held elsewhere.

All of it is of one cut (see Assignment). When another number of ranks goes on, what is here is set aside as
`former`, for these to take their parts of it, until all of them have committed enough of their own.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash

from ckptless.daemon.agent.core.cuts import cut_moves
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, ProtocolError
from ckptless.daemon.protocol.messages import Assignment, Copies, Holdings, TensorsAt
from ckptless.daemon.replication.protection import Item

KEEP = 3
SLOTS = version.SLOTS
PAGE_NBYTES = version.PAGE_NBYTES
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def round_up(nbytes: int) -> int:
    """Return a size in whole pages, at least one."""
    return max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 of the bytes, hex."""
    return xxhash.xxh3_128(data).hexdigest()


class Region:
    """A memfd of `slots` slots of `slot_nbytes` bytes for one shard; its size is sealed.

    `fd` is one that was made like this before, and is the region's from here on. Raises ValueError where it
    is of another size.
    """

    def __init__(self, number: int, shard: int, slot_nbytes: int, slots: int, fd: int | None = None) -> None:
        self.number, self.shard = number, shard
        self.slot_nbytes, self.slots = slot_nbytes, slots
        self.nbytes = slot_nbytes * slots
        if fd is None:
            self.fd = os.memfd_create(f"ckptless-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
        elif (nbytes := os.fstat(fd).st_size) == self.nbytes:
            self.fd = fd
        else:
            raise ValueError(f"a memfd of {nbytes} bytes for {slots} slots of {slot_nbytes}")
        self._map = mmap.mmap(self.fd, self.nbytes)
        self._view = memoryview(self._map)

    def has_slot(self, offset: int, nbytes: int) -> bool:
        """Whether so many bytes lie at the begin of one of the slots."""
        slot, inside = divmod(offset, self.slot_nbytes)
        return inside == 0 and 0 <= slot < self.slots and 0 <= nbytes <= self.slot_nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the region; the caller releases the view. Raises ValueError outside it, or once closed."""
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self._view):
            raise ValueError(f"bytes {offset} to {offset + nbytes} of a region of {len(self._view)}")
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap and close; ranks keep their own mappings. Raises BufferError while it is read."""
        self._view.release()
        self._map.close()
        os.close(self.fd)


def header_of(region: Region, at: TensorsAt) -> version.Header:
    """The header of a version that lies here; its chunks are not read. Raises BadVersionError."""
    with region.view(at.offset, at.nbytes) as view:
        header = version.decode(view, at.digest)
    if header.total_nbytes != at.nbytes:
        raise BadVersionError(f"{at.nbytes} bytes; the header says {header.total_nbytes}")
    return header


@dataclass(frozen=True)
class HeldRecord:
    """A record, its digest, and the shard that its rank has tensors of."""

    record: bytes
    digest: str
    shard: int = 0


@dataclass(frozen=True)
class Version:
    """A step of a shard's tensors in generation `generation`, and where they lie."""

    generation: int
    shard: int
    step: int
    at: TensorsAt
    region: Region


class Incoming:
    """A slot that a version from elsewhere is written to; no version lies there before `finish`."""

    def __init__(self, header: version.Header, region: Region, offset: int) -> None:
        self.header, self._region, self._offset = header, region, offset
        self.slot = region.view(offset, header.total_nbytes)
        self.complete = False
        version.invalidate(self.slot)

    def payload(self, start: int, end: int) -> memoryview:
        """Bytes of the payload; the caller releases the view."""
        base = self.header.header_nbytes
        return self.slot[base + start : base + end]

    def finish(self) -> TensorsAt:
        """All chunks are there and verified: write the header."""
        told = version.write_header(self.slot, self.header)
        self.complete = True
        nbytes = self.header.total_nbytes
        return TensorsAt(region=self._region.number, offset=self._offset, nbytes=nbytes, digest=told)


class VersionStore:
    """Owned by the agent's event loop. Ranks and shards are of `cut`; `former` has what is set aside.

    `numbers` are those of its regions, which it has in common with `former`.
    """

    def __init__(self, cut: int = 1, numbers: Iterator[int] | None = None) -> None:
        self.cut = cut
        self.former: VersionStore | None = None
        self._records: dict[int, dict[int, HeldRecord]] = {}
        self._tensors: dict[int, dict[int, TensorsAt]] = {}
        self._regions: dict[int, Region] = {}
        # Places that are being written to, by number of the region and offset.
        self._writing: set[tuple[int, int]] = set()
        self._numbers = numbers or itertools.count(1)
        self.on_dropped: Callable[[], None] = lambda: None
        # What is held is not what it was.
        self.on_held: Callable[[], None] = lambda: None

    # -------------------------------------------------------------------------------------- cuts

    def of(self, cut: int) -> "VersionStore | None":
        """Return what is held of a cut, if anything can be."""
        return next((one for one in (self, self.former) if one is not None and one.cut == cut), None)

    def follow(self, assignment: Assignment, node: int) -> None:
        """Begin a generation: keep what it goes on from, and of what is newer, or another cut, nothing."""
        for move in cut_moves(self.cut, None if self.former is None else self.former.cut, assignment):
            match move:
                case "forget-former":
                    self.forget_former()
                case "set-aside":
                    self._set_aside()
                case "take-back":
                    self._take_back()
                case "forget-here":
                    self._forget_here()
        self.cut = assignment.cut
        former = assignment.former
        if former is not None and self.former is not None:
            self.former.drop_after(assignment.restore_step)
            self.former.drop_unnamed(assignment.restore_step, dict(former.tensor_nodes), node)
        self.drop_after(assignment.restore_step if former is None else None)
        self.drop_unnamed(assignment.restore_step, dict(assignment.tensor_nodes), node)

    def begin_former(self, cut: int) -> "VersionStore":
        """Return an empty store for what another number of ranks has committed."""
        self.former = VersionStore(cut, self._numbers)
        self.former.on_dropped = lambda: self.on_dropped()
        return self.former

    def _set_aside(self) -> None:
        former = self.begin_former(self.cut)
        former._records, former._tensors, former._regions = self._records, self._tensors, self._regions
        self._records, self._tensors, self._regions = {}, {}, {}

    def _take_back(self) -> None:
        """The former ranks go on after all."""
        self._forget_here()
        assert self.former is not None
        former, self.former = self.former, None
        self._records, self._tensors, self._regions = former._records, former._tensors, former._regions

    def _forget_here(self) -> None:
        self._records, self._tensors = {}, {}
        self._close_regions(list(self._regions.values()))

    def forget_former(self) -> bool:
        """Hold nothing of the former cut any more. Whether anything was there."""
        former, self.former = self.former, None
        if former is None:
            return False
        former.close()
        self.on_held()
        return True

    # ----------------------------------------------------------------------------------- records

    def put_record(self, rank: int, step: int, held: HeldRecord) -> None:
        """Hold a record. Raises ProtocolError where it does not match its digest."""
        if digest(held.record) != held.digest:
            raise ProtocolError(f"the record of rank {rank}, step {step}, does not match its digest")
        steps = self._records.setdefault(rank, {})
        steps[step] = held
        _keep_newest(steps)
        self.on_held()

    def record(self, rank: int, step: int) -> HeldRecord | None:
        """A record that matches its digest, or None."""
        held = self._records.get(rank, {}).get(step)
        return held if held is not None and digest(held.record) == held.digest else None

    # ----------------------------------------------------------------------------------- tensors

    def allocate(self, shard: int, slot_nbytes: int, slots: int) -> Region:
        """A new region for a shard's tensors. Raises OSError where there is no memory for it."""
        number = next(self._numbers)
        region = self._regions[number] = Region(number, shard, slot_nbytes, slots)
        return region

    def adopt(self, region: Region) -> None:
        """Take over a region that was made before, under a number of this store's."""
        region.number = next(self._numbers)
        self._regions[region.number] = region

    def region(self, number: int) -> Region | None:
        """A region by its number."""
        return self._regions.get(number)

    @contextmanager
    def incoming(self, header: version.Header) -> Iterator[Incoming]:
        """A place to write this version to; what is not finished is no version. Raises OSError as `room`."""
        with self.room(header.shard, header.total_nbytes) as (region, offset):
            coming = Incoming(header, region, offset)
            try:
                yield coming
            finally:
                if not coming.complete:
                    version.invalidate(coming.slot)
                coming.slot.release()

    @contextmanager
    def room(self, shard: int, nbytes: int) -> Iterator[tuple[Region, int]]:
        """A region and an offset in it, to write a step of a shard to that comes from elsewhere.

        What lies there is given out no more. Raises OSError where there is no memory for it.
        """
        steps = self._tensors.setdefault(shard, {})
        fitting = [r for r in self._regions.values() if r.shard == shard and r.slot_nbytes >= nbytes]
        region = fitting[-1] if fitting else self.allocate(shard, round_up(nbytes), SLOTS)
        lies = {at.offset: step for step, at in steps.items() if at.region == region.number}
        offsets = range(0, region.nbytes, region.slot_nbytes)
        free = [offset for offset in offsets if (region.number, offset) not in self._writing]
        if not free:
            region, lies, free = self.allocate(shard, round_up(nbytes), SLOTS), {}, [0]
        # One where nothing lies, or else that of the oldest step.
        offset = min(free, key=lambda offset: lies.get(offset, -1))
        if offset in lies:
            del steps[lies[offset]]
        self._writing.add((region.number, offset))
        try:
            yield region, offset
        finally:
            self._writing.discard((region.number, offset))

    def put_tensors(self, shard: int, step: int, at: TensorsAt) -> None:
        """A step's tensors have been written. Raises ProtocolError where they cannot be there."""
        region = self._regions.get(at.region)
        if region is None or region.shard != shard or not region.has_slot(at.offset, at.nbytes):
            raise ProtocolError(f"tensors of step {step} in a place that was not allocated")
        steps = self._tensors.setdefault(shard, {})
        for old, place in list(steps.items()):
            if (place.region, place.offset) == (at.region, at.offset):
                del steps[old]
        steps[step] = at
        _keep_newest(steps)
        self._free_older_regions(region)
        self.on_held()

    def tensors(self, shard: int, step: int) -> tuple[TensorsAt, Region] | None:
        """Return where a shard's tensors of a step lie, if here. Whoever reads them checks the digest."""
        at = self._tensors.get(shard, {}).get(step)
        return (at, self._regions[at.region]) if at is not None else None

    def steps(self, shard: int) -> tuple[int, ...]:
        """Return the steps of which a shard's tensors are here."""
        return tuple(self._tensors.get(shard, ()))

    def drop_tensors(self, shard: int, step: int, at: TensorsAt) -> bool:
        """Hold a step's tensors no more, if they lie there: they are bad. Whether they were held."""
        steps = self._tensors.get(shard, {})
        if steps.get(step) != at:
            return False
        del steps[step]
        self.on_dropped()
        return True

    def _free_older_regions(self, newest: Region) -> None:
        """Close the shard's older regions that no step lies in: nobody writes to them any more."""
        used = {at.region for at in self._tensors[newest.shard].values()}
        older = [r for r in self._regions.values() if r.shard == newest.shard and r.number < newest.number]
        self._close_regions([region for region in older if region.number not in used])

    def _close_regions(self, regions: Iterable[Region]) -> None:
        writing = {number for number, _ in self._writing}
        for region in regions:
            if region.number in writing:
                continue
            try:
                region.close()
            except BufferError:
                continue  # somebody is still being sent what lay in it: it is closed after that
            del self._regions[region.number]

    # -------------------------------------------------------------------------------- garbage collection

    def items(self) -> frozenset[Item]:
        """All that takes memory."""
        shards = {shard for shard, steps in self._tensors.items() if steps}
        shards |= {region.shard for region in self._regions.values()}
        ranks = {rank for rank, steps in self._records.items() if steps}
        return frozenset([*(Item("tensors", n) for n in shards), *(Item("record", n) for n in ranks)])

    def newest(self, item: Item) -> int | None:
        """The newest step of it."""
        known: Mapping[int, Iterable[int]] = self._records if item.kind == "record" else self._tensors
        return max(known.get(item.number, ()), default=None)

    def discard(self, item: Item) -> None:
        """Hold nothing of it any more. Memory that is just being read is given back when asked again."""
        if item.kind == "record":
            self._records.pop(item.number, None)
        else:
            self._tensors.pop(item.number, None)
            self._close_regions([r for r in self._regions.values() if r.shard == item.number])
        self.on_held()

    def drop_after(self, step: int | None) -> None:
        """A new generation goes on from `step` (None: from nothing): what is newer never happened."""
        limit = -1 if step is None else step
        known: list[dict[int, Any]] = [*self._records.values(), *self._tensors.values()]
        for steps in known:
            for newer in [s for s in steps if s > limit]:
                del steps[newer]

    def newest_whole(self, rank: int) -> int | None:
        """Return the newest step of a rank of which its record and its shard's tensors are held."""
        records = self._records.get(rank, {})
        whole = (step for step, held in records.items() if step in self._tensors.get(held.shard, {}))
        return max(whole, default=None)

    def drop_unnamed(self, step: int | None, holders: Mapping[int, Sequence[int]], node: int) -> None:
        """Drop the restored step where others are not to have it from here: it is not used here either."""
        for shard, steps in self._tensors.items():
            if step in steps and node not in holders.get(shard, ()):
                del steps[step]

    # --------------------------------------------------------------------------------------- all

    def holdings(self) -> Holdings:
        """Return what could be given."""
        held = self.copies()
        tensors = tuple((shard, tuple(sorted(steps))) for shard, steps in sorted(self._tensors.items()))
        return Holdings(tensors=tensors, records=tuple(one[:3] for one in held.records), cut=self.cut)

    def copies(self) -> Copies:
        """Return what is held, and in how much memory."""
        records = tuple(
            (rank, next(iter(steps.values())).shard, tuple(sorted(steps)), _nbytes_of(steps))
            for rank, steps in sorted(self._records.items())
            if steps
        )
        tensors = tuple(
            (shard, tuple(sorted(steps)), sum(at.nbytes for at in steps.values()))
            for shard, steps in sorted(self._tensors.items())
            if steps
        )
        return Copies(tensors=tensors, records=records, nbytes=self.nbytes)

    def contents(
        self,
    ) -> tuple[list[Region], list[tuple[int, int, TensorsAt]], list[tuple[int, int, HeldRecord]]]:
        """All that is held: regions that something lies in, (shard, step, where), (rank, step, record)."""
        tensors = [(shard, step, at) for shard, steps in self._tensors.items() for step, at in steps.items()]
        records = [
            (rank, step, held) for rank, steps in self._records.items() for step, held in steps.items()
        ]
        used = {at.region for _, _, at in tensors}
        return [self._regions[number] for number in sorted(used)], tensors, records

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        records = sum(map(_nbytes_of, self._records.values()))
        former = self.former.nbytes if self.former is not None else 0
        return records + sum(region.nbytes for region in self._regions.values()) + former

    @property
    def touched_nbytes(self) -> int:
        """Bytes of the tensors' memory that the kernel has given so far: it does at the first touch."""
        return sum(os.fstat(region.fd).st_blocks * 512 for region in self._regions.values())

    def newest_nbytes(self, shard: int) -> int:
        """Bytes of the memory that a shard's next version goes into, touched or not; 0 where none is."""
        return next((r.nbytes for r in reversed(self._regions.values()) if r.shard == shard), 0)

    def close(self) -> None:
        """Give everything back."""
        if self.former is not None:
            self.former.close()
        for region in self._regions.values():
            # A thread may still be reading it; then it goes with the process.
            with contextlib.suppress(BufferError):
                region.close()
        self._regions.clear()


def _keep_newest(steps: dict[int, Any]) -> None:
    for old in sorted(steps)[:-KEEP]:
        del steps[old]


def _nbytes_of(steps: dict[int, HeldRecord]) -> int:
    return sum(len(held.record) for held in steps.values())
