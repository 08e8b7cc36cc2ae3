"""Copies within the CPU's memory, by the thread that waits for them: in pieces, digested while still warm."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from ckptless.pytorch_hooks.state import Copy, private, raw

# Of one call, without the GIL: little enough that the cache still has it when it is digested.
PIECE_NBYTES = 1 << 20

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class HostTicket:
    """Copies that are to be made, with the digest of each piece; `over` when nobody reads their sources."""

    copies: Sequence[Copy]
    digests: Sequence[int]
    over: threading.Event = field(default_factory=threading.Event)


class HostCopies:
    """The device of tensors that lie in the CPU's memory."""

    def hold(self, memory: torch.Tensor) -> None:
        """Any memory will do."""

    def release(self) -> None:
        """There is nothing to give back."""

    def begin(self, now: Sequence[Copy], later: Sequence[Copy]) -> HostTicket:
        """Copy `now`, and digest `later`. Operations on the CPU are done when they return."""
        private.copy_all([one.target for one in now], [one.source for one in now])
        return HostTicket(later, [_digest(source for _, source in pairs) for _, pairs in pieces(later)])

    def complete(self, ticket: HostTicket, came: Callable[[int], None]) -> str | None:
        """Copy, here and now."""
        try:
            for (begin, pairs), digest in zip(pieces(ticket.copies), ticket.digests, strict=True):
                came(begin)
                private.copy_all([target for target, _ in pairs], [source for _, source in pairs])
                if _digest(target for target, _ in pairs) != digest:
                    return next(one.name for one in reversed(ticket.copies) if one.offset <= begin)
        finally:
            ticket.over.set()
        return None

    def fence(self, ticket: HostTicket) -> None:
        """Until they are made, which takes as long as memory does."""
        # no deadline: it takes as long as memory does
        ticket.over.wait()


def _digest(tensors: Iterable[torch.Tensor]) -> int:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        flat = raw.flat(tensor)  # the window keeps no memory alive
        found.update(raw.window(flat))
    return found.intdigest()


def pieces(copies: Sequence[Copy]) -> Iterator[tuple[int, Pairs]]:
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


def _parts(one: Copy) -> Iterator[tuple[int, Pairs]]:
    target, source = one.target.view(-1), one.source.view(-1)
    count = PIECE_NBYTES // target.element_size()
    for first in range(0, len(target), count):
        pair = target[first : first + count], source[first : first + count]
        yield one.offset + first * target.element_size(), [pair]
