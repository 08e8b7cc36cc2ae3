"""A step that another number of ranks has committed, as agents have it in their memory."""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ckptless.daemon.protocol.errors import StateUnavailableError
from ckptless.daemon.protocol.limits import MOST_SPANS
from ckptless.pytorch_hooks.agent_session.session import Session
from ckptless.pytorch_hooks.elastic.recut import SLICE_NBYTES, Span
from ckptless.pytorch_hooks.state import Layout


class _Request(NamedTuple):
    """Parts of a payload that are asked for at once, and which of the wanted ones come with them, in turn."""

    spans: list[Span]
    wanted: range


class FormerStep:
    """The step that a generation restores, of former ranks; see `recut.Source`. Main thread only.

    `shards` is `Assigned.former_shards`. `nbytes`: how many bytes of tensors have been fetched.
    """

    def __init__(self, session: Session, generation: int, step: int, shards: Sequence[int]) -> None:
        self._session, self._generation = session, generation
        self.step, self.shards = step, shards
        self.nbytes = 0

    def record(self, rank: int) -> bytes:
        """Return a former rank's record. Raises StateUnavailableError, GenerationEnded."""
        reply = self._session.fetch_record(self._generation, rank)
        if reply.error is not None:
            raise StateUnavailableError(f"the record of former rank {rank} is not to be had: {reply.error}")
        return reply.record

    def read(
        self, shard: int, layout: Layout, spans: Sequence[Span], put: Callable[[int, torch.Tensor], None]
    ) -> None:
        """See `recut.Source`; asks for many at once. Raises StateUnavailableError, GenerationEnded."""
        for request in _requests(spans):
            data = self._fetch(shard, layout, request.spans)
            begin = 0
            for index in request.wanted:
                start, end = spans[index]
                put(index, data[begin : begin + end - start])
                begin += end - start
            # Unmapped, before there is the next one.
            del data

    def _fetch(self, shard: int, layout: Layout, spans: list[Span]) -> torch.Tensor:
        """Return these bytes, one after the other: memory of the agent's, until the last view is gone."""
        wanted = tuple((start, end - start) for start, end in spans)
        nbytes = sum(count for _, count in wanted)
        reply, fd = self._session.fetch_spans(self._generation, shard, layout.digest, wanted)
        if reply.error is not None or fd is None:
            raise StateUnavailableError(
                f"the tensors of former shard {shard} are not to be had: {reply.error}"
            )
        try:
            if reply.nbytes != nbytes or os.fstat(fd).st_size < nbytes:
                raise StateUnavailableError(
                    f"of the tensors of former shard {shard} {reply.nbytes} bytes came, and not {nbytes}"
                )
            # Private, since torch takes no memory that cannot be written; nobody writes.
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.nbytes += nbytes
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _requests(spans: Sequence[Span]) -> Iterator[_Request]:
    """Put parts together that may be asked for at once: neighbours as one, not many, and not too large."""
    first, asked, nbytes = 0, list[Span](), 0
    for index, (start, end) in enumerate(spans):
        joins = bool(asked) and asked[-1][1] == start
        full = nbytes + end - start > SLICE_NBYTES or (len(asked) == MOST_SPANS and not joins)
        if asked and full:
            yield _Request(asked, range(first, index))
            first, asked, nbytes, joins = index, [], 0, False
        asked.append((asked.pop()[0] if joins else start, end))
        nbytes += end - start
    if asked:
        yield _Request(asked, range(first, len(spans)))
