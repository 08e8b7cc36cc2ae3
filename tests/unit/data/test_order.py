"""The order: every sample once, evenly, and the same for any number of replicas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.data.order import (
    FEW,
    Batches,
    DataReplica,
    Permutation,
    PlainOrder,
    permutation,
    position_of,
)


@given(count=st.integers(0, 3 * FEW), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
def test_every_sample_once(count: int, seed: int, epoch: int) -> None:
    found = Permutation(count, seed, epoch).at(np.arange(count))
    assert np.array_equal(np.sort(found), np.arange(count))


@given(count=st.integers(FEW + 1, 2**62 - 1), place=st.integers(0, 2**62), seed=st.integers(0, 9))
def test_any_place_of_any_size_at_once(count: int, place: int, seed: int) -> None:
    found = Permutation(count, seed, 1).at(np.array([place % count]))
    assert 0 <= found[0] < count


@pytest.mark.parametrize("count", [2, 3, 5, 7, 12, FEW + 900])
def test_every_sample_is_everywhere_equally_often(count: int) -> None:
    """Chi-squared of the first 12 places in coarse bins, 6 standard deviations wide: it cannot flap."""
    places, rounds, bins = min(count, 12), 1000, min(count, 12)
    seen = np.zeros((places, bins))
    for epoch in range(rounds):
        found = permutation(count, 5, epoch).at(np.arange(places))
        seen[np.arange(places), found * bins // count] += 1
    shares = np.bincount(np.arange(count) * bins // count, minlength=bins) / count
    wanted = rounds * np.tile(shares, (places, 1))
    chi = float(((seen - wanted) ** 2 / wanted).sum())
    freedom = places * (bins - 1)
    assert chi < freedom + 6 * (2 * freedom) ** 0.5


def test_all_orders_of_four() -> None:
    seen = Counter(tuple(permutation(4, 0, epoch).at(np.arange(4)).tolist()) for epoch in range(4800))
    assert len(seen) == 24
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 23 + 6 * (2 * 23) ** 0.5


def test_the_order_is_fixed_for_good() -> None:
    """A job that is resumed by a later release must find the order it was begun with."""
    assert permutation(10, 0, 0).at(np.arange(10)).tolist() == SMALL
    assert permutation(10**9, 7, 3).at(np.arange(5)).tolist() == LARGE


@given(
    count=st.integers(1, 300),
    size=st.integers(1, 40),
    drop_last=st.booleans(),
    replicas=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_replicas_cut_up_the_same_batches(
    count: int, size: int, drop_last: bool, replicas: int, shuffle: bool
) -> None:
    batches, order = Batches(count, size, drop_last), PlainOrder(count, 3, shuffle)
    whole = []
    for batch in range(batches.number):
        parts = [batches.places(batch, DataReplica(r, replicas)) for r in range(replicas)]
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        alone = order.at(2, batches.places(batch, DataReplica())).tolist()
        assert [x for part in parts for x in order.at(2, part).tolist()] == alone
        whole += alone
    assert len(whole) == len(set(whole)) == (count // size * size if drop_last else count)


@given(st.integers(1, 300), st.integers(1, 40), st.booleans(), st.integers(1, 9))
def test_what_passes_the_check_leaves_nobody_empty(
    count: int, size: int, drop_last: bool, replicas: int
) -> None:
    batches = Batches(count, size, drop_last)
    least = min(
        (
            len(batches.places(b, DataReplica(r, replicas)))
            for b in range(batches.number)
            for r in range(replicas)
        ),
        default=0,
    )
    try:
        batches.check(DataReplica(0, replicas))
    except UsageError:
        assert least == 0
    else:
        assert least > 0


@pytest.mark.parametrize(("replica", "replicas"), [(-1, 2), (2, 2), (0, 0)])
def test_a_replica_that_is_none(replica: int, replicas: int) -> None:
    with pytest.raises(UsageError, match="replica"):
        DataReplica(replica, replicas)


BAD: list[Any] = [
    None,
    [],
    {"epoch": -1},
    {"batch": 1 << 40},
    {"skipped": -1},
    {"epoch": 1.5},
    {"epoch": "1"},
    {"more": 1},
]


@pytest.mark.parametrize("saved", BAD)
def test_a_position_that_is_none(saved: object) -> None:
    with pytest.raises(ProtocolError, match="position"):
        position_of(saved)


SMALL = [0, 9, 3, 7, 8, 1, 4, 6, 5, 2]
LARGE = [468543846, 676630646, 648798158, 6194202, 168164850]
