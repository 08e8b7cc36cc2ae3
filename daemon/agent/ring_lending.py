"""Gives another node batches of this one's rings: a guest takes them as a rank does, and they are sent on.

The producer of a ring makes the batches of any replica, also of one that no rank here has.
"""

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from ckptless.daemon.agent import ring_actions as r
from ckptless.daemon.agent.holders import Peer
from ckptless.daemon.agent.ring_memory import EntryMemory
from ckptless.daemon.agent.ring_receiving import BATCH_DEADLINE_S
from ckptless.daemon.agent.ring_standby_service import Taken
from ckptless.daemon.api import ring_entry as entry
from ckptless.daemon.api.errors import PeerError, ProtocolError
from ckptless.daemon.api.feed import Feed
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bulk import Pace

# Behind all slots' numbers: a guest is a reader of the ring that no process is behind.
FIRST_GUEST = 1 << 20
WHY_LIMIT = 2000


class Inviting(Protocol):
    """The rings of this node."""

    def invite(self, feed: Feed, count: int) -> "Guest":
        """See RingService."""


class Keeping(Protocol):
    """What is kept here for other nodes."""

    def take(self, feed: Feed, count: int) -> Taken:
        """See Standby."""


class Guest:
    """Another node's agent at a ring of this one. Owned by the event loop; `close` it."""

    def __init__(self, took: Callable[[int], None], leave: Callable[[], None]) -> None:
        self._took, self._leave = took, leave
        self._given: deque[tuple[int, int]] = deque()
        self._why: str | None = None
        self._news = asyncio.Event()

    def hear(
        self, action: r.Give | r.GiveEnd | r.GiveUp, ready: Mapping[tuple[int, int], EntryMemory]
    ) -> None:
        """What the ring has for it."""
        match action:
            case r.Give():
                try:
                    self._given.append((action.seq, os.dup(ready[(action.stream, action.seq)].fd)))
                except OSError as error:
                    self.give_up(f"it has no descriptors left: {error}")
                self._news.set()
            case r.GiveEnd():
                self.give_up("there are no more")
            case r.GiveUp():
                self.give_up(action.text)

    def give_up(self, why: str) -> None:
        """There is nothing more for it."""
        self._why = why
        self._news.set()

    async def came(self) -> None:
        """Until there is a batch, or will be none."""
        # no deadline: BATCH_DEADLINE_S of whoever asks
        await self._news.wait()

    def take(self, seq: int) -> int:
        """Batch `seq`, which has come: a descriptor, the caller's. Raises PeerError where there is none."""
        if not self._given:
            raise PeerError(self._why or "it has none")
        found, fd = self._given.popleft()
        if not self._given and self._why is None:
            self._news.clear()
        if found != seq:
            os.close(fd)
            raise PeerError(f"batch {found} in place of batch {seq}")
        self._took(seq)
        return fd

    def close(self) -> None:
        """It wants no more."""
        self._leave()
        while self._given:
            os.close(self._given.popleft()[1])


async def lend(rings: Inviting, standby: Keeping, link: Peer, wanted: p.GetBatches, pace: Pace) -> None:
    """Give another node what it asks for, until it hangs up: first what is kept here, then what the ring has
    or makes, which begins meanwhile. Raises CkptlessError, OSError.
    """
    kept = standby.take(wanted.feed, wanted.count)
    with ExitStack() as stack:
        for _seq, fd in kept.fds:
            stack.callback(os.close, fd)
        rest, guest, why = wanted.count - len(kept.fds), None, PeerError("it has no more")
        try:
            guest = rings.invite(kept.behind, rest) if rest else None
        except PeerError as error:
            why = error
        if guest is not None:
            stack.callback(guest.close)
        for seq, fd in kept.fds:
            await _send(link, seq, fd, pace)
        if guest is not None:
            await _lend_rest(guest, link, range(kept.behind.seq, kept.behind.seq + rest), pace)
        elif rest:
            link.send(_no_more(kept.behind.seq, why))


async def _lend_rest(guest: Guest, link: Peer, seqs: range, pace: Pace) -> None:
    # It has nothing to say meanwhile: what comes is the end of the connection.
    heard = asyncio.ensure_future(link.receive())
    try:
        for seq in seqs:
            try:
                fd = await _unless(heard, guest, seq)
            except (PeerError, TimeoutError) as error:
                link.send(_no_more(seq, error))
                return
            try:
                await _send(link, seq, fd, pace)
            finally:
                os.close(fd)
    finally:
        heard.cancel()
        await asyncio.gather(heard, return_exceptions=True)


async def _unless(heard: "asyncio.Future[p.AgentMessage]", guest: Guest, seq: int) -> int:
    """Batch `seq`. Raises PeerError, TimeoutError, and ConnectionError where the other end is gone before."""
    task = asyncio.ensure_future(guest.came())
    either: set[asyncio.Future[Any]] = {task, heard}
    try:
        done, _ = await asyncio.wait(either, timeout=BATCH_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if heard in done:
        raise ProtocolError(f"{type(heard.result()).__name__} while batches were asked for")
    if task not in done:
        raise TimeoutError
    return guest.take(seq)


async def _send(link: Peer, seq: int, fd: int, pace: Pace) -> None:
    nbytes = os.fstat(fd).st_size
    if nbytes >= p.MOST_ENTRY_NBYTES:
        raise PeerError(f"batch {seq} has {nbytes} bytes")
    with mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
        link.send(p.BatchReply(seq=seq, nbytes=nbytes, digest=entry.decode(view).digest))
        await link.send_bulk(view, pace)


def _no_more(seq: int, error: Exception) -> p.BatchReply:
    return p.BatchReply(seq=seq, nbytes=0, why=(str(error) or "it takes too long")[:WHY_LIMIT])
