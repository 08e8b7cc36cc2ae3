"""Parts of a tensor as boxes in the whole, and what a new part is made of. Pure.

A rank's part of a DTensor is a box: where it begins in the whole in each dimension, and its shape. A new part
is put together from those parts of another number of ranks that it overlaps, and takes no element twice.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from ckptless.daemon.protocol.errors import ProtocolError


class Box(NamedTuple):
    """A part of a whole: where it begins, and its shape, both with a number for each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements; of a scalar 1."""
        return math.prod(self.shape)


class Take(NamedTuple):
    """A box in the whole that is taken of one part, which has this number."""

    part: int
    box: Box


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


def takes(wanted: Box, parts: Iterable[tuple[int, Box]]) -> list[Take]:
    """Return what a box is made of: each element once, from the first of these parts that has it.

    Raises ProtocolError where no part has some of it.
    """
    found: list[Take] = []
    left = [wanted] if wanted.numel else []
    for number, part in parts:
        if not left:
            break
        rest: list[Box] = []
        for box in left:
            common = overlap(box, part)
            if common is None:
                rest.append(box)
                continue
            found.append(Take(number, common))
            rest += without(box, common)
        left = rest
    if left:
        raise ProtocolError(f"no part has the elements from {left[0].start} on, {left[0].shape} of them")
    return found


def _with(start: list[int], shape: list[int], dimension: int, first: int, number: int) -> Box:
    begins, counts = [*start], [*shape]
    begins[dimension], counts[dimension] = first, number
    return Box(tuple(begins), tuple(counts))
