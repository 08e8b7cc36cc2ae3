"""One ring of a node as its agent keeps it: who reads, who produces, and what is still to be done."""

import asyncio
import contextlib
import signal
from collections import defaultdict, deque
from dataclasses import dataclass, field

from ckptless.daemon.agent.dataloader import actions as r
from ckptless.daemon.agent.dataloader.limits import RingLimits
from ckptless.daemon.agent.dataloader.memory import EntryMemory
from ckptless.daemon.agent.dataloader.ring import Ring
from ckptless.daemon.agent.dataloader.waits import Waits
from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.api import ring as m


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
    # How many batches were made, and given to readers.
    made: int = 0
    given: int = 0
    # Of each slot that takes batches here.
    waits: defaultdict[int, Waits] = field(default_factory=lambda: defaultdict(Waits))
    dropped: bool = False


def kill(producer: RingProducer) -> None:
    """Its end is noticed later."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(producer.pidfd, signal.SIGKILL)
