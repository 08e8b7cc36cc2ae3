"""Copies of a commit that run beside the next step: in a thread, within the CPU's memory, never torn.

An optimizer's step waits for them (`Versions.fence`). Everything is digested when the copies begin, and what
has been copied is digested again: whoever wrote in between, and by whatever way, it is not the same, and that
version gets no header. A device's memory is not copied like this, since nothing digests it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import xxhash

from ckptless.pytorch_hooks.errors import StateMoved
from ckptless.pytorch_hooks.state import TensorCopy, private, raw

# Of one call, without the GIL: little enough that the cache still has it when it is digested.
PIECE_NBYTES = 1 << 20

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class BesideTraining:
    """The copies of one commit that a thread makes while the training goes on. Digests their sources at once.

    `moved`: the name of a tensor that was written to before it had been copied, once `complete` has returned.
    """

    def __init__(self, copies: Sequence[TensorCopy]) -> None:
        self._copies = copies
        self._digests = [_digest(source for _, source in pairs) for _, pairs in pieces(copies)]
        self._over = threading.Event()
        self.moved: str | None = None

    def complete(self, came: Callable[[int], None]) -> None:
        """Copy, piece by piece; `came(offset)` says that all before it is there. The copying thread."""
        try:
            for (begin, pairs), digest in zip(pieces(self._copies), self._digests, strict=True):
                came(begin)
                private.copy_all([target for target, _ in pairs], [source for _, source in pairs])
                if _digest(target for target, _ in pairs) != digest:
                    self.moved = next(one.name for one in reversed(self._copies) if one.offset <= begin)
                    return
        finally:
            self._over.set()

    def fence(self) -> None:
        """Wait until nothing is copied any more. Raises StateMoved. The thread that updates."""
        # no deadline: it takes as long as memory does
        self._over.wait()
        if self.moved is not None:
            raise StateMoved(self.moved)


def _digest(tensors: Iterable[torch.Tensor]) -> int:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        flat = raw.flat(tensor)  # the window keeps no memory alive
        found.update(raw.window(flat))
    return found.intdigest()


def pieces(copies: Sequence[TensorCopy]) -> Iterator[tuple[int, Pairs]]:
    """Give what to copy at a time: small tensors together, big ones in parts; each with where it begins."""
    begin, nbytes, pairs = 0, 0, Pairs()
    for one in copies:
        size = one.target.numel() * one.target.element_size()
        if pairs and nbytes + size > PIECE_NBYTES:
            yield begin, pairs
            nbytes, pairs = 0, Pairs()
        if size > PIECE_NBYTES and one.source.is_contiguous() and one.target.is_contiguous():
            yield from _parts(one)
            continue
        begin = begin if pairs else one.offset
        pairs.append((one.target, one.source))
        nbytes += size
    if pairs:
        yield begin, pairs


def _parts(one: TensorCopy) -> Iterator[tuple[int, Pairs]]:
    target, source = one.target.view(-1), one.source.view(-1)
    count = PIECE_NBYTES // target.element_size()
    for first in range(0, len(target), count):
        pair = target[first : first + count], source[first : first + count]
        yield one.offset + first * target.element_size(), [pair]
