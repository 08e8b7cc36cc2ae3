"""Random faults, epochs, workers and world sizes: the samples of a job are those without a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptless.data import MappedLoader
from ckptless.pytorch_hooks.cursor import Cursors
from ckptless.pytorch_hooks.state import codec

MOST_REPLICAS = 4
LEAST = 2 * MOST_REPLICAS


class Numbers:
    """Samples by number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Counting:
    """An iterable without a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Remembering(Counting):
    """An iterable with torchdata's protocol."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._at = self._resumed = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._resumed = state["at"]

    def __iter__(self) -> Iterator[int]:
        begin, self._resumed = self._resumed, 0
        for at in range(begin, self.count):
            self._at = at + 1
            yield at


SOURCES: tuple[Callable[[int], Any], ...] = (Numbers, Counting, Remembering)


@dataclass(frozen=True)
class Job:
    """What is trained on, and for how long."""

    source: Callable[[int], Any]
    count: int
    size: int
    drop_last: bool
    epochs: int
    bad: int

    def loader(self, replica: int, replicas: int, workers: int) -> MappedLoader:
        return MappedLoader(
            self.source(self.count),
            batch_size=self.size,
            shuffle=self.source is Numbers,
            drop_last=self.drop_last,
            transform=self.transform,
            collate=list,
            on_error="skip",
            replica=replica,
            replicas=replicas,
            workers=workers,
        )

    def transform(self, sample: int) -> int:
        if sample == self.bad:
            raise ValueError("a bad record")
        return sample


@dataclass(frozen=True)
class Fault:
    """After `at` steps: some fetch a batch more, some die, all go back, to a world of another size maybe."""

    at: int
    ahead: frozenset[int]
    dead: frozenset[int]
    back: int
    replicas: int
    workers: int


class Replica:
    """A training process of one data-parallel replica."""

    def __init__(self, job: Job, replica: int, replicas: int, workers: int) -> None:
        self.job, self.cursors = job, Cursors()
        self.loader = job.loader(replica, replicas, workers)
        self.enter(replica, replicas)

    def enter(self, replica: int, replicas: int) -> None:
        """The training function is called (again), maybe as another replica."""
        self.loader._replica, self.loader._replicas = replica, replicas
        self.cursors.enter()
        self.batches = self.cursors.batches(self.loader, self.job.epochs, "")


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    # Each replica has two samples of every batch at least, as one may be skipped.
    size = draw(st.integers(LEAST, LEAST + 4))
    drop_last = draw(st.booleans())
    count = draw(st.integers(size, 40))
    rest = count % size
    if not drop_last and 0 < rest < LEAST:
        count += LEAST - rest
    bad = draw(st.sampled_from([-1, 0, 3]))
    return Job(draw(st.sampled_from(SOURCES)), count, size, drop_last, draw(st.integers(1, 3)), bad)


RANKS = st.frozensets(st.integers(0, MOST_REPLICAS - 1))
FAULTS = st.lists(
    st.builds(
        Fault,
        at=st.integers(0, 20),
        ahead=RANKS,
        dead=RANKS,
        back=st.integers(0, 2),
        replicas=st.integers(1, MOST_REPLICAS),
        workers=st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2]),
    ),
    max_size=4,
)


FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
REPLICAS = st.integers(1, MOST_REPLICAS)


@FEW
@given(job=jobs(), replicas=REPLICAS, faults=FAULTS)
def test_no_sample_twice_and_none_left_out(job: Job, replicas: int, faults: list[Fault]) -> None:
    check(job, replicas, faults)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(FEW, max_examples=400)
@given(job=jobs(), replicas=REPLICAS, faults=FAULTS)
def test_no_sample_twice_and_none_left_out_in_many(job: Job, replicas: int, faults: list[Fault]) -> None:
    check(job, replicas, faults)


def check(job: Job, replicas: int, faults: list[Fault]) -> None:
    whole = job.loader(0, 1, 0)
    want = [batch for _ in range(job.epochs) for batch in whole]
    living = {r: Replica(job, r, replicas, 0) for r in range(replicas)}
    found: list[list[int]] = []
    records = [[codec.pack(living[r].cursors.committed()) for r in range(replicas)]]
    try:
        for fault in [*faults, None]:
            steps = len(want) - len(found) if fault is None else min(fault.at, len(want) - len(found))
            for _ in range(steps):
                found.append([x for r in range(replicas) for x in next(living[r].batches)])
                records.append([codec.pack(living[r].cursors.committed()) for r in range(replicas)])
            if fault is None:
                break
            for r in fault.ahead & living.keys():
                next(living[r].batches, None)
            back = min(fault.back, len(records) - 1)
            found = found[: len(found) - back]
            records = records[: len(records) - back]
            living = recovered(job, living, fault, records[-1])
            replicas = fault.replicas
            # Committed again, as after every recovery.
            records[-1] = [codec.pack(living[r].cursors.committed()) for r in range(replicas)]
        assert found == want
        assert all(next(living[r].batches, None) is None for r in range(replicas))
    finally:
        for one in living.values():
            one.loader.close()


def recovered(job: Job, living: dict[int, Replica], fault: Fault, record: list[bytes]) -> dict[int, Replica]:
    """The world after a fault: survivors as what they are, newcomers with the record of another where there
    is none of their own.
    """
    world: dict[int, Replica] = {}
    for r in range(fault.replicas):
        survives = r in living and r not in fault.dead
        world[r] = living[r] if survives else Replica(job, r, fault.replicas, fault.workers)
        world[r].cursors.restore(codec.unpack(record[min(r, len(record) - 1)]))
        world[r].enter(r, fault.replicas)
    for r in living.keys() - {r for r, one in world.items() if one is living.get(r)}:
        living[r].loader.close()
    return world
