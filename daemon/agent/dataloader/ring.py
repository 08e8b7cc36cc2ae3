"""The batches of a loader that a node makes, keeps and gives to its readers: a state machine.

Pure: every input gives back what is to be done. Readers take their stream's batches in order. A batch is kept
until no reader can be sent back behind it, or until its memory is wanted for one that comes next: then the
newest of those that all have taken go first, so that after a fault the first batches are there, and the rest
is made again meanwhile. What a reader needs next is made even where the budget is used up: readers wait for
each other in collectives, and one that got nothing for want of room would hold up those that could make some.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptless.daemon.protocol.ring import AHEAD, RingMake

# Batches that a producer has been asked for and has not made yet: it need not wait between two.
JOBS = 2
# So many producers in a row that died without a batch: another one would not help.
DEATHS = 3
OTHERS_FOLLOW = (
    "another rank with the same part of the data stands at another position: ranks of one replica must go on "
    "from the same one"
)


# -------------------------------------------------------------------------- what an agent is to do


@dataclass(frozen=True)
class Give:
    """Send a reader a batch."""

    reader: int
    stream: int
    seq: int


@dataclass(frozen=True)
class GiveEnd:
    """Tell a reader that there is no batch `seq`."""

    reader: int
    seq: int


@dataclass(frozen=True)
class GiveUp:
    """Tell a reader that batch `seq` could not be made."""

    reader: int
    seq: int
    text: str


@dataclass(frozen=True)
class Grant:
    """Have this reader's process start the producer."""

    reader: int
    lease: int


@dataclass(frozen=True)
class FreeBatch:
    """Give the memory of a batch back."""

    stream: int
    seq: int


@dataclass(frozen=True)
class Note:
    """Something worth an event."""

    kind: str
    text: str


Action: TypeAlias = Give | GiveEnd | GiveUp | Grant | RingMake | FreeBatch | Note


# ---------------------------------------------------------------------------- what a ring knows


@dataclass
class Mark:
    """A reader takes `next` next, never goes back before `done`, and was sent what is before `sent`."""

    stream: int
    next: int
    done: int
    sent: int
    alive: bool = True
    # Whether it knows already why there is nothing behind `sent`.
    told: bool = False
    # It was sent what came of another position, and gets nothing that does not follow from that.
    held: bool = False


@dataclass
class StreamState:
    """`positions` are those before each batch; `history` is a new number where another one is begun."""

    history: int
    ready: dict[int, int] = field(default_factory=dict)
    positions: dict[int, bytes] = field(default_factory=dict)
    end: int | None = None
    failed: tuple[int, str] | None = None


@dataclass
class _Job:
    """A batch that the producer has been asked for; nobody wants it any more if it is `stale`."""

    make: RingMake
    stale: bool = False


class Ring:
    """One loader's batches on one node. Every method but the properties returns what is to be done."""

    def __init__(self, window: int, budget_nbytes: int, leases: Iterator[int] | None = None) -> None:
        """`leases`: numbers that no other lease of the agent has."""
        self._window, self._budget = window, budget_nbytes
        self._leases = leases or itertools.count(1)
        self.streams: dict[int, StreamState] = {}
        self.marks: dict[int, Mark] = {}
        self._open: set[int] = set()
        self._late: set[int] = set()
        self._jobs: list[_Job] = []
        self._lease = 0
        self._granted: int | None = None
        self._up = False
        self._deaths = 0
        self._largest = 0
        self._histories = 0
        self._over = False

    # ------------------------------------------------------------------------------------- facts

    @property
    def used_nbytes(self) -> int:
        """Bytes of all batches that are there."""
        return sum(sum(stream.ready.values()) for stream in self.streams.values())

    @property
    def idle(self) -> bool:
        """Whether no reader knows this ring any more, the dead ones included."""
        return not self.marks and not self._open

    def wants(self, stream: int, seq: int) -> bool | None:
        """Whether the oldest batch that was asked for is still wanted; None where it is not this one."""
        if not self._jobs or (self._jobs[0].make.stream, self._jobs[0].make.seq) != (stream, seq):
            return None
        return not self._jobs[0].stale

    # ----------------------------------------------------------------------------------- readers

    def open(self, reader: int) -> list[Action]:
        """A reader's process is there."""
        self._open.add(reader)
        self._late.discard(reader)
        return self._decide()

    def seek(self, reader: int, stream: int, seq: int, position: bytes) -> list[Action]:
        """A reader wants the batches from `seq` on, which follow `position`."""
        out: list[Action] = []
        former = self.marks.get(reader)
        # One that lives and goes on to another stream has come to an epoch's end.
        again = former is not None and not (former.alive and former.stream != stream)
        if stream not in self.streams:
            self._histories += 1
            self.streams[stream] = StreamState(self._histories)
        found = self.streams[stream]
        self._deaths = 0
        found.failed = None
        # Before the oldest position that is known nothing can be compared: `made` does it where they meet.
        if found.positions.setdefault(seq, position) != position:
            out += self._begin_anew(stream, 0, seq, position)
        self.marks[reader] = Mark(stream, seq, seq, seq)
        if again:
            there = next(at for at in itertools.count(seq) if at not in found.ready) - seq
            text = f"reader {reader} goes on with batch {seq} of stream {stream}: {there} were there"
            out.append(Note("ring-resumed", text))
        return out + self._decide()

    def _begin_anew(self, number: int, first: int, seq: int, position: bytes) -> list[Action]:
        """Drop what is here from `first` on: it does not belong to `position`, which is that before `seq`."""
        stream = self.streams[number]
        gone = [other for other in stream.ready if other >= first]
        for other in gone:
            del stream.ready[other]
        stream.positions = {at: where for at, where in stream.positions.items() if at < first}
        stream.positions[seq] = position
        self._histories += 1
        stream.history = self._histories
        stream.end = None
        for job in self._jobs:
            job.stale = job.stale or job.make.stream == number
        for mark in self.marks.values():
            if mark.stream == number:
                mark.held, mark.told = mark.held or mark.sent >= first, False
        text = f"{len(gone)} batches of stream {number}, from {first} on, are not used: others follow now"
        return [*(FreeBatch(number, other) for other in gone), Note("ring-position", text)]

    def took(self, reader: int, seq: int, done: int) -> list[Action]:
        """A reader has taken `seq`, and is never sent back before `done`."""
        mark = self.marks.get(reader)
        if mark is not None:
            mark.next = max(mark.next, seq + 1)
            mark.done = max(mark.done, min(done, mark.next))
        return self._decide()

    def gone(self, reader: int) -> list[Action]:
        """A reader's process has ended; what it may be asked for again is kept."""
        self._open.discard(reader)
        if (mark := self.marks.get(reader)) is not None:
            mark.alive = False
        if self._granted == reader and not self._up:
            self._granted = None
        return self._decide()

    def forget(self, reader: int) -> list[Action]:
        """Drop what this reader holds: nobody will come back as it."""
        self._open.discard(reader)
        self.marks.pop(reader, None)
        return self._decide()

    # ---------------------------------------------------------------------------------- producer

    def producer_up(self, lease: int) -> tuple[bool, list[Action]]:
        """A producer with this lease is there: whether it is the one, and what is to be done."""
        if self._granted is None or lease != self._lease or self._up:
            return False, []
        self._up = True
        self._late.clear()
        return True, self._decide()

    def producer_gone(self) -> list[Action]:
        """The producer has ended."""
        out: list[Action] = []
        self._up, self._granted = False, None
        self._jobs.clear()
        self._deaths += 1
        if self._deaths >= DEATHS:
            text = (
                f"the process that makes the batches died {self._deaths} times in a row: was it short of "
                "memory, or does the data set's code end it?"
            )
            for _lead, number, seq in self._missing():
                self.streams[number].failed = (seq, text)
            out.append(Note("ring-producer", text))
        return out + self._decide()

    def lease_late(self, lease: int) -> list[Action]:
        """Ask another reader to start the producer: the one that was to has not done so in time."""
        if self._granted is not None and lease == self._lease and not self._up:
            self._late.add(self._granted)
            self._granted = None
        return self._decide()

    def made(self, stream: int, seq: int, nbytes: int, position: bytes) -> list[Action]:
        """The oldest batch that was asked for is there, verified; `wants` it was true."""
        self._finish(stream, seq)
        found, out = self.streams[stream], []
        found.ready[seq] = nbytes
        self._deaths = 0
        self._largest = max(self._largest, nbytes)
        if found.positions.setdefault(seq + 1, position) != position:
            out = self._begin_anew(stream, seq + 1, seq + 1, position)
        return out + self._decide()

    def unwanted(self) -> list[Action]:
        """Something has been said of the oldest batch that was asked for, and nobody wants it any more."""
        self._jobs.pop(0)
        return self._decide()

    def at_end(self, stream: int, seq: int) -> list[Action]:
        """Answer the oldest batch that was asked for: there is none."""
        self._finish(stream, seq)
        self.streams[stream].end = seq
        self._skip_rest(stream)
        return self._decide()

    def failed(self, stream: int, seq: int, text: str) -> list[Action]:
        """Answer the oldest batch that was asked for: it cannot be made."""
        self._finish(stream, seq)
        self.streams[stream].failed = (seq, text)
        self._skip_rest(stream)
        return self._decide()

    def _finish(self, stream: int, seq: int) -> None:
        assert self.wants(stream, seq)
        self._jobs.pop(0)

    def _skip_rest(self, stream: int) -> None:
        """Forget what was asked for behind the end; its answer changes nothing."""
        for job in self._jobs:
            job.stale = job.stale or job.make.stream == stream

    # ---------------------------------------------------------------------------------- decide

    def _decide(self) -> list[Action]:
        out = [*self._free(), *self._give(), *self._grant()]
        while self._up and len(self._jobs) < JOBS and (job := self._next_job(out)) is not None:
            self._jobs.append(_Job(job))
            out.append(job)
        return out

    def _free(self) -> Iterator[Action]:
        """Free the batches that no reader can be sent back to."""
        for number, stream in list(self.streams.items()):
            marks = [mark for mark in self.marks.values() if mark.stream == number]
            floor = min((mark.done for mark in marks), default=None)
            for seq in [seq for seq in stream.ready if floor is None or seq < floor]:
                del stream.ready[seq]
                yield FreeBatch(number, seq)
            if floor is None:
                del self.streams[number]
                for job in self._jobs:
                    job.stale = job.stale or job.make.stream == number
            else:
                stream.positions = {seq: at for seq, at in stream.positions.items() if seq >= floor}

    def _give(self) -> Iterator[Action]:
        for reader, mark in self.marks.items():
            stream = self.streams[mark.stream]
            if mark.held:
                if mark.alive and not mark.told:
                    mark.told = True
                    yield GiveUp(reader, mark.sent, OTHERS_FOLLOW)
                continue
            while mark.alive and mark.sent in stream.ready and mark.sent < mark.next + AHEAD:
                yield Give(reader, mark.stream, mark.sent)
                mark.sent += 1
            if not mark.alive or mark.told or mark.sent in stream.ready:
                continue
            if stream.end is not None and mark.sent >= stream.end:
                mark.told = True
                yield GiveEnd(reader, mark.sent)
            elif stream.failed is not None and mark.sent >= stream.failed[0]:
                mark.told = True
                yield GiveUp(reader, mark.sent, stream.failed[1])

    def _grant(self) -> Iterator[Action]:
        """A lease, where there is something to make and nobody who does.

        It is taken back from one that does not wait when another one does: that could be whom the first one
        waits for in a collective, and so would not come to take its next batch.
        """
        able = {reader for reader, mark in self.marks.items() if mark.alive and reader in self._open}
        if self._up or not able or next(self._missing(), None) is None:
            return
        # One that waits for a batch acts on it at once, the others when they take their next one.
        waiting = {reader for reader in able if self.marks[reader].sent <= self.marks[reader].next}
        if self._granted is not None and (self._granted in waiting or not waiting - self._late):
            return
        if able <= self._late:
            self._late.clear()
        self._granted = min(able - self._late, key=lambda reader: (reader not in waiting, reader))
        self._lease = next(self._leases)
        yield Grant(self._granted, self._lease)

    def _missing(self) -> Iterator[tuple[int, int, int]]:
        """Return the first batch that each reader's window will lack: (how far ahead, stream, it)."""
        asked = {(job.make.stream, job.make.seq) for job in self._jobs if not job.stale}
        for mark in self.marks.values():
            if not mark.alive or mark.held:
                continue
            stream, seq = self.streams[mark.stream], mark.next
            while seq in stream.ready or (mark.stream, seq) in asked:
                seq += 1
            over = stream.end is not None and seq >= stream.end
            broken = stream.failed is not None and seq >= stream.failed[0]
            if not over and not broken and seq < mark.next + self._window:
                yield seq - mark.next, mark.stream, seq

    def _next_job(self, out: list[Action]) -> RingMake | None:
        found = min(self._missing(), default=None)
        if found is None:
            return None
        lead, number, seq = found
        expected = self._largest * (len(self._jobs) + 1)
        out += self._make_room(expected, needed=lead == 0)
        over = self.used_nbytes + expected > self._budget
        if over and lead > 0:
            return None
        if over and not self._over:
            text = (
                f"{self.used_nbytes + expected} bytes for what is needed next; the budget is {self._budget}: "
                "give the loader more memory, or it makes nothing ahead"
            )
            out.append(Note("ring-over-budget", text))
        self._over = self._over or over
        stream = self.streams[number]
        base = max(at for at in stream.positions if at <= seq)
        return RingMake(
            stream=number, history=stream.history, seq=seq, base=base, position=stream.positions[base]
        )

    # ------------------------------------------------------------------------------------- room

    def _make_room(self, expected: int, *, needed: bool) -> Iterator[Action]:
        """Drop batches that are kept for a recovery only: for what is needed next all, else down to half."""
        spared = 0 if needed else self._budget // 2
        while self.used_nbytes + expected > self._budget:
            kept = [
                (seq, number)
                for number, stream in self.streams.items()
                for seq in stream.ready
                if not self._is_ahead(number, seq)
            ]
            if sum(self.streams[number].ready[seq] for seq, number in kept) <= spared or not kept:
                return
            seq, number = max(kept)
            del self.streams[number].ready[seq]
            yield FreeBatch(number, seq)

    def _is_ahead(self, stream: int, seq: int) -> bool:
        """Whether a living reader has it still before it."""
        marks = (mark for mark in self.marks.values() if mark.alive and not mark.held)
        return any(mark.stream == stream and mark.next <= seq for mark in marks)
