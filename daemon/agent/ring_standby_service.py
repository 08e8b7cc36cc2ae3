"""Fetches and keeps the next batches of other nodes' ranks, as `ring_standby` decides, and gives them out.

It runs beside what records and copies need: nothing waits for it, and its failures are told once.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from ckptless.daemon.agent.holders import Dial
from ckptless.daemon.agent.ring_receiving import Borrowed, named, receive_batch
from ckptless.daemon.agent.ring_standby import FAILURES, RECORDS, WORTH_S, RingFacts, Stand, Standbys
from ckptless.daemon.agent.vault import Vault
from ckptless.daemon.api.errors import CkptlessError, PeerError
from ckptless.daemon.api.feed import Feed, next_feed
from ckptless.daemon.api.messages import Assignment, NodeInfo
from ckptless.daemon.peers import messages as p

logger = logging.getLogger(__name__)


class Rings(Protocol):
    """The rings of this node."""

    @property
    def slowest_s(self) -> float:
        """See RingNodes."""

    def facts(self, feed: Feed) -> RingFacts | None:
        """See RingNodes."""


class Taken(NamedTuple):
    """Descriptors of batches that were kept, the caller's to close, and the batch that follows them."""

    fds: list[tuple[int, int]]
    behind: Feed


class Standby:
    """Owned by the agent's event loop. `tell(kind, text)` hears what did not come, and what was of use."""

    def __init__(
        self, me: int, dial: Dial, rings: Rings, vault: Vault, tell: Callable[[str, str], None]
    ) -> None:
        self._me, self._dial, self._rings, self._vault, self._tell = me, dial, rings, vault, tell
        self._standbys = Standbys()
        self._assignment: Assignment | None = None
        self._nodes: Mapping[int, NodeInfo] = {}
        self._kept: dict[Feed, Borrowed] = {}
        self._tasks: dict[Feed, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._due: asyncio.Handle | None = None
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return sum(one.nbytes for one in self._kept.values())

    def follow(self, assignment: Assignment) -> None:
        """A new generation; what records of it are held is known."""
        for feed in list(self._tasks):
            self._cancel(feed)
        self._standbys.anew()
        self._assignment = assignment
        self._nodes = {info.node: info for info in assignment.nodes}
        self.changed()

    def changed(self) -> None:
        """Records or rings are not what they were: looked at when this turn of the event loop is over."""
        # For each record, so it must cost nothing where no loader is slow.
        needed = self._kept or self._tasks or self._rings.slowest_s >= WORTH_S
        if needed and self._due is None and not self._closed:
            self._due = asyncio.get_running_loop().call_soon(self._update)

    def _update(self) -> None:
        self._due = None
        if self._assignment is None or self._closed:
            return
        plan = self._standbys.update(self._stands(self._assignment), self._rings.facts)
        self._let_go(plan.drop)
        for feed in plan.cancel:
            self._cancel(feed)
        for feed in plan.late:
            self._tell_failed(feed, "one takes longer than two commits")
        for feed, node in plan.fetch:
            self._tasks[feed] = asyncio.create_task(self._fetch(feed, self._nodes[node]))

    def _stands(self, assignment: Assignment) -> Iterator[Stand]:
        began = -1 if assignment.restore_step is None else assignment.restore_step
        for rank, records in self._vault.feeds(RECORDS).items():
            if rank < len(assignment.places) and (node := assignment.places[rank].node) != self._me:
                there = records[0][0] > began and node in self._nodes
                yield Stand(node if there else None, [feeds for _step, feeds in records])

    async def _fetch(self, feed: Feed, info: NodeInfo) -> None:
        try:
            link = await self._dial(info)
            try:
                link.send(p.GetBatches(generation=self._generation, feed=feed, count=1))
                one = await receive_batch(link, feed, partial(self._admit, feed))
            finally:
                link.close()
            if self._standbys.came(feed, one.nbytes, one.after):
                self._kept[feed] = one
            else:
                one.memory.close()
        except (OSError, TimeoutError, CkptlessError) as error:
            why = str(error) or type(error).__name__
            logger.debug("%s: batch %d of %s: %s", named(feed), feed.seq, info.name, why)
            if self._standbys.failed(feed):
                self._tell_failed(feed, f"{info.name}: {why}")
        finally:
            if self._tasks.get(feed) is asyncio.current_task():
                del self._tasks[feed]
        # A newer one may have been named meanwhile.
        self.changed()

    @property
    def _generation(self) -> int:
        assert self._assignment is not None
        return self._assignment.generation

    def _admit(self, feed: Feed, nbytes: int) -> None:
        drop = self._standbys.admit(feed, nbytes, self._rings.facts(feed))
        if drop is None:
            raise PeerError(
                f"there is no room for {nbytes} bytes of it: give the loader a larger budget_nbytes"
            )
        self._let_go(drop)

    def _tell_failed(self, feed: Feed, why: str) -> None:
        text = f"no batches are kept here in case their node is lost: {why}, {FAILURES} in a row"
        self._tell("ring-not-kept", f"{named(feed)}: {text}")

    def _let_go(self, feeds: tuple[Feed, ...]) -> None:
        for feed in feeds:
            self._kept.pop(feed).memory.close()

    def _cancel(self, feed: Feed) -> None:
        task = self._tasks.pop(feed, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    # -------------------------------------------------------------------------------------- give

    def behind(self, feed: Feed) -> Feed:
        """The first batch from this one on that is not kept."""
        run = self._standbys.run_from(feed)
        return next_feed(run[-1], self._kept[run[-1]].after) if run else feed

    def take(self, feed: Feed, count: int) -> Taken:
        """What is kept of so many batches from this one on."""
        fds: list[tuple[int, int]] = []
        behind = feed
        for one in self._standbys.run_from(feed)[:count]:
            try:
                fds.append((one.seq, os.dup(self._kept[one].memory.fd)))
            except OSError:
                # No descriptor is left: the ring makes it again, or says so.
                break
            behind = next_feed(one, self._kept[one].after)
        if fds:
            text = f"{len(fds)} batches, from {feed.seq} on, were kept here"
            self._tell("ring-standby", f"{named(feed)}: {text}")
        return Taken(fds, behind)

    async def close(self) -> None:
        """Stop what is under way, and give the memory back."""
        self._closed = True
        if self._due is not None:
            self._due.cancel()
        for feed in list(self._tasks):
            self._cancel(feed)
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._let_go(tuple(self._kept))
