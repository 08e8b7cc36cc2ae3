"""One ring of a node as its agent keeps it: readers, the producer, the batches' memory, and figures."""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptless.daemon.agent.dataloader import ring as r
from ckptless.daemon.agent.dataloader.limits import RingLimits
from ckptless.daemon.agent.dataloader.waits import Waits
from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.protocol import ring as m
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.model import ReaderState, RingState, StreamState

# So long a rank may take for one step before another one is to start the producer.
LEASE_S = 30.0


@dataclass
class RingReader:
    """A rank's connection; `number` is that of its newest RingSeek."""

    link: RankLink
    number: int = 0


@dataclass
class RingProducer:
    """`starter` is the reader whose process forked it."""

    link: RankLink
    starter: int
    pidfd: int
    # The memory of what it was asked for, in that order.
    memory: deque[int] = field(default_factory=deque)

    def kill(self) -> None:
        """End it; that is noticed later."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class RingNode:
    """Does what the ring's state machine says, and tells it what has come. Owned by the event loop.

    `tell(kind, text)` hears of what is worth an event.
    """

    def __init__(
        self,
        name: tuple[str, str],
        limits: RingLimits,
        leases: Iterator[int] | None = None,
        tell: Callable[[str, str], None] = lambda _kind, _text: None,
        lease_s: float = LEASE_S,
    ) -> None:
        self.loader, self.manifest = name
        self.ring = r.Ring(limits.window, limits.budget_nbytes, leases)
        self.readers: dict[int, RingReader] = {}
        self.producer: RingProducer | None = None
        # How long the reader of each slot has waited.
        self.waits: defaultdict[int, Waits] = defaultdict(Waits)
        self._limits, self._tell, self._lease_s = limits, tell, lease_s
        # Who was asked to start the producer, with which lease.
        self._granted: r.Grant | None = None
        self._timer: asyncio.TimerHandle | None = None
        # The memory of each batch that is there: a sealed memfd.
        self._memory: dict[tuple[int, int], int] = {}
        self._made = self._given = 0
        self._todo: deque[r.Action] = deque()
        self._busy = self._dropped = False

    @property
    def count(self) -> int:
        """The number of batches that are there."""
        return len(self._memory)

    # ----------------------------------------------------------------------------------- readers

    def open(self, reader: int, link: RankLink) -> None:
        """A reader's process is there; the former one under this number is hung up on."""
        if (former := self.readers.get(reader)) is not None:
            former.link.close()
        self.readers[reader] = RingReader(link)
        self._do(self.ring.open(reader))

    def hear(self, reader: int, message: m.RingSeek | m.RingTook) -> None:
        """A reader's word."""
        known, now_s = self.readers[reader], asyncio.get_running_loop().time()
        if isinstance(message, m.RingSeek):
            known.number = message.number
            self.waits[reader].begin(now_s, message.stream)
            self._do(self.ring.seek(reader, message.stream, message.seq, message.position))
        elif message.number == known.number:
            self.waits[reader].add(now_s, message.count, message.waits, message.waited_s)
            self._do(self.ring.took(reader, message.seq, message.done))

    def gone(self, reader: int) -> None:
        """A reader's process has ended, or does not need this ring any more."""
        del self.readers[reader]
        if self.producer is not None and self.producer.starter == reader:
            # It ends with its parent; a new one must not run beside it.
            self.producer.kill()
        self._do(self.ring.gone(reader))

    def forget(self, reader: int) -> None:
        """Drop what this reader holds: nobody will come back as it."""
        if reader not in self.readers:
            self._do(self.ring.forget(reader))

    # ---------------------------------------------------------------------------------- producer

    def welcome(self, link: RankLink, lease: int) -> bool:
        """A producer is there: whether it is the one that was asked for."""
        if self._granted is None or self._granted.lease != lease:
            return False
        wanted, actions = self.ring.producer_up(lease)
        if wanted:
            self._cancel_timer()
            self.producer = RingProducer(link, self._granted.reader, os.pidfd_open(link.pid))
            # What it has forked in turn may keep the connection open beyond its death.
            asyncio.get_running_loop().add_reader(self.producer.pidfd, link.close)
        self._do(actions)
        return wanted

    def hear_producer(self, message: m.RingMade | m.RingAtEnd | m.RingFailed) -> None:
        """The producer's word on the oldest batch that it was asked for; ProtocolError for any other."""
        producer, key = self.producer, (message.stream, message.seq)
        wanted = self.ring.wants(*key)
        if producer is None or not producer.memory or wanted is None:
            raise ProtocolError(f"batch {message.seq} of stream {message.stream} was not asked for now")
        if isinstance(message, m.RingMade):
            _check_sealed(producer.memory[0], message)
        memory = producer.memory.popleft()
        if wanted and isinstance(message, m.RingMade):
            self._made += 1
            self._memory[key] = memory
            self._do(self.ring.made(*key, message.nbytes, message.position))
            return
        os.close(memory)
        if not wanted:
            self._do(self.ring.unwanted())
        elif isinstance(message, m.RingFailed):
            self._tell("ring-broken", f"batch {message.seq} of {self.loader!r} could not be made")
            self._do(self.ring.failed(*key, message.text))
        else:
            self._do(self.ring.at_end(*key))

    def producer_gone(self) -> None:
        """The producer's connection has ended."""
        if self.producer is None:
            return
        producer, self.producer = self.producer, None
        producer.kill()
        asyncio.get_running_loop().remove_reader(producer.pidfd)
        os.close(producer.pidfd)
        for memory in producer.memory:
            os.close(memory)
        if producer.starter in self.readers:
            self._tell("ring-producer", f"the process that makes batches of {self.loader!r} has ended")
        self._do(self.ring.producer_gone())

    # ---------------------------------------------------------------------------------------- do

    def _do(self, actions: list[r.Action]) -> None:
        """Carry the actions out in order, also where one of them breaks a connection, which brings more."""
        if self._dropped:
            return
        self._todo.extend(actions)
        if self._busy:
            return
        self._busy = True
        try:
            while self._todo:
                self._act(self._todo.popleft())
        finally:
            self._busy = False

    def _act(self, action: r.Action) -> None:
        match action:
            case m.RingMake():
                self._ask(action)
            case r.FreeBatch():
                os.close(self._memory.pop((action.stream, action.seq)))
            case r.Note():
                self._tell(action.kind, f"loader {self.loader!r}: {action.text}")
            case _:
                if (reader := self.readers.get(action.reader)) is not None:
                    self._answer(reader, action)

    def _answer(self, reader: RingReader, action: r.Give | r.GiveEnd | r.GiveUp | r.Grant) -> None:
        number = reader.number
        match action:
            case r.Give(_, stream, seq):
                memory = self._memory[(stream, seq)]
                self._given += 1
                nbytes = os.fstat(memory).st_size
                reader.link.send(m.RingEntry(number=number, seq=seq, nbytes=nbytes), memory)
            case r.GiveEnd(_, seq):
                reader.link.send(m.RingEnd(number=number, seq=seq))
            case r.GiveUp(_, seq, text):
                reader.link.send(m.RingBroken(number=number, seq=seq, text=text[: m.TEXT_LIMIT]))
            case r.Grant(_, lease):
                self._granted = action
                self._cancel_timer()
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._lease_s, lambda: self._do(self.ring.lease_late(lease)))
                reader.link.send(m.RingLease(lease=lease))

    def _ask(self, make: m.RingMake) -> None:
        """Have the producer make a batch."""
        producer = self.producer
        if producer is None:
            return
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            memory = os.memfd_create(f"ckptless-batch-{make.stream}-{make.seq}", flags)
        except OSError as error:
            self._tell("ring-memory", f"no memory for a batch of {self.loader!r}: {error}")
            producer.kill()
            return
        producer.memory.append(memory)
        producer.link.send(make, memory)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def drop(self) -> RingState:
        """End the producer, and give all memory back; what the ring was like."""
        self._dropped = True
        self._todo.clear()
        self._cancel_timer()
        state = self.told(closed=True)
        if self.producer is not None:
            self.producer.kill()
            self.producer.link.close()
        while self._memory:
            os.close(self._memory.popitem()[1])
        made, given = self._made, self._given
        self._tell("ring-closed", f"loader {self.loader!r}: {made} batches were made, {given} given out")
        return state

    # ----------------------------------------------------------------------------------- figures

    def told(self, *, closed: bool = False) -> RingState:
        """The ring as it is now, or is when it is closed, for people."""
        return RingState(
            loader=self.loader,
            manifest=self.manifest,
            nbytes=0 if closed else self.ring.used_nbytes,
            budget_nbytes=self._limits.budget_nbytes,
            prefetch=self._limits.window,
            made=self._made,
            given=self._given,
            streams=() if closed else tuple(self._streams_told()),
            readers=tuple(self._readers_told()),
            producer=None if closed or self.producer is None else self.producer.link.pid,
            closed=closed,
        )

    def _streams_told(self) -> Iterator[StreamState]:
        for number, stream in sorted(self.ring.streams.items()):
            marks = [mark for mark in self.ring.marks.values() if mark.stream == number and mark.alive]
            first = min((mark.next for mark in marks), default=0)
            ahead = sum(seq >= first for seq in stream.ready) if marks else 0
            yield StreamState(stream=number, ready=len(stream.ready), ahead=ahead)

    def _readers_told(self) -> Iterator[ReaderState]:
        for slot, waits in sorted(self.waits.items()):
            mark = self.ring.marks.get(slot)
            yield ReaderState(
                slot=slot,
                stream=waits.stream,
                taken=waits.taken,
                waits=waits.waits,
                waited_s=waits.waited_s,
                share=waits.share,
                starved=mark is not None and mark.alive and mark.sent <= mark.next,
            )


def _check_sealed(memory: int, said: m.RingMade) -> None:
    """Raise ProtocolError unless the batch is as long as was said, and the kernel refuses every change."""
    if fcntl.fcntl(memory, fcntl.F_GET_SEALS) != m.ALL_SEALS:
        raise ProtocolError(f"batch {said.seq} of stream {said.stream} is not sealed")
    nbytes = os.fstat(memory).st_size
    if nbytes != said.nbytes or not nbytes:
        raise ProtocolError(f"batch {said.seq} of stream {said.stream} has {nbytes} bytes, not {said.nbytes}")
