"""What another number of ranks has committed is taken out of agents' memory: the same bits, no byte twice."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any

import pytest
import torch

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import ProtocolError, RecoveryError, StateUnavailableError
from ckptless.daemon.protocol.limits import MOST_SPANS
from ckptless.pytorch_hooks.elastic import memory, recut
from ckptless.pytorch_hooks.elastic.memory import FormerStep
from ckptless.pytorch_hooks.state import TensorSet, read, restore
from ckptless.pytorch_hooks.state.twins import twins

from . import worlds

STEP, GENERATION = 7, 3


class FakeSession:
    """An agent that has what all former ranks have committed."""

    def __init__(self, former: list[worlds.Former]) -> None:
        self.former = former
        self.records: list[int] = []
        self.asked: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self.error: str | None = None
        self.lacks = 0

    def fetch_record(self, generation: int, rank: int) -> m.FetchedRecord:
        assert generation == GENERATION
        self.records.append(rank)
        return m.FetchedRecord(record=self.former[rank].record)

    def fetch_spans(
        self, generation: int, shard: int, layout: str, spans: tuple[tuple[int, int], ...]
    ) -> tuple[m.FetchedSpans, int | None]:
        assert generation == GENERATION
        assert layout == self.former[shard].layout
        assert 0 < len(spans) <= MOST_SPANS
        if self.error is not None:
            return m.FetchedSpans(error=self.error), None
        self.asked.append((shard, spans))
        payload = self.former[shard].payload.numpy()
        data = b"".join(payload[start : start + count].tobytes() for start, count in spans)[self.lacks :]
        fd = os.memfd_create("ckptless-test")
        os.write(fd, data)
        return m.FetchedSpans(nbytes=len(data)), fd

    @property
    def step(self) -> FormerStep:
        session: Any = self
        return FormerStep(session, GENERATION, STEP, tuple(one.shard for one in self.former))

    def assert_no_byte_twice(self) -> None:
        for shard in range(len(self.former)):
            spans = sorted(span for of, asked in self.asked if of == shard for span in asked)
            for (start, count), (following, _count) in itertools.pairwise(spans):
                assert start + count < following  # neighbours are asked for as one


def taken(session: FakeSession, kind: str, rank: int, world_size: int) -> tuple[int, int]:
    """Cut it for a rank of another world, and look at every bit; bytes fetched, and bytes that it has."""
    with worlds.rank_of(rank, world_size):
        state = worlds.built(kind, world_size, trained=False)
        tensors, alike = TensorSet(state), twins(state, rank, world_size)
        source = session.step
        found = recut.recut(source, rank, min(alike), tensors)
        assert found.of_rank == rank % len(session.former)
        assert (found.other is None) == (found.of_rank == rank or len(session.former) == 1)
        tensors.unpack(found.payload, found.layout)
        assert restore(found.record, state).step == STEP
        assert read(found.record).step == STEP
        assert tensors.layout.digest == found.layout.digest
        seen = 0
        for name, local, wanted in worlds.each(state):
            assert torch.equal(local, wanted), (name, rank, world_size)
            seen += 1
        assert seen
        return source.nbytes, worlds.smallest(tensors)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("ddp", (2, 3, 1)),
        ("fsdp", (4, 3, 5, 4)),
        ("fsdp", (1, 4)),
        ("hsdp", (4, 2, 4, 6)),
        ("columns", (4, 3, 5)),
    ],
)
def test_it_is_the_same_bits_whatever_the_sizes(kind: str, sizes: tuple[int, ...]) -> None:
    for before, after in itertools.pairwise(sizes):
        former = worlds.committed(kind, before, STEP)
        for rank in range(after):
            session = FakeSession(former)
            fetched, least = taken(session, kind, rank, after)
            session.assert_no_byte_twice()
            if kind != "columns":
                assert fetched <= 1.1 * least
            assert max(Counter(session.records).values()) == 1


def test_slices_are_small_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for at once, the bits are the same, and each byte comes once."""
    former = worlds.committed("fsdp", 3, STEP)
    plain = FakeSession(former)
    wanted = taken(plain, "fsdp", 1, 2)
    monkeypatch.setattr(recut, "SLICE_NBYTES", 200)
    monkeypatch.setattr(memory, "SLICE_NBYTES", 200)
    monkeypatch.setattr(memory, "MOST_SPANS", 2)
    session = FakeSession(former)
    assert taken(session, "fsdp", 1, 2) == wanted
    assert len(session.asked) > 20
    assert max(len(spans) for _shard, spans in session.asked) == 2
    assert max(sum(count for _, count in spans) for _shard, spans in session.asked) <= 200


def test_records_of_far_shards_are_not_asked_for() -> None:
    former = worlds.committed("fsdp", 12, STEP)
    for rank in range(11):
        session = FakeSession(former)
        taken(session, "fsdp", rank, 11)
        assert len(session.records) <= 3


def test_what_an_agent_has_not_is_an_error_that_may_pass() -> None:
    session = FakeSession(worlds.committed("fsdp", 2, STEP))
    session.error = "nobody has it"
    with pytest.raises(StateUnavailableError, match="former shard 0 are not to be had: nobody"):
        taken(session, "fsdp", 0, 1)
    session.error, session.lacks = None, 1
    with pytest.raises(StateUnavailableError, match="bytes came, and not"):
        taken(session, "fsdp", 0, 1)


def test_another_model_is_refused() -> None:
    with pytest.raises(RecoveryError, match="is not here"):
        taken(FakeSession(worlds.committed("fsdp", 2, STEP)), "columns", 0, 3)


def test_a_part_that_nobody_has_is_refused() -> None:
    former = worlds.committed("fsdp", 3, STEP)
    session = FakeSession(former[:2])
    with pytest.raises(ProtocolError, match="nobody has the elements of"):
        taken(session, "fsdp", 1, 2)
