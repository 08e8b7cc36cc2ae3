"""Parts of a tensor as boxes in the whole, and what a new part is made of. Pure.

A rank's part of a DTensor is a box: where it begins in the whole in each dimension, and its shape. A new part
is put together from those parts of another number of ranks that it overlaps, and takes no element twice.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a whole: where it begins, and its shape, both with a number for each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of it."""
    return Box((0,) * len(shape), shape)


def overlap(one: Box, other: Box) -> Box | None:
    """Return what lies in both, or None where nothing does."""
    start = tuple(map(max, one.start, other.start))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
    return Box(start, shape) if all(n > 0 for n in shape) else None


def without(box: Box, cut: Box) -> list[Box]:
    """Return what is left of a box when `cut`, which lies in it, is taken away: boxes that do not overlap."""
    left: list[Box] = []
    start, shape = list(box.start), list(box.shape)
    for dimension, (begin, count) in enumerate(zip(*cut, strict=True)):
        before = begin - start[dimension]
        after = start[dimension] + shape[dimension] - begin - count
        for first, number in ((start[dimension], before), (begin + count, after)):
            if number:
                left.append(_with(start, shape, dimension, first, number))
        start[dimension], shape[dimension] = begin, count
    return left


def take(wanted: Iterable[Box], part: Box) -> tuple[list[Box], list[Box]]:
    """Return what a part has of boxes that do not overlap, and what of them is left: neither overlaps."""
    found: list[Box] = []
    left: list[Box] = []
    for box in wanted:
        common = overlap(box, part)
        if common is None:
            left.append(box)
        else:
            found.append(common)
            left += without(box, common)
    return found, left


def _with(start: list[int], shape: list[int], dimension: int, first: int, number: int) -> Box:
    begins, counts = [*start], [*shape]
    begins[dimension], counts[dimension] = first, number
    return Box(tuple(begins), tuple(counts))
