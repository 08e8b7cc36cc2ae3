"""One ring of a node as its agent keeps it: who reads, who produces, and what is still to be done."""

import asyncio
import contextlib
import signal
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from ckptless.daemon.agent import ring_actions as r
from ckptless.daemon.agent.rank_link import RankLink
from ckptless.daemon.agent.ring import Ring
from ckptless.daemon.agent.ring_lending import Guest
from ckptless.daemon.agent.ring_limits import RingLimits
from ckptless.daemon.agent.ring_memory import EntryMemory
from ckptless.daemon.agent.ring_standby import PARTS, RingFacts
from ckptless.daemon.agent.ring_waits import Waits
from ckptless.daemon.api import ring as m
from ckptless.daemon.api.errors import PeerError
from ckptless.daemon.api.feed import Feed, RingKey, ring_of

# Of so many batches it is remembered in how many seconds they were made.
TOOK = 9


@dataclass
class RingReader:
    """A rank's connection; `number` is that of its newest RingSeek."""

    link: RankLink
    number: int = 0


@dataclass
class RingProducer:
    """`starter` is the reader whose process forked it; `said` is what it has said and is still looked at."""

    link: RankLink
    starter: int
    pidfd: int
    said: deque[m.RingMade | m.RingAtEnd | m.RingFailed] = field(default_factory=deque)
    # The memory of what it was asked for, in that order.
    memory: deque[EntryMemory] = field(default_factory=deque)
    looking: asyncio.Task[None] | None = None
    hung_up: bool = False


@dataclass
class RingNode:
    """One ring, who is connected to it, and what is still to be done for it."""

    loader: str
    manifest: str
    ring: Ring
    limits: RingLimits
    readers: dict[int, RingReader] = field(default_factory=dict)
    ready: dict[tuple[int, int], EntryMemory] = field(default_factory=dict)
    producer: RingProducer | None = None
    starter: tuple[int, int] | None = None
    timer: asyncio.TimerHandle | None = None
    todo: deque[r.Action] = field(default_factory=deque)
    busy: bool = False
    # How many batches were made here or came from other nodes, and were given to readers or other nodes.
    made: int = 0
    borrowed: int = 0
    given: int = 0
    lent: int = 0
    # Of each slot that takes batches here.
    waits: defaultdict[int, Waits] = field(default_factory=lambda: defaultdict(Waits))
    # Other nodes' agents that take batches here.
    guests: dict[int, Guest] = field(default_factory=dict)
    dropped: bool = False
    took: deque[float] = field(default_factory=lambda: deque(maxlen=TOOK))
    # In which a batch is made from nothing: not how often one comes, of which several are made side by side.
    takes_s: float = 0.0

    def learn(self, took_s: float) -> None:
        """A batch was made in so many seconds."""
        self.made += 1
        self.took.append(took_s)
        self.takes_s = median(self.took)


class RingNodes(dict[RingKey, RingNode]):
    """All rings of a node."""

    @property
    def slowest_s(self) -> float:
        """In how many seconds a batch of the slowest ring is made."""
        return max((node.takes_s for node in self.values()), default=0.0)

    def facts(self, feed: Feed) -> RingFacts | None:
        """Of a ring that makes such batches, for other nodes only; else None."""
        node = self.get(ring_of(feed))
        if node is None or node.ring.serves(feed.stream):
            return None
        return RingFacts(node.takes_s, node.limits.budget_nbytes // PARTS)

    def of(self, feed: Feed) -> RingNode:
        """The ring that has these batches. Raises PeerError: why there is none."""
        if (node := self.get(ring_of(feed))) is not None:
            return node
        others = [manifest[:8] for loader, manifest in self if loader == feed.loader]
        there = f" but {', '.join(others)}" if others else ""
        raise PeerError(f"it has no ring of {feed.loader!r}, manifest {feed.manifest[:8]},{there}")


def kill(producer: RingProducer) -> None:
    """Its end is noticed later."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(producer.pidfd, signal.SIGKILL)
