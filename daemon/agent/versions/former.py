"""Gives this node's ranks their parts of a step that another number of ranks has committed."""

import asyncio
import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.spans import SPANS_LIMIT
from ckptless.daemon.agent.versions.store import VersionStore, digest
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import BadVersionError, PeerError
from ckptless.daemon.protocol.messages import NodeInfo
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.bulk import PATIENCE_S
from ckptless.daemon.transport.tasks import end_all


class FormerState:
    """Owned by the agent's event loop. What lies here is read here; the rest other agents give, each in turn.

    Nothing of it is held here afterwards: a rank asks for each part once, and for a record its node does.
    """

    def __init__(self, node: int, store: VersionStore, replicas: Replicas) -> None:
        self._me, self._store, self._replicas = node, store, replicas
        self._former: m.Former | None = None
        self._step = 0
        self._records: dict[int, asyncio.Task[bytes]] = {}

    def follow(self, assignment: m.Assignment) -> None:
        """Begin a generation: nothing of the one before is asked for any more."""
        for task in self._records.values():
            task.cancel()
        self._records = {}
        self._former, self._step = assignment.former, assignment.restore_step or 0

    async def record(self, rank: int) -> bytes:
        """Return the record of one of the former ranks, verified. Raises PeerError."""
        former = self._known(rank)
        if rank not in self._records:
            self._records[rank] = asyncio.create_task(self._fetch_record(former, rank))
            # Whoever asks hears of a failure; nobody may, if the generation ends first.
            self._records[rank].add_done_callback(lambda done: done.cancelled() or done.exception())
        # no deadline: each holder that is asked has its own
        return await asyncio.shield(self._records[rank])

    async def _fetch_record(self, former: m.Former, rank: int) -> bytes:
        store = self._store.of(former.cut)
        held = store.record(rank, self._step) if store is not None else None
        if held is not None:
            return held.record

        async def ask(info: NodeInfo) -> bytes:
            wanted = p.GetRecord(cut=former.cut, rank=rank, step=self._step)
            found = await self._replicas.ask_record(info, wanted)
            if digest(found.record) != found.digest:
                raise PeerError("it does not match its digest")
            return found.record

        nodes = self._in_turn(former.record_nodes[rank])
        what = f"the record of step {self._step} of rank {rank} before"
        return await self._replicas.first_of(nodes, what, ask)

    async def spans(self, asked: m.FetchSpans) -> int:
        """Return a memfd, the caller's, of these parts of a former shard. Raises PeerError, OSError."""
        former, nbytes = self._known(asked.shard), sum(count for _, count in asked.spans)
        if nbytes > SPANS_LIMIT:
            raise PeerError(f"parts of {nbytes} bytes are asked for at once; the limit is {SPANS_LIMIT}")
        wanted = p.GetSpans(
            cut=former.cut, shard=asked.shard, step=self._step, layout=asked.layout, spans=asked.spans
        )
        fd = os.memfd_create("ckptless-parts", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            if nbytes:
                with _mapped(fd, nbytes) as view:
                    await self._fill(former, wanted, view)
        except BaseException:
            os.close(fd)
            raise
        return fd

    async def _fill(self, former: m.Former, wanted: p.GetSpans, view: memoryview) -> None:
        with contextlib.suppress(BadVersionError):
            # What is bad here has been told of, and others may have it.
            await self._replicas.serving.spans.read(wanted, view)
            return
        nodes = self._in_turn(dict(former.tensor_nodes).get(wanted.shard, ()))

        async def ask(info: NodeInfo) -> None:
            await self._receive(info, wanted, view)

        await self._replicas.first_of(nodes, f"parts of shard {wanted.shard}, step {self._step}", ask)

    async def _receive(self, info: NodeInfo, wanted: p.GetSpans, view: memoryview) -> None:
        """Raises CkptlessError, OSError, TimeoutError."""
        link = await self._replicas.dial(info)
        try:
            link.send(wanted)
            async with asyncio.timeout(PATIENCE_S):
                reply = await link.receive()
            if not isinstance(reply, p.SpansReply) or reply.nbytes != len(view):
                raise PeerError("it does not hold them soundly")
            await link.receive_bulk(view, lambda _came: None)
        finally:
            link.close()
        if await asyncio.to_thread(digest, view) != reply.digest:
            raise PeerError("what came is not what it sent")

    def _known(self, number: int) -> m.Former:
        """Raises PeerError where the generation has none, or not so many."""
        if self._former is None or number >= len(self._former.shards):
            raise PeerError(f"no other number of ranks, with a rank {number}, has committed what is restored")
        return self._former

    def _in_turn(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Each node begins with another holder, so that none of them is asked by all at once."""
        begin = self._me % len(nodes) if nodes else 0
        return (*nodes[begin:], *nodes[:begin])

    async def close(self) -> None:
        """Stop what is under way."""
        await end_all(self._records.values())


@contextmanager
def _mapped(fd: int, nbytes: int) -> Iterator[memoryview]:
    mapping = mmap.mmap(fd, nbytes)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        view.release()
        mapping.close()
