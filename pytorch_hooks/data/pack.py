"""Packing: documents of any length, tokenized, into sequences of one length, with random access.

Which documents share a sequence must not depend on who packs, or when. So the documents are put into a
shuffled order once (by the seed, the same in all epochs) and cut into *blocks* of a fixed number; each block
is packed by itself, and what does not fill its last sequence is padded (or left out). How many sequences a
block makes is counted once, by running the transform over all documents, and kept in the cache. From then on
the sequences are samples like any others: the n-th of an epoch is found without looking at those before, and
no remainder has to be carried in the position. In each epoch the blocks come in a new order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptless.daemon.protocol.errors import BadRecordError, UsageError
from ckptless.pytorch_hooks.data.order import Indices, permutation

# Keys of permutations, so that none is another's.
_DOCUMENTS, _BLOCKS = -1, -2

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pack:
    """Pack token lists, which `transform` returns, into sequences of `length` tokens.

    A sample is then {"tokens": int64 [length], "document": int64 [length]}: `document` numbers the documents
    in the block from 0, so that attention can be kept within one, and is -1 where there is padding.
    `separator` is put behind each document; a document longer than a sequence goes on in the next one.
    `block`: so many documents are packed together; fewer waste more padding, many cost memory. `tail`: "pad"
    the last sequence of a block with `padding`, or "drop" it.
    """

    length: int
    separator: int | None = None
    padding: int = 0
    block: int = 128
    tail: str = "pad"

    def __post_init__(self) -> None:
        if self.length < 1 or self.block < 1:
            raise UsageError("a Pack's length and block must be 1 or more")
        if self.tail not in ("pad", "drop"):
            raise UsageError(f"a Pack's tail must be 'pad' or 'drop', not {self.tail!r}")

    def rows(self, tokens: int) -> int:
        """Return how many sequences so many tokens make."""
        return tokens // self.length if self.tail == "drop" else -(-tokens // self.length)


def tokens_of(value: Any, where: str) -> Indices:
    """A transform's result as tokens. Raises BadRecordError where it is no list of integers."""
    try:
        found = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise BadRecordError(f"{where}: the transform gave no list of tokens: {error}") from error
    if found.size == 0:
        return np.empty(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise BadRecordError(
            f"{where}: with pack the transform must give a list of integers, not {type(value).__name__}"
        )
    return found.astype(np.int64)


def pack(documents: Iterable[Indices], how: Pack) -> list[dict[str, Indices]]:
    """Pack one block."""
    parts, owners = [], []
    for number, tokens in enumerate(documents):
        whole = tokens if how.separator is None else np.append(tokens, how.separator)
        parts.append(whole)
        owners.append(np.full(len(whole), number, dtype=np.int64))
    stream = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    owner = np.concatenate(owners) if owners else stream
    count = how.rows(len(stream))
    if not count:
        return []
    missing = max(0, count * how.length - len(stream))
    stream = np.append(stream, np.full(missing, how.padding, dtype=np.int64))[: count * how.length]
    owner = np.append(owner, np.full(missing, -1, dtype=np.int64))[: count * how.length]
    return [
        {"tokens": t.copy(), "document": d.copy()}
        for t, d in zip(stream.reshape(count, -1), owner.reshape(count, -1), strict=True)
    ]


class PackedOrder:
    """The order of packed sequences: sample numbers are those of all blocks' sequences in a row.

    `firsts`: the number of each block's first sequence, and one more: of all.
    """

    def __init__(self, firsts: Rows, seed: int, *, shuffle: bool) -> None:
        self._firsts, self._seed, self._shuffle = firsts, seed, shuffle
        self.count = int(firsts[-1])
        self._epoch = -1
        self._blocks = self._ends = firsts[:0]

    def at(self, epoch: int, places: Indices) -> Indices:
        """The samples at these places."""
        if not self._shuffle:
            return places
        if epoch != self._epoch:
            # The blocks in this epoch's order, and how many sequences have gone by after each.
            count = len(self._firsts) - 1
            self._blocks = permutation(count, self._seed, _BLOCKS, epoch).at(np.arange(count))
            self._ends = np.cumsum(np.diff(self._firsts)[self._blocks])
            self._epoch = epoch
        turn = np.searchsorted(self._ends, places, side="right")
        block = self._blocks[turn]
        return self._firsts[block + 1] - self._ends[turn] + places

    def find(self, sample: int) -> tuple[int, int, int]:
        """The block of a sample, which of its sequences it is, and how many it has."""
        block = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        first = int(self._firsts[block])
        return block, sample - first, int(self._firsts[block + 1]) - first


def documents_of(block: int, count: int, how: Pack, seed: int, *, shuffle: bool) -> Indices:
    """Return which of `count` documents are in a block."""
    places = np.arange(block * how.block, min((block + 1) * how.block, count), dtype=np.int64)
    return permutation(count, seed, _DOCUMENTS).at(places) if shuffle else places


def blocks(count: int, how: Pack) -> int:
    """Return how many blocks so many documents make."""
    return -(-count // how.block)
