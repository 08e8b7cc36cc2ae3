"""Restores a step into another number of ranks than it was committed by, wherever it is kept.

A rank reads the records of those shards that it takes something from, which say what each has, and of their
tensors the parts that it needs. It never holds more than its own part, and what the source gives at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ckptless.pytorch_hooks.elastic import cut as cutting
from ckptless.pytorch_hooks.elastic.boxes import Box, whole
from ckptless.pytorch_hooks.elastic.cut import NewCut, Taken
from ckptless.pytorch_hooks.state import Layout, TensorSet, raw, record
from ckptless.pytorch_hooks.state.layout import Entry
from ckptless.pytorch_hooks.state.record import Described

# What is copied out of a payload at once, in bytes: a row of a tensor may be more.
SLICE_NBYTES = 64 << 20

Room: TypeAlias = Callable[[int], torch.Tensor]
Span: TypeAlias = tuple[int, int]
"""Bytes of a payload: the first, and one after the last."""


class Source(Protocol):
    """A step that another number of ranks has committed: `shards[r]` is what former rank r had tensors of."""

    @property
    def step(self) -> int:
        """The step."""

    @property
    def shards(self) -> Sequence[int]:
        """One for each former rank; a shard's number is the lowest of the ranks that had it."""

    def record(self, rank: int) -> bytes:
        """Return a former rank's record, verified. Raises CkptlessError."""

    def read(
        self, shard: int, layout: Layout, spans: Sequence[Span], put: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Call `put(i, bytes)` for each of these parts of a shard's payload, verified (uint8, 1-D, CPU).

        `spans` ascend and do not overlap; the bytes are valid until `put` returns. Raises CkptlessError.
        """


@dataclass(frozen=True)
class Recut:
    """A rank's part of a step: its tensors, packed by `layout` (uint8, 1-D, CPU), and a record.

    The record is that of `of_rank`, which is this rank, or where so many did not commit, the one whose number
    is the same modulo theirs; then `other` is that of another rank, if there was one. `shards`: so many of
    them something was taken from.
    """

    step: int
    of_rank: int
    record: bytes
    other: bytes | None
    layout: Layout
    payload: torch.Tensor
    shards: int


def new_memory(nbytes: int) -> torch.Tensor:
    """Return so many bytes, all 0 (uint8, 1-D, CPU)."""
    return torch.zeros(nbytes, dtype=torch.uint8)


def recut(source: Source, rank: int, shard: int, tensors: TensorSet, room: Room = new_memory) -> Recut:
    """Return the part of a step that this rank has, with its twins, whose lowest is `shard`.

    What is no DTensor all twins take from the same former rank. `room(nbytes)` gives memory, all 0, to pack
    it into. Raises RecoveryError where it cannot be cut for what is built here, ProtocolError, and what the
    source raises.
    """
    former = len(source.shards)
    record_of = cache(source.record)
    described = cache(lambda number: record.describe(record_of(number)))
    first = source.shards[shard % former]
    new = cutting.cut(described(first), tensors)
    taken = cutting.sources(new, set(source.shards), first, described)
    taken = {number: boxes for number, boxes in taken.items() if boxes}
    payload = room(new.layout.nbytes)
    for number, boxes in sorted(taken.items()):
        _copy(source, number, described(number), _Target(new, payload), boxes)
    of_rank = rank % former
    another = 1 if of_rank == 0 else 0
    other = record_of(another) if of_rank != rank and another < former else None
    return Recut(source.step, of_rank, record_of(of_rank), other, new.layout, payload, len(taken))


# ------------------------------------------------------------------------------------- copying


class _Target(NamedTuple):
    new: NewCut
    payload: torch.Tensor


class _Piece(NamedTuple):
    """Boxes of one entry, in the whole, and the bytes of the payload that cover them."""

    entry: Entry
    boxes: list[Box]
    start: int
    end: int


def _copy(source: Source, shard: int, described: Described, target: _Target, taken: Taken) -> None:
    """Copy boxes out of a shard's payload into the new one."""
    parts = cutting.boxes_of(described)
    entries = {entry.name: entry for entry in target.new.layout.entries}
    pieces = [
        piece
        for entry in described.layout.entries
        for piece in _pieces(entry, taken.get(entry.name, []), parts.get(entry.name, whole(entry.shape)))
    ]

    def put(index: int, data: torch.Tensor) -> None:
        piece = pieces[index]
        name = piece.entry.name
        at, entry = parts.get(name, whole(piece.entry.shape)), entries[name]
        to = target.new.boxes.get(name, whole(entry.shape))
        for box in piece.boxes:
            here = _bytes_of(target.payload, 0, entry, _inside(box, to))
            here.copy_(_bytes_of(data, piece.start, piece.entry, _inside(box, at)))

    source.read(shard, described.layout, [(piece.start, piece.end) for piece in pieces], put)


def _pieces(entry: Entry, boxes: list[Box], part: Box) -> Iterator[_Piece]:
    """Cut what is taken of an entry into pieces that ascend, whose bytes do not overlap.

    They are cut between rows of the first dimension, all boxes at the same ones.
    """
    if not boxes:
        return
    row_nbytes = entry.nbytes // entry.shape[0] if entry.shape else entry.nbytes
    rows = max(1, SLICE_NBYTES // row_nbytes)
    blocks: dict[int, list[Box]] = {}
    for box in boxes:
        for block, slab in _slabs(box, part, rows):
            blocks.setdefault(block, []).append(slab)
    for _block, slabs in sorted(blocks.items()):
        spans = [_span(entry, _inside(slab, part)) for slab in slabs]
        yield _Piece(entry, slabs, min(start for start, _ in spans), max(end for _, end in spans))


def _slabs(box: Box, part: Box, rows: int) -> Iterator[tuple[int, Box]]:
    """Cut a box at every so many rows of the part that it lies in; each with its number."""
    if not box.start:
        yield 0, box
        return
    start, count = box.start[0] - part.start[0], box.shape[0]
    for block in range(start // rows, (start + count - 1) // rows + 1):
        begin, end = max(start, block * rows), min(start + count, (block + 1) * rows)
        slab = Box((part.start[0] + begin, *box.start[1:]), (end - begin, *box.shape[1:]))
        yield block, slab


def _inside(box: Box, part: Box) -> Box:
    """Return a box as counted from where its part begins."""
    return Box(tuple(a - b for a, b in zip(box.start, part.start, strict=True)), box.shape)


def _steps(entry: Entry) -> list[int]:
    """Return of each dimension how many bytes of the payload the next element lies behind one."""
    size = raw.DTYPES[entry.dtype].itemsize
    return list(accumulate(entry.shape[:0:-1], int.__mul__, initial=size))[::-1] if entry.shape else []


def _span(entry: Entry, box: Box) -> Span:
    """Return the bytes of the payload from a box's first element to its last."""
    steps = _steps(entry)
    start = entry.offset + sum(step * begin for step, begin in zip(steps, box.start, strict=True))
    last = start + sum(step * (count - 1) for step, count in zip(steps, box.shape, strict=True))
    return start, last + raw.DTYPES[entry.dtype].itemsize


def _bytes_of(data: torch.Tensor, begin: int, entry: Entry, box: Box) -> torch.Tensor:
    """Return the bytes of a box (its shape, and one dimension more) in those of a payload from `begin` on.

    As bytes, since in what was asked for they may lie anywhere.
    """
    steps, size = _steps(entry), raw.DTYPES[entry.dtype].itemsize
    start, _end = _span(entry, box)
    return data.as_strided((*box.shape, size), (*steps, 1), data.storage_offset() + start - begin)
