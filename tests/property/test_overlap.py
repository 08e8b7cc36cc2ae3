"""Copies beside the training: whatever is written to while they run, what is sealed is what was committed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol import version
from ckptless.pytorch_hooks.commit import overlap
from ckptless.pytorch_hooks.commit.overlap import BesideTraining
from ckptless.pytorch_hooks.state import State, TensorSet, private, raw

# Several pieces, some with several tensors in them, and one tensor in several pieces.
SIZES = (5, 700, 3, 400, 1, 60)
PIECE_NBYTES = 1024


def some_bytes(chance: random.Random, tensors: list[torch.Tensor]) -> None:
    """Write to a few elements of one, by a way that torch does not count."""
    tensor = chance.choice(tensors)
    flat = tensor.data.view(-1)
    flat[chance.randrange(len(flat))] = chance.choice([0.0, 1.0, chance.random()])


def copied(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, bool]:
    """Return which tensor is said to have moved, and whether the copy is what was committed."""
    module = torch.nn.Module()
    for index, size in enumerate(SIZES):
        module.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(size)))
    living: list[Any] = list(module.parameters())
    tensors = TensorSet(State(model=module, optimizer=torch.optim.SGD(living, lr=0.1)))
    buffer = torch.zeros(tensors.layout.nbytes + 64, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64
    later = tensors.copies(buffer[start : start + tensors.layout.nbytes])
    assert all(one.by_update for one in later)
    wanted = [raw.to_bytes(one.source) for one in later]
    beside = BesideTraining(later)
    eager = chance.choice((0.0, 0.05, 0.5))
    real = private.copy_all

    def copy_all(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        """One by one, with somebody who writes in between."""
        for target, source in zip(targets, sources, strict=True):
            if chance.random() < eager:
                some_bytes(chance, living)
            real([target], [source])

    with monkeypatch.context() as patch:
        patch.setattr(private, "copy_all", copy_all)
        beside.complete(lambda _upto: None)
    return beside.moved, [raw.to_bytes(one.target) for one in later] == wanted


SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(chance=st.randoms(use_true_random=False))
def test_what_is_sealed_is_what_was_committed(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "PIECE_NBYTES", PIECE_NBYTES)
    moved, same = copied(chance, monkeypatch)
    assert (moved is None) == same


def test_a_copy_that_is_not_digested_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "PIECE_NBYTES", PIECE_NBYTES)
    monkeypatch.setattr(overlap, "_digest", lambda _tensors: 0)
    found = [copied(random.Random(seed), monkeypatch) for seed in range(100)]
    assert any(moved is None and not same for moved, same in found)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_chunks_are_digested_in_whatever_pieces_they_come(data: st.DataObject) -> None:
    payload = memoryview(os.urandom(data.draw(st.integers(0, 5 * version.PAGE_NBYTES))))
    digests = version.ChunkDigests(payload, version.PAGE_NBYTES)
    for upto in sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=6))):
        digests.came(upto)
    spans = version.spans(len(payload), version.PAGE_NBYTES)
    assert digests.finish() == tuple(version.digest_of(payload[start:end]) for start, end in spans)
