"""A tensor cut for one number of ranks is put together for another: each element once, whatever the cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.pytorch_hooks.elastic.boxes import Box, overlap, take, whole, without


def cells(box: Box) -> set[tuple[int, ...]]:
    """The places of its elements in the whole."""
    return set(itertools.product(*(range(b, b + n) for b, n in zip(*box, strict=True))))


def takes(wanted: Box, parts: Iterable[tuple[int, Box]]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """What a box takes of each part in turn, and what is left of it then."""
    found, left = [], [wanted] if math.prod(wanted.shape) else []
    for number, part in parts:
        boxes, left = take(left, part)
        found += [(number, box) for box in boxes]
    return found, left


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 6), max_size=3)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts, counts = [], []
    for n in shape:
        start = draw(st.integers(0, n))
        starts.append(start)
        counts.append(draw(st.integers(0, n - start)))
    return Box(tuple(starts), tuple(counts))


def cut(shape: tuple[int, ...], bounds: list[list[int]]) -> Iterator[Box]:
    """Cut a whole at these places in each dimension."""
    edges = [sorted({0, n, *(b for b in inner if b < n)}) for n, inner in zip(shape, bounds, strict=True)]
    sides = [list(itertools.pairwise(edge)) or [(0, 0)] for edge in edges]
    for sides_of_one in itertools.product(*sides):
        yield Box(tuple(a for a, _ in sides_of_one), tuple(b - a for a, b in sides_of_one))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    bounds = [draw(st.lists(st.integers(0, 6), max_size=3)) for _ in shape]
    parts = list(cut(shape, bounds))
    # Replicas of some, in any order.
    return draw(st.permutations(parts + draw(st.lists(st.sampled_from(parts), max_size=3))))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_left_and_what_is_cut_are_the_whole(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = overlap(one, other)
    assert (cells(common) if common is not None else set()) == cells(one) & cells(other)
    if common is not None:
        left = without(one, common)
        assert sum(math.prod(box.shape) for box in left) == math.prod(one.shape) - math.prod(common.shape)
        assert set().union(*map(cells, left)) == cells(one) - cells(common)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_new_part_is_made_of_old_ones_and_takes_each_element_once(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    parts = list(enumerate(data.draw(cuts(shape))))
    wanted = data.draw(boxes(shape))
    found, left = takes(wanted, parts)
    assert not left
    assert sum(math.prod(box.shape) for _, box in found) == math.prod(wanted.shape)
    assert set().union(*(cells(box) for _, box in found)) == (
        cells(wanted) if math.prod(wanted.shape) else set()
    )
    for part, box in found:
        assert cells(box) <= cells(parts[part][1])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
def test_as_torch_cuts(rows: int, before: int, after: int) -> None:
    """As FSDP2 cuts a dimension, by torch.chunk: some parts shorter, some empty."""
    tensor = torch.arange(rows * 3).view(rows, 3)

    def parts(ranks: int) -> list[Box]:
        chunks, start, found = list(tensor.chunk(ranks)) if rows else [], 0, []
        for rank in range(ranks):
            count = len(chunks[rank]) if rank < len(chunks) else 0
            found.append(Box((start if count else 0, 0), (count, 3)))
            start += count
        return found

    old, numel = parts(before), 0
    for wanted in parts(after):
        for part, box in takes(wanted, enumerate(old))[0]:
            (start, _), (count, _) = box
            assert old[part].start[0] <= start
            assert start + count <= old[part].start[0] + old[part].shape[0]
            numel += math.prod(box.shape)
    assert numel == rows * 3


def test_a_scalar_is_whole() -> None:
    assert takes(whole(()), [(3, whole(()))]) == ([(3, whole(()))], [])


def test_what_nobody_has_is_left() -> None:
    assert takes(whole((4, 4)), [(0, Box((0, 0), (3, 4)))])[1] == [Box((3, 0), (1, 4))]
