"""The cursor against an undisturbed run: no batch twice, none left out, whatever happens in between."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.cursor import Cursor, Cursors, Knows
from ckptless.pytorch_hooks.cursor import cursor as subject
from ckptless.pytorch_hooks.errors import CarriedError, GenerationEnded
from ckptless.pytorch_hooks.state import codec, rng

EPOCHS = 6
LENGTH = 5
TOTAL = EPOCHS * LENGTH
LOADERS = (
    "shuffled",
    "distributed",
    "stateful",
    "eager",
    "late",
    "own",
    "list",
    "generator",
    "half",
    "talking",
)

Step = tuple[list[float], float, float]


class Stateful:
    """A loader with torchdata's protocol: after `load_state_dict`, the next iterator goes on from there."""

    def __init__(self) -> None:
        self._epoch, self._index = 0, 0
        self._resume = False

    def set_epoch(self, epoch: int) -> None:
        if not self._resume:
            self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._index, self._resume = state["epoch"], state["index"], True

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        if not self._resume:
            self._index = 0
        self._resume = False
        order = random.Random(self._epoch).sample(range(LENGTH), LENGTH)
        while self._index < LENGTH:
            self._index += 1
            yield [torch.tensor([100.0 * self._epoch + order[self._index - 1]])]


class Eager(Stateful):
    """As torchdata's StatefulDataLoader: an iterator draws a seed as it is made."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        torch.empty((), dtype=torch.int64).random_()
        return super().__iter__()


class Own:
    """As StatefulDataLoader with a generator: it draws the order and a seed; its state has the order only."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(9)
        self._state: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        order = self._draw(self.generator.get_state(), 0)
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        if self._loaded:
            order = self._draw(self._loaded["begun"], self._loaded["index"])
            self._loaded = {}
        return self._rest(order)

    def _draw(self, begun: torch.Tensor, index: int) -> list[int]:
        self.generator.set_state(begun)
        self._state = {"begun": begun, "index": index}
        return torch.randperm(LENGTH, generator=self.generator).tolist()

    def _rest(self, order: list[int]) -> Iterator[list[torch.Tensor]]:
        while self._state["index"] < LENGTH:
            self._state["index"] += 1
            yield [torch.tensor([float(order[self._state["index"] - 1])])]


class Late(Stateful):
    """A generator, which does that with the first batch."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        torch.empty((), dtype=torch.int64).random_()
        yield from super().__iter__()


class Half(DataLoader[Any]):
    """As Accelerate's without a StatefulDataLoader inside: it has the methods, and they only raise."""

    def state_dict(self) -> Any:
        raise AttributeError("only of a StatefulDataLoader")

    def load_state_dict(self, state: Any) -> None:
        raise AttributeError("only of a StatefulDataLoader")


class Talking(DataLoader[Any]):
    """As it begins, all ranks' do something together; a generator, which does that with the first batch."""

    talks = 0

    def __iter__(self) -> Any:
        Talking.talks += 1
        yield from super().__iter__()


def talks() -> int:
    return Talking.talks


def build(kind: str) -> Any:
    """Return what a script's build does, random numbers of its own included."""
    torch.manual_seed(7)
    random.seed(3)
    torch.randn(3)
    data = TensorDataset(torch.arange(2.0 * LENGTH))
    match kind:
        case "shuffled":
            return DataLoader(data, batch_size=2, shuffle=True)
        case "distributed":
            return DataLoader(data, batch_size=1, sampler=DistributedSampler(data, num_replicas=2, rank=1))
        case "stateful" | "eager" | "late" | "own":
            return {"stateful": Stateful, "eager": Eager, "late": Late, "own": Own}[kind]()
        case "generator" | "half" | "talking":
            kinds: dict[str, Any] = {"generator": DataLoader, "half": Half, "talking": Talking}
            return kinds[kind](data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))
        case _:
            return [[torch.tensor([float(n)])] for n in range(LENGTH)]


def make_step(batch: Any) -> Step:
    """Return what a step makes of a batch; a forward pass draws random numbers too."""
    return [float(x) for x in batch[0]], torch.rand(1).item(), random.random()


@cache
def undisturbed(kind: str) -> list[Step]:
    loader, steps = build(kind), []
    for epoch in range(EPOCHS):
        for part in (loader, getattr(loader, "sampler", None)):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        steps += [make_step(batch) for batch in loader]
    assert len(steps) == TOTAL
    return steps


class Process:
    """One training process: its cursor, its loader, and the loop of its training function."""

    def __init__(self, kind: str, *, nested: bool) -> None:
        self.loader = build(kind)
        self.cursor = Cursor(talks)
        self._nested = nested
        self.enter()

    def enter(self) -> None:
        """The training function is called (again)."""
        self.batches = self._loop()

    def _loop(self) -> Iterator[Any]:
        if self._nested:
            for _ in range(self.cursor.position.epoch, EPOCHS):
                yield from self.cursor.batches(self.loader, 1)
        else:
            yield from self.cursor.batches(self.loader, EPOCHS - self.cursor.position.epoch)


class Record:
    """What is committed: position and random state, as bytes."""

    def __init__(self, done: int, cursor: Cursor) -> None:
        self.done = done
        self.cursor = codec.pack(cursor.committed(), name="cursor")
        self.rng = codec.pack(rng.capture(), name="rng")

    def restore(self, process: Process) -> None:
        rng.restore(codec.unpack(self.rng))
        process.cursor.restore(codec.unpack(self.cursor))
        process.enter()


class Life(RuleBasedStateMachine):
    """Any order of fetching, committing, being refused, going back, and being replaced."""

    @initialize(kind=st.sampled_from(LOADERS), nested=st.booleans())
    def begin(self, kind: str, nested: bool) -> None:
        self.kind, self.nested = kind, nested
        self.want = undisturbed(kind)
        self.process = Process(kind, nested=nested)
        self.done = 0
        self.records = [Record(0, self.process.cursor)]

    def _step(self) -> None:
        assert make_step(next(self.process.batches)) == self.want[self.done]
        self.done += 1

    @precondition(lambda self: self.done < TOTAL)
    @rule(count=st.integers(1, 7))
    def train(self, count: int) -> None:
        """Whole steps, each committed."""
        for _ in range(min(count, TOTAL - self.done)):
            self._step()
            self.commit()

    @precondition(lambda self: self.done < TOTAL)
    @rule(count=st.integers(1, 3))
    def fetch(self, count: int) -> None:
        """Steps without a commit, as with gradient accumulation, or before a fault."""
        for _ in range(min(count, TOTAL - self.done)):
            self._step()

    @rule()
    def commit(self) -> None:
        self.records = [*self.records, Record(self.done, self.process.cursor)][-3:]

    @rule()
    def refused(self) -> None:
        """The cursor gave its position for a commit that nobody took."""
        Record(self.done, self.process.cursor)

    @rule(back=st.integers(1, 3), replaced=st.booleans())
    def recover(self, back: int, replaced: bool) -> None:
        """To one of the last three records, in this process or a new one."""
        record = self.records[-min(back, len(self.records))]
        self.records = self.records[: self.records.index(record) + 1]
        if replaced:
            self.process = Process(self.kind, nested=self.nested)
        record.restore(self.process)
        self.done = record.done
        # As after every recovery: the restored step is committed again, by its old record.

    @precondition(lambda self: self.done == TOTAL)
    @rule()
    def end(self) -> None:
        assert next(self.process.batches, None) is None


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("at", [0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH])
@pytest.mark.parametrize("beyond", [0, 1, 2, LENGTH])
@pytest.mark.parametrize("replaced", [False, True])
def test_goes_on_where_it_was(kind: str, at: int, beyond: int, replaced: bool) -> None:
    process = Process(kind, nested=False)
    for _ in range(at):
        make_step(next(process.batches))
    record = Record(at, process.cursor)
    for _ in range(beyond):
        make_step(next(process.batches))
    if replaced:
        process = Process(kind, nested=False)
    record.restore(process)
    assert [make_step(batch) for batch in process.batches] == undisturbed(kind)[at:]


class Drawing(RandomSampler):
    """A sampler that draws from the process's generator for each sample."""

    def __iter__(self) -> Iterator[int]:
        return (int(random.random() * 10) for _ in range(10))


@pytest.mark.parametrize("drawing", [False, True])
def test_fetching_may_draw(drawing: bool) -> None:
    def begun() -> tuple[Cursor, Any]:
        torch.manual_seed(7)
        random.seed(3)
        data = TensorDataset(torch.arange(10.0))
        sampler = Drawing(data) if drawing else RandomSampler(data)
        ahead: dict[str, Any] = {} if drawing else {"num_workers": 1, "prefetch_factor": 1}
        return Cursor(), DataLoader(data, batch_size=2, sampler=sampler, **ahead)

    cursor, loader = begun()
    want = [make_step(batch) for batch in cursor.batches(loader, 2)]
    cursor, loader = begun()
    batches = cursor.batches(loader, 2)
    found = [make_step(next(batches)) for _ in range(2)]
    record = rng.capture(), cursor.committed()
    for _ in range(2):
        make_step(next(batches))
    rng.restore(record[0])
    cursor.restore(record[1])
    assert [*found, *(make_step(batch) for batch in cursor.batches(loader, 2))] == want


def test_a_sampler_that_draws_ahead_for_workers_is_refused() -> None:
    data = TensorDataset(torch.arange(10.0))
    loader = DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=1, sampler=Drawing(data))
    with pytest.raises(UsageError, match="for batches that its workers make ahead"):
        list(Cursor().batches(loader, 1))


class Augmented(Dataset[torch.Tensor]):
    """Draws with each fetch from all the process's generators, now and then to some effect; and counts."""

    def __init__(self, counts: bool) -> None:
        self.counts, self.count = counts, 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += self.counts
        drawn = max(0.0, torch.rand(()).item() + random.random() + np.random.random() - 1.5)
        return torch.tensor([index + drawn + 100 * self.count])


class GoesOn(torch.utils.data.Sampler[int]):
    """Each epoch's order is made of the last one's."""

    def __init__(self, by: str) -> None:
        self.by, self.epoch, self.order = by, 0, list(range(10))
        self.python, self.numpy = random.Random(4), np.random.default_rng(5)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        if self.by == "counting":
            self.order = random.Random(self.epoch).sample(range(10), 10)
        elif self.by == "python":
            self.python.shuffle(self.order)
        elif self.by == "numpy":
            self.order = self.numpy.permutation(10).tolist()
        elif self.by == "rotating":
            self.order.append(self.order.pop(0))
        yield from list(self.order)


@pytest.mark.parametrize("at", [2, 5, 6, 8, 10, 14])
@pytest.mark.parametrize("by", ["counting", "python", "numpy", "rotating", "counted"])
def test_an_order_that_goes_on_from_epoch_to_epoch(by: str, at: int) -> None:
    def begun() -> DataLoader[torch.Tensor]:
        return DataLoader(Augmented(by == "counted"), batch_size=2, sampler=GoesOn(by))

    def trained(cursor: Cursor, loader: Any, epochs: int, upto: int = 99) -> list[Step]:
        batches = cursor.batches(loader, epochs)
        return [make_step([batch]) for _, batch in zip(range(upto), batches, strict=False)]

    seed()
    want = trained(Cursor(), begun(), 3)
    seed()
    cursor, loader = Cursor(), begun()
    found = trained(cursor, loader, 3, at)
    record = rng.capture(), codec.decode(codec.encode(cursor.committed()))
    left = 3 - record[1]["epoch"]
    trained(cursor, loader, left, 2)
    for one, of in ((cursor, loader), (Cursor(), begun())):
        random.seed(77)
        rng.restore(record[0])
        one.restore(record[1])
        assert [*found, *trained(one, of, left)] == want


def seed() -> None:
    torch.manual_seed(7)
    random.seed(3)
    np.random.seed(2)


def test_what_changes_in_a_loader_and_cannot_be_kept_is_told_of() -> None:
    told: list[str] = []
    sampler: Any = GoesOn("none")
    loader = DataLoader(Augmented(False), batch_size=5, sampler=sampler)
    cursor = Cursor(tell=told.append)
    for _batch in cursor.batches(loader, 2):
        cursor.committed()
    assert not told
    sampler.order = [*sampler.order, *range(100_000)]
    next(cursor.batches(loader, 1))
    assert told[0].startswith("sampler.order of the loader changes from epoch to epoch, and is too large")


def test_what_a_sampler_changes_at_its_end_is_not_the_script_s() -> None:
    """As accelerate's does, which goes on to its next epoch; a loop may end an epoch before it commits."""

    class Counts(Sampler[int]):
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            self.epoch += 1

    told: list[str] = []
    cursor = Cursor(tell=told.append)
    loader = DataLoader(Augmented(False), batch_size=2, sampler=Counts())
    for _ in range(3):
        batches = cursor.batches(loader, 1)
        next(batches)
        cursor.committed()
        assert len([*batches]) == 1
        cursor.committed()
    assert not told


def test_what_the_script_changes_in_a_loader_is_told_of() -> None:
    told: list[str] = []
    weights = [1.0]
    data: Any = Augmented(True)
    data.level, data.weights = 0.0, weights
    cursor = Cursor(shared=lambda: {id(weights)}, tell=told.append)
    for step, _batch in enumerate(cursor.batches(DataLoader(data, batch_size=2), 1)):
        weights[0] += 1.0
        data.level += float(step > 1)
        cursor.committed()
        assert bool(told) == (step > 1)
    assert told[0].startswith("dataset.level of the loader is changed by the script between two batches")


@pytest.mark.parametrize("kind", ["weights", "indices"])
@pytest.mark.parametrize("at", [0, 2, 3, 4, 6, 8])
def test_what_the_script_sets_in_torchs_own_samplers(kind: str, at: int) -> None:
    """For each epoch, as importance sampling and hard examples do; in an epoch's middle by a later model."""

    def made() -> DataLoader[Any]:
        if kind == "indices":
            return DataLoader(Subset(TensorDataset(torch.arange(8.0)), [0, 1, 2]), 1)
        return DataLoader(TensorDataset(torch.arange(8.0)), 1, sampler=WeightedRandomSampler([1.0] * 8, 3))

    def train(cursor: Cursor, loader: Any, end: int) -> list[list[float]]:
        found: list[list[float]] = []
        for epoch in range(cursor.position.epoch, 3):
            first = 2 * epoch if not (epoch and cursor.position.index) else 3
            if kind == "indices":
                loader.dataset.indices = [first, first + 1, 7]
            else:
                loader.sampler.weights[:] = 0.0
                loader.sampler.weights[first : first + 2] = 1.0
            for (x,) in cursor.batches(loader, 1):
                found.append(x.tolist())
                cursor.committed()
                if len(found) == end:
                    return found
        return found

    torch.manual_seed(3)
    want = train(Cursor(), made(), 99)
    torch.manual_seed(3)
    cursor = Cursor()
    begun = train(cursor, made(), at) if at else []
    saved, drawn = codec.unpack(codec.pack(cursor.committed())), rng.capture()
    again = Cursor()
    again.restore(saved)
    rng.restore(drawn)
    assert begun + train(again, made(), 99) == want


@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_a_generator_that_the_state_has_too(at: int) -> None:
    """The loader shuffles by it, and the training draws from it: a new process has what was committed."""

    def run(fault: int) -> list[Step]:
        made = torch.Generator().manual_seed(7)
        cursor, done = Cursor(shared=lambda: {id(made)}), list[Step]()
        while len(done) < 8:
            loader = DataLoader(TensorDataset(torch.arange(4.0)), 1, shuffle=True, generator=made)
            for (x,) in cursor.batches(loader, 2, 0):
                done.append((x.tolist(), float(torch.rand((), generator=made)), 0.0))
                saved, state = codec.unpack(codec.pack(cursor.committed())), made.get_state()
                if len(done) == fault:
                    break
            made = torch.Generator().manual_seed(1)
            made.set_state(state)
            cursor = Cursor(shared=lambda made=made: {id(made)})  # type: ignore[misc]
            cursor.restore(saved)
        return done

    assert run(at) == run(0)


def test_loaders_with_generators_that_take_turns_under_one_name_are_told_of() -> None:
    told: list[str] = []
    cursor = Cursor(tell=told.append)
    held = [DataLoader(Augmented(False), generator=torch.Generator()) for _ in range(2)]
    for loader, count in ((held[0], 0), (held[0], 0), (held[1], 0), (held[0], 1)):
        assert len([*cursor.batches(loader)]) == len(loader)
        assert len(told) == count
    assert told[0].startswith("loaders take turns under one name, and one has a generator of its own")


def test_a_loader_that_is_made_anew_for_each_epoch_is_not_told_of() -> None:
    told: list[str] = []
    cursor = Cursor(tell=told.append)
    for epoch in range(4):
        made = torch.Generator().manual_seed(epoch)
        assert [*cursor.batches(DataLoader(Augmented(False), shuffle=True, generator=made))]
    assert not told


class Noisy(Dataset[torch.Tensor]):
    """A dataset that draws normal deviates, of which both generators make two at once and keep one."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.gauss(0, 1), np.random.standard_normal()], dtype=torch.float64)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("drawn_by_step", [1, 2])
def test_kept_deviates_are_repeated(batch_size: int, drawn_by_step: int) -> None:
    """What is kept is moved by each batch and each step, or by one of them, or by none."""

    def begun() -> tuple[Cursor, Any]:
        random.seed(3)
        np.random.seed(3)
        return Cursor(), DataLoader(Noisy(), batch_size=batch_size)

    def step(batch: torch.Tensor) -> tuple[str, str]:
        drawn = [(random.gauss(0, 1), float(np.random.standard_normal())) for _ in range(drawn_by_step)]
        return repr(batch.tolist()), repr(drawn)

    cursor, loader = begun()
    want = [step(batch) for batch in cursor.batches(loader, 2)]
    for steps, beyond in ((1, 1), (1, 2), (2, 1), (3, 1)):
        cursor, loader = begun()
        batches = cursor.batches(loader, 2)
        found = [step(next(batches)) for _ in range(steps)]
        record = codec.pack(rng.capture()), codec.pack(cursor.committed())
        for _ in range(beyond):
            step(next(batches))
        random.gauss(0, 1)
        np.random.standard_normal()
        rng.restore(codec.unpack(record[0]))
        cursor.restore(codec.unpack(record[1]))
        assert [*found, *(step(batch) for batch in cursor.batches(loader, 2))] == want


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "distributed", "stateful"])
def test_a_commit_between_two_epochs(kind: str, replaced: bool) -> None:
    """As a script does that evaluates and commits after each epoch."""
    process = Process(kind, nested=False)
    steps = [make_step(batch) for batch in process.cursor.batches(process.loader, 1)]
    record = Record(len(steps), process.cursor)
    process.enter()
    for _ in range(2):
        make_step(next(process.batches))
    if replaced:
        process = Process(kind, nested=False)
    record.restore(process)
    assert process.cursor.position.epoch == 1
    steps += [make_step(batch) for batch in process.batches]
    assert steps == undisturbed(kind)


@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 9])
@pytest.mark.parametrize("beyond", [0, 1, 5])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_sampler_whose_epochs_the_script_counts(first: int, at: int, beyond: int, replaced: bool) -> None:
    """From whichever number on: the order is that of the script's own loop."""

    def made() -> DataLoader[int]:
        numbers: Any = list(range(20))
        sampler: Any = DistributedSampler(numbers, num_replicas=2, rank=1, shuffle=True, seed=4)
        return DataLoader(numbers, batch_size=2, sampler=sampler)

    def train(cursor: Cursor, loader: Any, end: int) -> list[list[int]]:
        found: list[list[int]] = []
        for epoch in range(cursor.position.epoch, 3):
            loader.sampler.set_epoch(first + epoch)
            for batch in cursor.batches(loader, 1):
                found.append(batch.tolist())
                if len(found) == end:
                    return found
        return found

    plain, want = made(), []
    for epoch in range(3):
        plain.sampler.set_epoch(first + epoch)  # type: ignore[attr-defined]
        want += [batch.tolist() for batch in plain]
    cursor, loader = Cursor(), made()
    train(cursor, loader, at) if at else None
    record = codec.pack(cursor.committed())
    train(cursor, loader, beyond) if beyond else None
    if replaced:
        cursor, loader = Cursor(), made()
    cursor.restore(codec.unpack(record))
    assert train(cursor, loader, 99) == want[at:]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("at", [0, 1, 3, 4, 6, 8])
@pytest.mark.parametrize("beyond", [0, 1, 4])
@pytest.mark.parametrize("replaced", [False, True])
def test_epochs_that_are_cut_short(kind: str, at: int, beyond: int, replaced: bool) -> None:
    """After three batches each: as if they had no more, wherever a fault comes."""

    def cut(process: Process, begin: int, end: int) -> list[Any]:
        found = []
        batches = process.cursor.batches(process.loader, 1)
        for number in range(begin, end):
            found.append(make_step(next(batches)))
            if number % 3 == 2:
                process.cursor.end_epoch()
                batches = process.cursor.batches(process.loader, 1)
        return found

    want = cut(Process(kind, nested=False), 0, 9)
    process = Process(kind, nested=False)
    cut(process, 0, at)
    record = Record(at, process.cursor)
    cut(process, at, at + beyond)
    if replaced:
        process = Process(kind, nested=False)
    record.restore(process)
    assert cut(process, at, 9) == want[at:]


@pytest.mark.parametrize("at", [0, 1, LENGTH - 1, LENGTH, LENGTH + 1])
@pytest.mark.parametrize("beyond", [0, 1, 2])
def test_a_loader_that_talks_does_so_as_often_in_every_process(at: int, beyond: int) -> None:
    """Whatever a survivor has in its hands: a new process talks from the begin of the epoch on."""
    records, survivor = [], Process("talking", nested=True)
    for done in range(at + 1 + beyond):
        records.append(Record(done, survivor.cursor))
        make_step(next(survivor.batches))
    heard = []
    for process in (survivor, Process("talking", nested=True)):
        records[at].restore(process)
        before = talks()
        batches = [make_step(next(process.batches)) for _ in range(LENGTH)]
        assert batches == undisturbed("talking")[at : at + LENGTH]
        heard.append(talks() - before)
    assert heard[0] == heard[1]


def test_a_loader_that_has_become_shorter_is_named() -> None:
    process = Process("shuffled", nested=False)
    for _ in range(4):
        next(process.batches)
    record = Record(4, process.cursor)
    process = Process("shuffled", nested=False)
    process.loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, shuffle=True)
    record.restore(process)
    with pytest.raises(ProtocolError, match="ended after 2 batches"):
        next(process.batches)


@pytest.mark.parametrize("saved", [None, 3, {"epoch": "one"}, {"epoch": 0, "index": 0, "extra": 1}])
def test_a_position_that_is_none(saved: object) -> None:
    with pytest.raises(ProtocolError, match="data position"):
        Cursor().restore(saved)


def test_memory_of_batches_is_bounded() -> None:
    process = Process("list", nested=False)
    for _ in range(20):
        next(process.batches)
        process.cursor.committed()
    assert len(process.cursor._taken) <= 3


def test_two_loaders_side_by_side() -> None:
    """Each has its own position; one that was not begun at the commit begins anew."""

    def pairs(cursors: Cursors) -> Iterator[tuple[float, float]]:
        left, right = build("list"), build("list")
        for a, b in zip(cursors.batches(left, 2, "a"), cursors.batches(right, 9, "b"), strict=False):
            yield a[0].item(), b[0].item()

    want = list(pairs(Cursors()))
    assert want == [(n % LENGTH, n % LENGTH) for n in range(2 * LENGTH)]
    living = Cursors()
    batches = pairs(living)
    for _ in range(3):
        next(batches)
    saved = codec.unpack(codec.pack(living.committed()))
    again = Cursors()
    next(again.batches(build("list"), 1, "c"))
    again.restore(saved)
    assert list(pairs(again)) == want[3:]
    assert next(again.batches(build("list"), 1, "c"))[0].item() == 0


def test_positions_that_are_none() -> None:
    bad: list[Any] = [None, [], {"": {"epoch": "one"}}]
    for saved in bad:
        with pytest.raises(ProtocolError, match="data position"):
            Cursors().restore(saved)


class Failing:
    """A loader whose second batch cannot be made at the first try, of all that there are."""

    failed = False

    def __iter__(self) -> Iterator[int]:
        for number in range(LENGTH):
            if number == 1 and not Failing.failed:
                Failing.failed = True
                raise ValueError("a bad disk")
            yield number


def test_a_loader_that_has_raised_is_not_at_its_end() -> None:
    cursor, loader = Cursor(), Failing()
    batches = cursor.batches(loader, 1)
    assert next(batches) == 0
    saved = cursor.committed()
    with pytest.raises(ValueError, match="a bad disk"):
        next(batches)
    cursor.restore(saved)
    assert list(cursor.batches(loader, 1)) == list(range(1, LENGTH))


def test_a_batch_that_came_and_was_not_taken_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a generation may come as an exception while the position is moved behind a batch."""
    cursor, loader = Cursor(), DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2, shuffle=True)
    torch.manual_seed(5)
    wanted = [batch[0].tolist() for batch in Cursor().batches(loader, 1)]
    torch.manual_seed(5)
    batches = cursor.batches(loader, 1)
    assert [next(batches)[0].tolist() for _ in range(2)] == wanted[:2]
    saved, digest = cursor.committed(), subject._digest

    def ends(_batch: Any) -> int:
        raise GenerationEnded("generation 1 is over")

    monkeypatch.setattr(subject, "_digest", ends)
    with pytest.raises(GenerationEnded):
        next(batches)
    monkeypatch.setattr(subject, "_digest", digest)
    cursor.restore(saved)
    assert [batch[0].tolist() for batch in cursor.batches(loader, 1)] == wanted[2:]


def refused(**what: Any) -> str:
    loader = type("Loader", (Stateful,), what)()
    with pytest.raises(UsageError) as error:
        next(iter(Cursor().batches(loader, 1)))
    return str(error.value)


def test_loaders_that_do_not_go_on_from_their_state_are_refused_at_the_first_batch() -> None:
    assert "use_stateful_dataloader" in refused(use_stateful_dataloader=True)
    own = torch.Generator()
    sampler = RandomSampler(range(4), replacement=True, generator=own)
    assert "with replacement" in refused(generator=own, sampler=sampler)


def test_a_loader_that_draws_as_it_begins_and_with_its_batches_is_told_apart_or_refused() -> None:
    class Both(Late):
        def __iter__(self) -> Iterator[list[torch.Tensor]]:
            torch.rand(1)
            for batch in super().__iter__():
                torch.rand(1)
                yield batch

    one, other = Cursor(), Cursor()
    loader = Both()
    given = one.batches(loader, 1)
    next(given)
    saved = one.committed()
    other.restore(saved)
    again = other.batches(Both(), 1)
    next(again)
    with pytest.raises(UsageError, match="both as it begins and with its batches"):
        next(again)


def test_what_another_number_of_ranks_has_begun_stays_refused_after_a_commit() -> None:
    """The restored step is committed by these ranks before anybody asks for a batch: it is theirs then."""
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    first = Cursor()
    taken = first.batches(loader, 1)
    next(taken)
    saved = first.committed()
    recut = Cursor()
    recut.restore(saved, recut=True)
    again = Cursor()
    again.restore(recut.committed())
    for cursor in (recut, again):
        with pytest.raises(UsageError, match="in the middle of an epoch of another number of ranks"):
            next(cursor.batches(loader, 1))
    # At the begin of an epoch there is nothing to cut.
    begun = Cursor()
    begun.restore(Cursor().committed(), recut=True)
    assert len(list(begun.batches(loader, 1))) == 4


EPOCHS_OF = {
    "several at once": ((3, ""),),
    "one after the other, from the present one": None,
    "some, then others": ((2, ""), (2, "last"), (3, "more")),
    "two times several": ((2, ""), (3, "")),
}


@pytest.mark.parametrize("how", EPOCHS_OF)
@pytest.mark.parametrize("new", [False, True], ids=["living", "new process"])
def test_wherever_a_fault_comes_the_epochs_are_as_many(how: str, *, new: bool) -> None:
    def script(cursors: Cursors) -> Iterator[int]:
        """Take batches as a training function does each time that it is entered."""
        cursors.enter()
        calls = EPOCHS_OF[how]
        if calls is None:
            for _epoch in range(cursors.epoch, 3):
                yield from cursors.batches(loaders[""], 1, "")
            return
        for epochs, name in calls:
            yield from cursors.batches(loaders.setdefault(name, [10, 20, 30, 40]), epochs, name)

    loaders: dict[str, Any] = {"": [1, 2, 3]}
    want = list(script(Cursors()))
    for at in range(1, len(want) + 1):
        cursors, found = Cursors(), []
        for batch in script(cursors):
            found.append(batch)
            saved = cursors.committed()
            if len(found) == at:
                break
        if new:
            cursors = Cursors()
        cursors.restore(saved)
        assert [*found, *script(cursors)] == want, at


Script = Callable[[Cursors], Iterator[tuple[str, int]]]


NOTHING, STEP, EPOCH = Knows(epoch=False, step=False), Knows(epoch=False, step=True), Knows(True, step=False)


def warm_up(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """One loader after the other."""
    for name in ("warm", "", "late"):
        yield from ((name, batch) for batch in cursors.batches([1, 2, 3], 1, name, STEP))


def breaks_off(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """Leaves the first one before its end."""
    for batch in cursors.batches([1, 2, 3, 4], 1, "warm"):
        if batch >= 3:
            break
        yield "warm", batch
    yield from (("", batch) for batch in cursors.batches([1, 2, 3], 1, ""))


def alternating(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """In each epoch one, and then the other, by which it counts."""
    for _epoch in range(cursors.epoch, 3):
        for name in ("left", ""):
            yield from ((name, batch) for batch in cursors.batches([1, 2, 3], 1, name))


def side_by_side(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """One that is begun again whenever it ends, beside one that counts."""
    more = iter(cursors.batches([1, 2], 1, "more"))
    for _epoch in range(cursors.epoch, 3):
        for batch in cursors.batches([1, 2, 3], 1, ""):
            found = next(more, None)
            if found is None:
                more = iter(cursors.batches([1, 2], 1, "more"))
                found = next(more)
            yield "", 10 * batch + found


def commits_between(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """Knows of no epoch, and commits a step of its own behind each, as for an evaluation."""
    for _epoch in range(3):
        yield from (("", batch) for batch in cursors.batches([1, 2, 3], 1, "", NOTHING))
        yield BETWEEN


def knows_and_commits_between(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """The same, with two loaders, and it goes on from the epoch that it is in."""
    for _epoch in range(cursors.epoch, 3):
        for name in ("left", ""):
            yield from ((name, batch) for batch in cursors.batches([1, 2, 3], 1, name))
        yield BETWEEN


BETWEEN = ("between", 0)


def side_by_side_later(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """One that is asked for in the loop over the other, and gives a batch for every second of its."""
    more: Iterator[int] = iter(())
    for batch in cursors.batches([1, 2, 3, 4, 5, 6], 1, "main"):
        found = 0
        if batch % 2:
            while not (found := next(more, 0)):
                more = iter(cursors.batches([7, 8], 1, "more"))
        yield "", 10 * batch + found


def takes_turns(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """One of three for each step, by its number, each asked for when it is needed first."""
    loops: dict[str, Iterator[int]] = {}
    done = sum(position["index"] for position in cursors.committed().values())
    for step in range(done, 9):
        name = f"task {step % 3}"
        if name not in loops:
            loops[name] = cursors.batches([1, 2, 3, 4], 1, name, STEP)
        yield name, next(loops[name])


def another_behind(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """In each epoch the one by which it counts, and then two others."""
    for _epoch in range(cursors.epoch, 3):
        for name in ("", "right", "far"):
            yield from ((name, batch) for batch in cursors.batches([1, 2, 3], 1, name, EPOCH))


def by_a_function(cursors: Cursors) -> Iterator[tuple[str, int]]:
    def epoch(name: str, size: int) -> Iterator[tuple[str, int]]:
        yield from ((name, batch) for batch in cursors.batches(range(size), 1, name, EPOCH))

    for _epoch in range(cursors.epoch, 3):
        yield from epoch("", 3)
        yield from epoch("right", 2)


def one_at_last(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """Epochs, and another loader behind them."""
    for _epoch in range(cursors.epoch, 2):
        yield from (("", batch) for batch in cursors.batches([1, 2, 3], 1, "", EPOCH))
        yield BETWEEN
    yield from (("last", batch) for batch in cursors.batches([1, 2, 3], 1, "last", EPOCH))


def one_at_last_of_one(cursors: Cursors) -> Iterator[tuple[str, int]]:
    for _epoch in range(cursors.epoch, 1):
        yield from (("", batch) for batch in cursors.batches([1, 2, 3], 1, "", EPOCH))
    yield from (("last", batch) for batch in cursors.batches([1, 2, 3], 1, "last", EPOCH))


def every_second(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """Another one behind it in every second epoch."""
    for epoch in range(cursors.epoch, 4):
        yield from (("", batch) for batch in cursors.batches([1, 2, 3], 1, "", EPOCH))
        if epoch % 2:
            yield from (("right", batch) for batch in cursors.batches([1, 2, 3], 1, "right", EPOCH))


def all_have_names(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """No loader is without a name, so that `run.epoch` is 0."""
    yield from (("warm", batch) for batch in cursors.batches([1, 2, 3], 1, "warm", EPOCH))
    for _epoch in range(cursors.epoch, 3):
        for name in ("left", "right"):
            yield from ((name, batch) for batch in cursors.batches([1, 2, 3], 1, name, EPOCH))


def asks_nothing(cursors: Cursors) -> Iterator[tuple[str, int]]:
    for _epoch in range(3):
        for name in ("", "right"):
            yield from ((name, batch) for batch in cursors.batches([1, 2, 3], 1, name, NOTHING))


def asks_in_its_loops(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """Which epoch it is in, but not where the epochs begin."""
    knows = NOTHING
    for _epoch in range(3):
        for name in ("", "right"):
            for batch in cursors.batches([1, 2, 3], 1, name, knows):
                knows = EPOCH
                yield name, batch


def asks_nothing_of_the_first(cursors: Cursors) -> Iterator[tuple[str, int]]:
    for _epoch in range(3):
        for name in ("left", ""):
            yield from ((name, batch) for batch in cursors.batches([1, 2, 3], 1, name, NOTHING))


def chained(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """Asks for all before the first begins."""
    names = ("", "second", "third")
    loops = [((name, batch) for batch in cursors.batches([1, 2, 3], 1, name, STEP)) for name in names]
    yield from itertools.chain(*loops)


def ends_what_has_ended(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """Says so behind each epoch, though its loop has ended by itself."""
    for _epoch in range(cursors.epoch, 3):
        yield from (("", batch) for batch in cursors.batches([1, 2, 3], 1, "", EPOCH))
        cursors.end_epoch("")


def evaluates_a_little(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """By a loader that `run.batches` is not for, and with a commit behind it."""
    for _epoch in range(cursors.epoch, 3):
        yield from (("", batch) for batch in cursors.batches([1, 2, 3], 1, ""))
        next(cursors.batches([7, 8], 1, "each"), None)
        yield BETWEEN


def evaluates(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """At first, and behind each epoch, by a loader of which no batch is ever committed."""
    assert len(list(cursors.batches([7, 8], 1, "first"))) == 2
    for _epoch in range(cursors.epoch, 3):
        yield from (("", batch) for batch in cursors.batches([1, 2, 3], 1, ""))
        assert len(list(cursors.batches([7, 8], 1, "each"))) == 2
        yield BETWEEN


def stops_early(cursors: Cursors) -> Iterator[tuple[str, int]]:
    """Leaves the loop over epochs before its last one, and goes on to another loader."""
    for epoch in range(cursors.epoch, 9):
        yield from (("", batch) for batch in cursors.batches([1, 2], 1, ""))
        if epoch >= 2:
            break
    yield from (("fine", batch) for batch in cursors.batches([3, 4], 2, "fine"))


SCRIPTS = [
    another_behind,
    by_a_function,
    one_at_last,
    one_at_last_of_one,
    every_second,
    all_have_names,
    asks_nothing,
    asks_nothing_of_the_first,
    asks_in_its_loops,
    evaluates,
    evaluates_a_little,
    warm_up,
    breaks_off,
    chained,
    ends_what_has_ended,
    alternating,
    side_by_side,
    side_by_side_later,
    takes_turns,
    commits_between,
    knows_and_commits_between,
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("new", [False, True], ids=["living", "new process"])
def test_wherever_a_fault_comes_loops_that_are_over_are_not_done_again(script: Script, *, new: bool) -> None:
    """Two faults, after so many yields; nothing but what is done between epochs is done twice."""
    want = list(script(Cursors()))
    for places in itertools.combinations(range(1, len(want) + 1), 2):
        cursors, found = Cursors(), []
        for at in places:
            cursors.enter()
            for one in script(cursors):
                found.append(one)
                saved = codec.unpack(codec.pack(cursors.committed()))
                if len(found) == at:
                    break
            if new:
                cursors = Cursors()
            cursors.restore(saved)
        cursors.enter()
        found += script(cursors)
        assert [one for one in found if one != BETWEEN] == [one for one in want if one != BETWEEN], places


ZIPS: list[tuple[tuple[str, ...], tuple[int, ...], Knows]] = [
    (("left", "right"), (3, 3), EPOCH),
    (("", "right"), (3, 3), EPOCH),
    (("left", ""), (3, 3), NOTHING),
    (("", "right"), (2, 3), EPOCH),
    (("", "right"), (3, 2), EPOCH),
    (("left", "right"), (3, 2), NOTHING),
    (("left", "", "right"), (3, 2, 4), EPOCH),
]


@pytest.mark.parametrize(("names", "sizes", "knows"), ZIPS)
@pytest.mark.parametrize("how", ["zip", "zip, and a commit between epochs", "next"])
@pytest.mark.parametrize("new", [False, True], ids=["living", "new process"])
def test_loaders_side_by_side_begin_each_epoch_together(
    names: tuple[str, ...], sizes: tuple[int, ...], knows: Knows, how: str, *, new: bool
) -> None:
    """As those of torch, of whatever lengths: without a fault, and with two at any places."""
    lists = [[10 * number + n for n in range(size)] for number, size in enumerate(sizes)]
    end = object()

    def epoch(cursors: Cursors) -> Iterator[tuple[int, ...]]:
        found = [cursors.batches(batches, 1, name, knows) for name, batches in zip(names, lists, strict=True)]
        if how != "next":
            yield from zip(*found, strict=False)
            return
        for first in found[0]:
            others: list[Any] = [next(one, end) for one in found[1:]]
            if end in others:
                break
            yield first, *others

    def script(cursors: Cursors) -> Iterator[tuple[int, ...]]:
        cursors.enter()
        for _epoch in range(cursors.epoch if knows.epoch else 0, 3):
            for step in epoch(cursors):
                yield step
                cursors.committed()
            if "commit" in how:
                yield ()
                cursors.committed()

    want = 3 * list(zip(*lists, strict=False))
    count = len(list(script(Cursors())))
    for places in itertools.combinations(range(count), 2):
        cursors, found = Cursors(), []
        for at in places:
            for one in script(cursors):
                found.append(one)
                saved = codec.unpack(codec.pack(cursors.committed()))
                if len(found) > at:
                    break
            cursors = Cursors() if new else cursors
            cursors.restore(saved)
        found += script(cursors)
        assert [one for one in found if one] == want, places


def test_an_epoch_that_has_ended_is_not_ended_again() -> None:
    assert list(ends_what_has_ended(Cursors())) == 3 * [("", 1), ("", 2), ("", 3)]


def test_a_loop_over_epochs_that_was_left_before_its_last_one_is_over() -> None:
    """With no loop around the script, which pytest's own would be: by a thread, and functions in C."""
    found: list[list[tuple[tuple[str, int], Any]]] = []

    def train(cursors: Cursors, count: int) -> None:
        steps = map(lambda one: (one, codec.pack(cursors.committed())), stops_early(cursors))
        found.append(list(itertools.islice(steps, count)))

    def in_thread(cursors: Cursors, count: int = 99) -> list[tuple[tuple[str, int], Any]]:
        thread = threading.Thread(target=train, args=(cursors, count))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return found[-1]

    want = [one for one, _saved in in_thread(Cursors())]
    assert len(want) == 10
    for at in range(1, len(want)):
        before = in_thread(Cursors(), at)
        cursors = Cursors()
        cursors.restore(codec.unpack(before[-1][1]))
        assert [one for one, _saved in (*before, *in_thread(cursors))] == want, at


class Rows(Dataset[Any]):
    """Rows with a label each, or the very tensors that it has, which are the class's: no record has them."""

    def __init__(self, *, bare: bool = False) -> None:
        self.bare = bare
        Rows.rows = [torch.tensor([n, n + 1.0]) for n in range(20)]

    rows: list[torch.Tensor]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] if self.bare else {"x": self.rows[index], "y": index}


def changed(batch: Any) -> list[float]:
    """Return what is trained on, as scripts make it of a batch."""
    if isinstance(batch, dict):
        x, y = batch.pop("x").mul_(2), batch["y"].add_(1)
        return [*x.flatten().tolist(), *y.tolist()]
    return batch.mul_(2).flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_that_the_script_has_changed_is_given_as_it_was(workers: int, *, shuffle: bool) -> None:
    def run(cuts: set[int]) -> list[list[float]]:
        torch.manual_seed(1)
        cursor, loader = Cursor(), DataLoader(Rows(), batch_size=2, shuffle=shuffle, num_workers=workers)
        done: list[list[float]] = []
        saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        while len(done) < 10:
            for batch in cursor.batches(loader):
                found = changed(batch)
                if len(done) in cuts:
                    # This batch is not committed, nor the one before it.
                    cuts.remove(len(done))
                    done.pop()
                    break
                done.append(found)
                saved.append((cursor.committed(), rng.capture()))
            else:
                break
            position, drawn = saved[-2]
            cursor.restore(position)
            rng.restore(drawn)
        return done

    assert run({3, 7}) == run(set())


def test_a_batch_that_stays_changed_in_the_data_is_refused() -> None:
    cursor, loader = Cursor(), DataLoader(Rows(bare=True), batch_size=None)
    batches = cursor.batches(loader)
    next(batches)
    saved = cursor.committed()
    changed(next(batches))
    cursor.restore(saved)
    with pytest.raises(CarriedError, match="changes batches in place, and the loader gives them changed"):
        next(cursor.batches(loader))


@pytest.mark.parametrize("script", [another_behind, side_by_side, asks_nothing, all_have_names, warm_up])
def test_who_waits_for_the_loop_that_goes_on_is_told_before_its_first_batch(script: Script) -> None:
    want = list(script(Cursors()))
    for at in range(1, len(want)):
        cursors, told = Cursors(), list[str]()
        for number, _one in enumerate(script(cursors), 1):
            saved = codec.unpack(codec.pack(cursors.committed()))
            if number == at:
                break
        cursors = Cursors(goes_on=lambda told=told: told.append("goes on"))  # type: ignore[misc]
        cursors.restore(saved)
        cursors.enter()
        batches = script(cursors)
        assert told == []
        next(batches)
        # Maybe by each of those side by side.
        assert told


@pytest.mark.parametrize("calls", [(1, 2), (2, 1), (1, 1, 3)])
def test_single_epochs_and_several_of_one_loader_are_refused(calls: tuple[int, ...]) -> None:
    cursors = Cursors()
    for epochs in calls[:-1]:
        list(cursors.batches([1, 2], epochs, ""))
    with pytest.raises(CarriedError, match="nobody could tell which are over"):
        cursors.batches([1, 2], calls[-1], "")
    # Another one is another loop.
    assert len(list(cursors.batches([1, 2], calls[-1], "other"))) == 2 * calls[-1]


def test_another_number_of_epochs_after_a_fault_is_refused() -> None:
    """As who gives what `run.epoch` leaves: that would be counted from the begin, too."""
    cursors = Cursors()
    for epochs in (5, 2):
        list(cursors.batches([1, 2], epochs, ""))
    cursors.enter()
    list(cursors.batches([1, 2], 5, ""))
    with pytest.raises(CarriedError, match="for 2 epochs before a fault, and for 4 after it"):
        cursors.batches([1, 2], 4, "")
    # Of one epoch it is the rest of the present one.
    list(cursors.batches([1, 2], 1, "other"))
    cursors.enter()
    list(cursors.batches([1, 2], 1, "other"))
