"""What an agent holds: its node's tensors, and records of its own ranks and of other nodes' ranks.

Nothing is given out that does not match its digest. The vault keeps the newest `KEEP` steps of each
rank; an older one is never asked for: a rank commits step s only after its record of s-1 is held elsewhere.
"""

from dataclasses import dataclass

import xxhash

from ckptless.daemon.agent.memory import Region
from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.api.messages import Holdings, TensorsAt

KEEP = 3


@dataclass(frozen=True)
class Held:
    """A record and its digest."""

    record: bytes
    digest: str


def digest(data: bytes | memoryview) -> str:
    """xxh3_128 of the bytes, hex."""
    return xxhash.xxh3_128(data).hexdigest()


class Vault:
    """Owned by the agent's event loop."""

    def __init__(self) -> None:
        self._records: dict[int, dict[int, Held]] = {}
        self._tensors: dict[int, TensorsAt] = {}
        self._regions: dict[int, Region] = {}
        self._count = 0

    # ----------------------------------------------------------------------------------- records

    def put_record(self, rank: int, step: int, record: bytes, digest_told: str) -> None:
        """Hold a record. Raises ProtocolError where it does not match its digest."""
        if digest(record) != digest_told:
            raise ProtocolError(f"the record of rank {rank}, step {step}, does not match its digest")
        steps = self._records.setdefault(rank, {})
        steps[step] = Held(record, digest_told)
        for old in sorted(steps)[:-KEEP]:
            del steps[old]

    def record(self, rank: int, step: int) -> Held | None:
        """A record that matches its digest, or None."""
        held = self._records.get(rank, {}).get(step)
        return held if held is not None and digest(held.record) == held.digest else None

    # ----------------------------------------------------------------------------------- tensors

    def allocate(self, slot_nbytes: int, slots: int) -> Region:
        """A new region for this node's tensors. Raises OSError where there is no memory for it."""
        self._count += 1
        region = self._regions[self._count] = Region(self._count, slot_nbytes, slots)
        return region

    def region(self, number: int) -> Region | None:
        """A region by its number."""
        return self._regions.get(number)

    def put_tensors(self, step: int, at: TensorsAt) -> None:
        """A rank has written a step's tensors. Raises ProtocolError where they cannot be there."""
        region = self._regions.get(at.region)
        if region is None or not region.has_slot(at.offset, at.nbytes):
            raise ProtocolError(f"tensors of step {step} in a place that was not allocated")
        overwritten = [
            old
            for old, place in self._tensors.items()
            if (place.region, place.offset) == (at.region, at.offset) or old == step
        ]
        for old in overwritten:
            del self._tensors[old]
        self._tensors[step] = at
        for old in sorted(self._tensors)[:-KEEP]:
            del self._tensors[old]
        self._free_regions(at.region)

    def tensors(self, step: int) -> tuple[TensorsAt, Region] | None:
        """Where a step's tensors lie, if they are here. Whoever reads them checks the digest."""
        at = self._tensors.get(step)
        return (at, self._regions[at.region]) if at is not None else None

    def _free_regions(self, newest: int) -> None:
        """Regions that no step lies in and that nobody writes to any more."""
        used = {at.region for at in self._tensors.values()} | {newest}
        for number in [number for number in self._regions if number not in used and number < newest]:
            self._regions.pop(number).close()

    # --------------------------------------------------------------------------------------- all

    def holdings(self) -> Holdings:
        """What could be given."""
        records = tuple((rank, tuple(sorted(steps))) for rank, steps in sorted(self._records.items()))
        return Holdings(tensors=tuple(sorted(self._tensors)), records=records)

    def drop_after(self, step: int | None) -> None:
        """A new generation goes on from `step` (None: from nothing): what is newer never happened."""
        limit = -1 if step is None else step
        for steps in self._records.values():
            for newer in [s for s in steps if s > limit]:
                del steps[newer]
        for newer in [s for s in self._tensors if s > limit]:
            del self._tensors[newer]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        records = sum(len(held.record) for steps in self._records.values() for held in steps.values())
        return records + sum(region.slot_nbytes * region.slots for region in self._regions.values())

    def close(self) -> None:
        """Give everything back."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()
