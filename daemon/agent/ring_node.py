"""One ring of a node as its agent keeps it: who reads, who produces, and what is still to be done."""

import asyncio
import contextlib
import signal
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ckptless.daemon.agent import ring_actions as r
from ckptless.daemon.agent.rank_link import RankLink
from ckptless.daemon.agent.ring import Ring
from ckptless.daemon.agent.ring_lending import Guest
from ckptless.daemon.agent.ring_memory import EntryMemory
from ckptless.daemon.api import ring as m

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
    budget_nbytes: int
    readers: dict[int, RingReader] = field(default_factory=dict)
    ready: dict[tuple[int, int], EntryMemory] = field(default_factory=dict)
    producer: RingProducer | None = None
    starter: tuple[int, int] | None = None
    timer: asyncio.TimerHandle | None = None
    todo: deque[r.Action] = field(default_factory=deque)
    busy: bool = False
    # How many batches were made, and how many given to readers.
    made: int = 0
    given: int = 0
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


def kill(producer: RingProducer) -> None:
    """Its end is noticed later."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(producer.pidfd, signal.SIGKILL)
