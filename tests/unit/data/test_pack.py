"""Packing: every token in its place, whatever the order, the epoch and who packs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import DataError, UsageError
from ckptless.data import Cache, MappedLoader, Pack
from ckptless.pytorch_hooks.data import pack as packing
from ckptless.pytorch_hooks.data.pack import PackedOrder

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 16), st.sampled_from(["pad", "drop"]), st.sampled_from([None, -7]))
def test_a_block(lengths: list[int], length: int, tail: str, separator: int | None) -> None:
    how = Pack(length, separator=separator, padding=-9, tail=tail)
    documents = [np.full(n, number) for number, n in enumerate(lengths)]
    rows = packing.pack(documents, how)
    end = [] if separator is None else [separator]
    stream = [token for document in documents for token in [*document.tolist(), *end]]
    assert len(rows) == how.rows(len(stream))
    found = [token for row in rows for token in row["tokens"].tolist()]
    owners = [owner for row in rows for owner in row["document"].tolist()]
    assert all(len(row["tokens"]) == len(row["document"]) == length for row in rows)
    if tail == "pad":
        assert found == stream + [-9] * (len(found) - len(stream))
        assert len(found) - len(stream) < length
    else:
        assert found == stream[: len(found)]
        assert len(stream) - len(found) < length
    for token, owner in zip(found, owners, strict=True):
        assert token == owner or token in (-7, -9)
        assert (owner == -1) == (token == -9)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 5), st.booleans())
def test_every_sequence_once_in_every_epoch(counts: list[int], epoch: int, shuffle: bool) -> None:
    firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    packed = PackedOrder(firsts, 3, shuffle=shuffle)
    found = packed.at(epoch, np.arange(packed.count))
    assert np.array_equal(np.sort(found), np.arange(packed.count))
    every = [packed.find(sample) for sample in range(packed.count)]
    assert every == [(b, row, n) for b, n in enumerate(counts) for row in range(n)]
    # The sequences of a block stay together.
    owners = [block for block, _ in itertools.groupby(packed.find(int(s))[0] for s in found)]
    assert len(owners) == len(set(owners))


class Documents:
    """Document n is its number, 3n mod 17 times."""

    data_version = "1"

    def __init__(self, count: int, seen: list[int] | None = None) -> None:
        self.count, self._seen = count, seen

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if self._seen is not None:
            self._seen.append(index)
        return index


def tokens(number: int) -> list[int]:
    return [number] * (3 * number % 17)


def loader(tmp_path: Path, source: Any = None, **options: Any) -> MappedLoader:
    options = {"batch_size": 4, "seed": 2, "shuffle": True, "transform": tokens, **options}
    how = Pack(10, separator=-1, padding=-2, block=6)
    return MappedLoader(source or Documents(50), pack=how, cache=Cache(tmp_path / "cache"), **options)


def content(batches: Any) -> list[list[list[int]]]:
    return [batch["tokens"].tolist() for batch in batches]


def test_all_documents_in_every_epoch_and_the_same_for_any_workers(tmp_path: Path) -> None:
    alone = loader(tmp_path, workers=0)
    want = [content(alone) for _ in range(3)]
    assert want[0] != want[1]
    for epoch in want:
        flat = sorted(t for batch in epoch for row in batch for t in row if t != -2)
        assert flat == sorted([t for n in range(50) for t in tokens(n)] + [-1] * 50)
    for workers in (1, 3):
        many = loader(tmp_path / str(workers), workers=workers)
        assert [content(many) for _ in range(3)] == want
        many.close()


def test_a_position_needs_nothing_before_it(tmp_path: Path) -> None:
    first = loader(tmp_path, workers=0)
    batches = iter(first)
    for _ in range(7):
        next(batches)
    position = first.state_dict()
    assert position["position"]["batch"] == 7
    want = content(batches)
    seen: list[int] = []
    again = loader(tmp_path, Documents(50, seen), workers=0)
    again.load_state_dict(position)
    assert content(again) == want
    assert len(seen) < 50 - 7


def test_documents_are_counted_once(tmp_path: Path) -> None:
    seen: list[int] = []
    first = loader(tmp_path, Documents(50, seen), workers=0)
    assert len(first) == len(list(first))
    assert len(seen) == 100
    seen.clear()
    assert len(loader(tmp_path, Documents(50, seen), workers=0)) == len(first)
    assert not seen


def test_a_transform_that_is_not_the_same_twice(tmp_path: Path) -> None:
    class Moody:
        data_version = "1"
        more = 0

        def __call__(self, number: int) -> list[int]:
            return [number] * (5 + self.more)

    transform = Moody()
    moody = loader(tmp_path, transform=transform, workers=0)
    next(iter(moody))
    transform.more = 9
    with pytest.raises(DataError, match=r"made .* when they were counted: .*version="):
        list(moody)


def test_bad_documents(tmp_path: Path) -> None:
    def transform(number: int) -> Any:
        return tokens(number) if number % 10 != 3 else "text"

    with pytest.raises(DataError, match=r"sample [0-9]*3 of Documents.*list of integers, not str"):
        list(loader(tmp_path, transform=transform, workers=0))
    skipping = loader(tmp_path, transform=transform, workers=2, on_error="skip")
    found = content(skipping)
    assert {t for batch in found for row in batch for t in row} == {-2, -1} | {
        n for n in range(50) if tokens(n) and n % 10 != 3
    }
    assert skipping.skipped == 5
    skipping.close()


@pytest.mark.parametrize("wrong", [{"length": 0}, {"length": 3, "block": 0}, {"length": 3, "tail": "cut"}])
def test_a_pack_that_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Pack"):
        Pack(**wrong)
