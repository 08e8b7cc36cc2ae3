"""Finds the bytes of a version that its holder has already, of an earlier step: they are not sent again.

Chunks are the same where they stand in the same place with the same digest: so parameters that no optimizer
touches go over the network once. All of it is verified as if it had been sent.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptless.daemon.agent.versions.store import Region, VersionStore, header_of
from ckptless.daemon.protocol.errors import BadVersionError, ProtocolError
from ckptless.daemon.protocol.messages import TensorsAt
from ckptless.daemon.protocol.peers.messages import MOST_RUNS
from ckptless.daemon.protocol.version import Header

# The first chunk, and how many.
Run: TypeAlias = tuple[int, int]
# Bytes of the payload: from, to.
Span: TypeAlias = tuple[int, int]


def unchanged(header: Header, base: Header) -> tuple[Run, ...]:
    """Return the chunks that another version has in the same place; the first so many runs of them."""
    shape = (header.layout, header.nbytes, header.chunk_nbytes)
    if shape != (base.layout, base.nbytes, base.chunk_nbytes):
        return ()
    runs: list[Run] = []
    for index, (one, other) in enumerate(zip(header.chunks, base.chunks, strict=True)):
        if one != other:
            continue
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif len(runs) == MOST_RUNS:
            break
        else:
            runs.append((index, 1))
    return tuple(runs)


def spans_of(header: Header, runs: Sequence[Run]) -> list[Span]:
    """Return where those chunks lie. Raises ProtocolError where they are not in order, or not its chunks."""
    found: list[Span] = []
    done, size = 0, header.chunk_nbytes
    for first, count in runs:
        if first < done or count < 1 or first + count > len(header.chunks):
            raise ProtocolError(f"chunks {first} to {first + count} of a version of {len(header.chunks)}")
        done = first + count
        found.append((first * size, min(done * size, header.nbytes)))
    return found


def missing(header: Header, have: Sequence[Run]) -> list[Span]:
    """All of the payload but those chunks, in order. Raises ProtocolError."""
    found: list[Span] = []
    start = 0
    for first, end in spans_of(header, have):
        if first > start:
            found.append((start, first))
        start = end
    return [*found, (start, header.nbytes)] if start < header.nbytes else found


@dataclass(frozen=True)
class Base:
    """A version that a holder has, and which runs of it are the same in one that it is offered, `header`."""

    step: int
    at: TensorsAt
    region: Region
    header: Header
    runs: tuple[Run, ...]

    async def copy(self, payload: memoryview) -> None:
        """Put what is the same into the payload of the one that is coming, in a thread."""
        try:
            view = self.region.view(self.at.offset, self.at.nbytes)
        except ValueError:
            return  # its memory has been given back: what is there instead does not verify
        with view:
            copying = asyncio.get_running_loop().run_in_executor(None, self._copy, payload)
            try:
                await asyncio.shield(copying)
            finally:
                # A thread cannot be cancelled, and writes to the memory until it is through.
                # no deadline: it copies memory, and cannot be ended
                await asyncio.wait([copying])

    def _copy(self, payload: memoryview) -> None:
        lies = self.at.offset + self.header.header_nbytes
        for start, end in spans_of(self.header, self.runs):
            with payload[start:end] as into:
                filled = 0
                while filled < len(into):
                    # By the kernel, which other threads need not wait for.
                    filled += os.preadv(self.region.fd, [into[filled:]], lies + start + filled)


def base_of(store: VersionStore, header: Header) -> Base | None:
    """The newest version of that shard here, if it has something of the one that this is the header of."""
    for step in sorted(store.steps(header.shard), reverse=True):
        found = store.tensors(header.shard, step)
        if found is None or step == header.step:
            continue
        at, region = found
        try:
            runs = unchanged(header, header_of(region, at))
        except BadVersionError:
            continue  # it is found to be bad by whoever wants it
        return Base(step, at, region, header, runs) if runs else None
    return None
