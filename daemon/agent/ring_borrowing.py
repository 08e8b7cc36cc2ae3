"""Has other nodes make the first batches of ranks that are new on this one.

Which batches a rank will want is known from its record: so they are asked for as soon as that has come, when
there is no process here that could make any. What comes is verified, and kept until the rank asks. This node
makes its own all the same, and whichever is there first is used.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from ckptless.daemon.agent.holders import Dial
from ckptless.daemon.agent.ring_receiving import Borrowed, named, receive_batch
from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.api.feed import Feed, RingKey, next_feed
from ckptless.daemon.api.messages import Assignment, NodeInfo
from ckptless.daemon.peers import messages as p

# So many batches are asked for: by the time that they are used up the node makes its own.
COUNT = 4
# Of what has come and nobody has asked for yet.
LENT_NBYTES = 1 << 30


class Lent:
    """Batches that have come before anybody has asked for them. Owns their memory."""

    def __init__(self) -> None:
        self._kept: list[Borrowed] = []

    def keep(self, one: Borrowed) -> bool:
        """Until somebody asks; False, and closed, where there is no room for it."""
        if sum(other.nbytes for other in self._kept) + one.nbytes > LENT_NBYTES:
            one.memory.close()
            return False
        self._kept.append(one)
        return True

    def take(self, ring: RingKey, stream: int) -> list[Borrowed]:
        """Those of one stream, the caller's from here on."""
        found = [one for one in self._kept if (one.ring, one.stream) == (ring, stream)]
        self._kept = [one for one in self._kept if one not in found]
        return sorted(found, key=lambda one: one.seq)

    def drop_other(self, loader: str, manifest: str) -> int:
        """Let go of a loader's batches of other manifests; how many."""
        stale = [one for one in self._kept if one.ring[0] == loader and one.ring[1] != manifest]
        self._kept = [one for one in self._kept if one not in stale]
        for one in stale:
            one.memory.close()
        return len(stale)

    def drop(self) -> None:
        """Let go of all."""
        for one in self._kept:
            one.memory.close()
        self._kept.clear()


class Rings(Protocol):
    """The rings of this node."""

    lent: Lent

    def needs(self, feed: Feed) -> bool:
        """See RingService."""

    def borrowed(self, one: Borrowed) -> bool:
        """See RingService."""


class Borrowing:
    """Owned by the agent's event loop. `tell(kind, text)` hears how it went."""

    def __init__(self, me: int, dial: Dial, rings: Rings, tell: Callable[[str, str], None]) -> None:
        self._me, self._dial, self._rings, self._tell = me, dial, rings, tell
        self._generation = 0
        self._nodes: Sequence[NodeInfo] = ()
        self._record_nodes: Sequence[Sequence[int]] = ()
        self._asked: set[tuple[str, str, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, assignment: Assignment) -> None:
        """A new generation: what was asked for in the old one is not wanted."""
        for task in self._tasks:
            task.cancel()
        self._asked.clear()
        self._rings.lent.drop()
        self._generation = assignment.generation
        others = {place.node for place in assignment.places} - {self._me}
        self._nodes = [info for info in assignment.nodes if info.node in others]
        self._record_nodes = assignment.record_nodes or ((),) * len(assignment.places)

    def want(self, rank: int, feeds: Sequence[Feed]) -> None:
        """A rank that is new here goes on with these batches."""
        for feed in feeds:
            stream = (feed.loader, feed.manifest, feed.stream)
            if stream in self._asked or not self._rings.needs(feed):
                continue
            self._asked.add(stream)
            task = asyncio.create_task(self._borrow(feed, self._nodes_for(rank)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _nodes_for(self, rank: int) -> list[NodeInfo]:
        """Whom to ask, one after the other: first those that may have begun already, see `ring_foresight`."""
        # Several ranks that are new do not all ask the same one.
        turn = rank % max(1, len(self._nodes))
        nodes = [*self._nodes[turn:], *self._nodes[:turn]]
        return sorted(nodes, key=lambda info: info.node not in self._record_nodes[rank])

    async def _borrow(self, feed: Feed, nodes: Sequence[NodeInfo], count: int = COUNT) -> None:
        """Of the first node that gives them; of the next one what it has not given."""
        for info in nodes:
            try:
                async with aclosing(self._from(info, feed, count)) as batches:
                    async for one in batches:
                        feed, count = next_feed(feed, one.after), count - 1
                        if not self._rings.borrowed(one):
                            # This node has come as far by itself.
                            return
                return
            except (OSError, TimeoutError, CkptlessError) as error:
                why = str(error) or type(error).__name__
                self._tell("ring-not-lent", f"{named(feed)}, from {feed.seq} on, by {info.name}: {why}")

    async def _from(self, info: NodeInfo, feed: Feed, count: int) -> AsyncGenerator[Borrowed, None]:
        """What one node gives, verified. Raises CkptlessError, OSError, TimeoutError."""
        link, came, wanted = await self._dial(info), 0, feed
        try:
            link.send(p.GetBatches(generation=self._generation, feed=feed, count=count))
            for _ in range(count):
                one = await receive_batch(link, wanted)
                came, wanted = came + 1, next_feed(wanted, one.after)
                yield one
        finally:
            link.close()
            if came:
                text = f"{named(feed)}: {came} batches, from {feed.seq} on, came from {info.name}"
                self._tell("ring-borrowed", text)

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
