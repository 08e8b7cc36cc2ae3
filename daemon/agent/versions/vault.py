"""What an agent holds: its node's tensors, records of its own ranks, and both of other nodes' ranks.

A record is given out only if it matches its digest; tensors are verified by whoever gets them (soundness.py,
for what lies here). The vault keeps the newest `KEEP` steps of each rank and
shard; an older one is never asked for: a rank commits step s only after its copies of s-1 are held elsewhere.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash

from ckptless.daemon.agent.versions.memory import SLOTS, Region, round_up
from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.api.messages import Assignment, Copies, Holdings, TensorsAt
from ckptless.daemon.control.surplus import Item

KEEP = 3


@dataclass(frozen=True)
class Held:
    """A record, its digest, and the shard that its rank has tensors of."""

    record: bytes
    digest: str
    shard: int = 0


def digest(data: bytes | memoryview) -> str:
    """xxh3_128 of the bytes, hex."""
    return xxhash.xxh3_128(data).hexdigest()


class Vault:
    """Owned by the agent's event loop."""

    def __init__(self) -> None:
        self._records: dict[int, dict[int, Held]] = {}
        self._tensors: dict[int, dict[int, TensorsAt]] = {}
        self._regions: dict[int, Region] = {}
        # Places that are being written to, by number of the region and offset.
        self._writing: set[tuple[int, int]] = set()
        self._count = 0
        self.on_dropped: Callable[[], None] = lambda: None
        # What is held is not what it was.
        self.on_held: Callable[[], None] = lambda: None

    # ----------------------------------------------------------------------------------- records

    def put_record(self, rank: int, step: int, held: Held) -> None:
        """Hold a record. Raises ProtocolError where it does not match its digest."""
        if digest(held.record) != held.digest:
            raise ProtocolError(f"the record of rank {rank}, step {step}, does not match its digest")
        steps = self._records.setdefault(rank, {})
        steps[step] = held
        for old in sorted(steps)[:-KEEP]:
            del steps[old]
        self.on_held()

    def record(self, rank: int, step: int) -> Held | None:
        """A record that matches its digest, or None."""
        held = self._records.get(rank, {}).get(step)
        return held if held is not None and digest(held.record) == held.digest else None

    # ----------------------------------------------------------------------------------- tensors

    def allocate(self, shard: int, slot_nbytes: int, slots: int) -> Region:
        """A new region for a shard's tensors. Raises OSError where there is no memory for it."""
        self._count += 1
        region = self._regions[self._count] = Region(self._count, shard, slot_nbytes, slots)
        return region

    def adopt(self, region: Region) -> None:
        """Take over a region that was made before, under a number of this vault's."""
        self._count += 1
        region.number = self._count
        self._regions[region.number] = region

    def region(self, number: int) -> Region | None:
        """A region by its number."""
        return self._regions.get(number)

    @contextmanager
    def room(self, shard: int, nbytes: int) -> Iterator[tuple[Region, int]]:
        """A region and an offset in it, to write a step of a shard to that comes from elsewhere.

        What lies there is given out no more. Raises OSError where there is no memory for it.
        """
        steps = self._tensors.setdefault(shard, {})
        fitting = [r for r in self._regions.values() if r.shard == shard and r.slot_nbytes >= nbytes]
        region = fitting[-1] if fitting else self.allocate(shard, round_up(nbytes), SLOTS)
        lies = {at.offset: step for step, at in steps.items() if at.region == region.number}
        offsets = [slot * region.slot_nbytes for slot in range(region.slots)]
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
        overwritten = [
            old
            for old, place in steps.items()
            if (place.region, place.offset) == (at.region, at.offset) or old == step
        ]
        for old in overwritten:
            del steps[old]
        steps[step] = at
        for old in sorted(steps)[:-KEEP]:
            del steps[old]
        self._free_regions(region)
        self.on_held()

    def tensors(self, shard: int, step: int) -> tuple[TensorsAt, Region] | None:
        """Where a shard's tensors of a step lie, if they are here. Whoever reads them checks the digest."""
        at = self._tensors.get(shard, {}).get(step)
        return (at, self._regions[at.region]) if at is not None else None

    def steps(self, shard: int) -> tuple[int, ...]:
        """Those of which a shard's tensors are here."""
        return tuple(self._tensors.get(shard, ()))

    def drop_tensors(self, shard: int, step: int, at: TensorsAt) -> bool:
        """Hold a step's tensors no more, if they lie there: they are bad. Whether they were held."""
        steps = self._tensors.get(shard, {})
        if steps.get(step) != at:
            return False
        del steps[step]
        self.on_dropped()
        return True

    def _free_regions(self, newest: Region) -> None:
        """Older regions of that shard that no step lies in: nobody writes to them any more."""
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

    # ----------------------------------------------------------------------------------- surplus

    def items(self) -> frozenset[Item]:
        """All that takes memory."""
        shards = {shard for shard, steps in self._tensors.items() if steps}
        shards |= {region.shard for region in self._regions.values()}
        ranks = {rank for rank, steps in self._records.items() if steps}
        return frozenset([*(("tensors", n) for n in shards), *(("record", n) for n in ranks)])

    def newest(self, item: Item) -> int | None:
        """The newest step of it."""
        what, number = item
        known: Mapping[int, Iterable[int]] = self._records if what == "record" else self._tensors
        return max(known.get(number, ()), default=None)

    def give_back(self, item: Item) -> None:
        """Hold nothing of it any more. Memory that is just being read is given back when asked again."""
        what, number = item
        if what == "record":
            self._records.pop(number, None)
        else:
            self._tensors.pop(number, None)
            self._close_regions([region for region in self._regions.values() if region.shard == number])
        self.on_held()

    # --------------------------------------------------------------------------------------- all

    def holdings(self) -> Holdings:
        """What could be given."""
        records = tuple(
            (rank, next(iter(steps.values())).shard, tuple(sorted(steps)))
            for rank, steps in sorted(self._records.items())
            if steps
        )
        tensors = tuple((shard, tuple(sorted(steps))) for shard, steps in sorted(self._tensors.items()))
        return Holdings(tensors=tensors, records=records)

    def copies(self) -> Copies:
        """What is held, and in how much memory."""
        records = tuple(
            (rank, next(iter(steps.values())).shard, tuple(sorted(steps)), _sum(steps))
            for rank, steps in sorted(self._records.items())
            if steps
        )
        tensors = tuple(
            (shard, tuple(sorted(steps)), sum(at.nbytes for at in steps.values()))
            for shard, steps in sorted(self._tensors.items())
            if steps
        )
        return Copies(tensors=tensors, records=records, nbytes=self.nbytes)

    def contents(self) -> tuple[list[Region], list[tuple[int, int, TensorsAt]], list[tuple[int, int, Held]]]:
        """All that is held: regions that something lies in, (shard, step, where), (rank, step, record)."""
        tensors = [(shard, step, at) for shard, steps in self._tensors.items() for step, at in steps.items()]
        records = [
            (rank, step, held) for rank, steps in self._records.items() for step, held in steps.items()
        ]
        used = {at.region for _, _, at in tensors}
        return [self._regions[number] for number in sorted(used)], tensors, records

    def drop_after(self, step: int | None) -> None:
        """A new generation goes on from `step` (None: from nothing): what is newer never happened."""
        limit = -1 if step is None else step
        known: list[dict[int, Any]] = [*self._records.values(), *self._tensors.values()]
        for steps in known:
            for newer in [s for s in steps if s > limit]:
                del steps[newer]

    def drop_unnamed(self, assignment: Assignment, node: int) -> None:
        """Of the restored step a version that others are not to have from here is not used here either."""
        for shard, steps in self._tensors.items():
            if assignment.restore_step in steps and node not in assignment.holders_of(shard):
                del steps[assignment.restore_step]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        records = sum(_sum(steps) for steps in self._records.values())
        return records + sum(region.slot_nbytes * region.slots for region in self._regions.values())

    def close(self) -> None:
        """Give everything back."""
        for region in self._regions.values():
            # A thread may still be reading it; then it goes with the process.
            with contextlib.suppress(BufferError):
                region.close()
        self._regions.clear()


def _sum(steps: dict[int, Held]) -> int:
    return sum(len(held.record) for held in steps.values())
