"""Receives batches of rings from another node, and verifies them."""

import asyncio
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

from ckptless.daemon.agent.holders import Peer
from ckptless.daemon.agent.ring_memory import EntryMemory
from ckptless.daemon.api.errors import PeerError, ProtocolError
from ckptless.daemon.api.feed import Feed, RingKey, ring_of
from ckptless.daemon.peers import messages as p

# So long may a batch take; who asks has others to ask, and makes its own meanwhile.
BATCH_DEADLINE_S = 60.0
# So much longer is a node waited for that has to say that it takes too long.
GRACE_S = 5.0


@dataclass(frozen=True)
class Borrowed:
    """Batch `seq` of `stream` of a ring, made by another node; `before` and `after` it are positions."""

    ring: RingKey
    stream: int
    seq: int
    memory: EntryMemory
    nbytes: int
    before: bytes
    after: bytes


def named(feed: Feed) -> str:
    """For a reader of an event."""
    return f"loader {feed.loader!r}, stream {feed.stream}"


async def receive_batch(
    link: Peer, feed: Feed, admit: Callable[[int], None] = lambda _nbytes: None
) -> Borrowed:
    """The next answer to GetBatches, which is to be the batch `feed`: verified, and the caller's to close.

    `admit` is told its size before it is received, and may raise. Raises CkptlessError, OSError and
    TimeoutError.
    """
    async with asyncio.timeout(BATCH_DEADLINE_S + GRACE_S):
        reply = await link.receive()
    if not isinstance(reply, p.BatchReply) or reply.seq != feed.seq:
        raise ProtocolError(f"{type(reply).__name__} is no answer to GetBatches")
    if not reply.nbytes:
        raise PeerError(reply.why or "it gives none")
    admit(reply.nbytes)
    memory = EntryMemory(feed.stream, feed.seq)
    try:
        os.ftruncate(memory.fd, reply.nbytes)
        with mmap.mmap(memory.fd, reply.nbytes) as mapping, memoryview(mapping) as view:
            await link.receive_bulk(view)
        after = await _verified(memory, feed, reply)
    except BaseException:
        memory.close()
        raise
    return Borrowed(ring_of(feed), feed.stream, feed.seq, memory, reply.nbytes, feed.position, after)


async def _verified(memory: EntryMemory, feed: Feed, reply: p.BatchReply) -> bytes:
    """The position after a batch whose bytes are there."""
    work = asyncio.to_thread(memory.seal_received, feed.manifest, reply.nbytes, reply.digest)
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # The thread works on the descriptor, which must not be closed, and be another one's, meanwhile.
        # no deadline: it copies memory, and cannot be ended
        await asyncio.gather(task, return_exceptions=True)
        raise
