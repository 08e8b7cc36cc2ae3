"""Of every global batch each sample is one rank's, whatever their number, and weighs the same."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.data.order import Batches, DataReplica
from ckptless.pytorch_hooks.elastic import batches

worlds = st.integers(1, 48).flatmap(lambda ranks: st.tuples(st.integers(ranks, 20_000), st.just(ranks)))
DRAWN = settings(max_examples=2000, deadline=None)


@DRAWN
@given(worlds)
def test_parts_are_the_batch_in_the_order_of_ranks(world: tuple[int, int]) -> None:
    batch, ranks = world
    parts = [batches.part_of(batch, rank, ranks) for rank in range(ranks)]
    assert parts[0][0] == 0
    assert parts[-1][1] == batch
    assert all(one[1] == other[0] for one, other in pairwise(parts))
    counts = [batches.local_batch(batch, rank, ranks) for rank in range(ranks)]
    assert counts == [last - first for first, last in parts]
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1


@DRAWN
@given(worlds)
def test_weights_make_the_mean_of_means_the_mean_of_the_batch(world: tuple[int, int]) -> None:
    batch, ranks = world
    counts = [batches.local_batch(batch, rank, ranks) for rank in range(ranks)]
    weights = [batches.batch_weight(batch, rank, ranks) for rank in range(ranks)]
    # Of one sample: by its rank's weight, as one of the rank's samples and of all ranks.
    for count, weight in zip(counts, weights, strict=True):
        assert weight == pytest.approx(float(Fraction(count * ranks, batch)), rel=1e-15)
        assert weight / count / ranks == pytest.approx(1 / batch, rel=1e-12)
    assert sum(weights) / ranks == pytest.approx(1.0, rel=1e-12)
    if batch % ranks == 0:
        assert set(weights) == {1.0}


@DRAWN
@given(worlds, st.integers(1, 200))
def test_every_rank_makes_as_many_micro_batches(world: tuple[int, int], micro: int) -> None:
    batch, ranks = world
    number = batches.micro_batches(batch, micro, ranks)
    counts = {batches.local_batch(batch, rank, ranks) for rank in range(ranks)}
    for count in counts:
        pieces = [len(piece) for piece in torch.arange(count).tensor_split(number)]
        assert len(pieces) == number
        assert max(pieces) <= micro
        assert min(pieces) >= 1 or micro == 1
    # Fewer would be too large.
    assert (number - 1) * micro < max(counts)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 200))
def test_loaders_deal_them_so(ranks: int, size: int, count: int) -> None:
    dealt = Batches(count, size)
    for batch in range(dealt.number):
        places = [dealt.places(batch, DataReplica(rank, ranks)) for rank in range(ranks)]
        here = min(size, count - batch * size)
        assert np.concatenate(places).tolist() == list(range(batch * size, batch * size + here))
        assert [len(one) for one in places] == [
            batches.local_batch(here, rank, ranks) for rank in range(ranks)
        ]


def test_what_leaves_a_rank_without_samples_is_refused() -> None:
    batches.check(8, 8)
    with pytest.raises(UsageError, match="8 samples are not enough for 9"):
        batches.check(8, 9)
    with pytest.raises(UsageError, match="must be 1 or more"):
        batches.check(8, 2, 0)
    with pytest.raises(UsageError, match="must be 1 or more"):
        batches.check(0, 0)
