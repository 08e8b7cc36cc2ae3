"""A ring in any order of events: every reader gets its batches in order, nothing is lost, nobody hangs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ckptless.daemon.agent.dataloader import ring as r
from ckptless.daemon.agent.dataloader.ring import DEATHS, JOBS, Ring
from ckptless.daemon.protocol.ring import RingMake

WINDOW = 3
READERS = 4
STREAMS = 2
END = 14
UNIT = 10
# A batch follows a position, which is a number: 10 more for each batch, and another one's last digit differs.
Op = tuple[str, int, int]


def position(value: int) -> bytes:
    return str(value).encode()


@dataclass
class Reader:
    """What a rank would do: take in order, commit now and then, be sent back to the last commit."""

    stream: int
    next: int = 0
    value: int = 0
    done: int = 0
    done_value: int = 0
    alive: bool = False
    queue: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False
    broken: bool = False
    taken: int = 0


class World:
    """Readers, one producer at a time, and a ring between them."""

    def __init__(self, budget: int, make_ring: Callable[[int, int], Ring] = Ring) -> None:
        self.budget = budget
        self.ring = make_ring(WINDOW, budget)
        self.readers = [Reader(stream=i % STREAMS) for i in range(READERS)]
        self.memory: dict[tuple[int, int], int] = {}
        self.producers: list[int] = []
        self.grants: list[tuple[int, int]] = []
        self.jobs: list[RingMake] = []
        self.stands: dict[int, tuple[int, int, int]] = {}
        self.told: list[r.Note] = []
        self.fails: set[int] = set()
        self.end = END

    # ------------------------------------------------------------------------------ what it does

    def do(self, actions: list[r.Action]) -> None:
        anew = any(isinstance(action, r.Note) and action.kind == "ring-position" for action in actions)
        for action in actions:
            match action:
                case r.Give():
                    reader = self.readers[action.reader]
                    assert reader.alive
                    assert action.stream == reader.stream
                    reader.queue.append((action.seq, self.memory[(action.stream, action.seq)]))
                case r.GiveEnd():
                    assert action.seq == self.end
                    self.readers[action.reader].ended = True
                case r.GiveUp():
                    self.readers[action.reader].broken = True
                case r.Grant():
                    assert self.readers[action.reader].alive
                    self.grants.append((action.reader, action.lease))
                case RingMake():
                    assert self.producers, "asked of nobody"
                    self.jobs.append(action)
                case r.FreeBatch():
                    del self.memory[(action.stream, action.seq)]
                    ahead = [one for one in self.readers if one.alive and one.next <= action.seq]
                    assert anew or all(one.stream != action.stream for one in ahead), "still to be taken"
                case r.Note():
                    self.told.append(action)
        self.check()

    def check(self) -> None:
        assert len(self.producers) <= 1
        assert set(self.memory) == {(s, seq) for s, one in self.ring.streams.items() for seq in one.ready}
        for stream, seq in self.memory:
            dones = [reader.done for reader in self.readers if reader.stream == stream]
            assert seq >= min(dones), "kept, and nobody can be sent back to it"
        if not any(tell.kind == "ring-over-budget" for tell in self.told):
            assert self.ring.used_nbytes <= self.budget + JOBS * UNIT
        # Of those that have died, too: what was made for them while they lived stays.
        needed = len({(reader.stream, reader.next) for reader in self.readers})
        assert self.ring.used_nbytes <= max(self.budget, (WINDOW + 1) * needed * UNIT) + JOBS * UNIT

    # --------------------------------------------------------------------------- what happens

    def seek(self, index: int) -> None:
        reader = self.readers[index]
        if not reader.alive:
            reader.alive = True
            self.do(self.ring.open(index))
        reader.next, reader.value = reader.done, reader.done_value
        reader.queue, reader.ended, reader.broken = [], False, False
        self.do(self.ring.seek(index, reader.stream, reader.next, position(reader.value)))

    def take(self, index: int, commit: int) -> None:
        reader = self.readers[index]
        if not reader.alive or not reader.queue:
            return
        seq, value = reader.queue.pop(0)
        assert (seq, value) == (reader.next, reader.value), "another batch than the next one"
        reader.next, reader.value = seq + 1, value + UNIT
        reader.taken += 1
        if commit:
            # All but the last `commit` - 1 of what was taken.
            back = min(commit - 1, reader.next - reader.done)
            reader.done, reader.done_value = reader.next - back, reader.value - UNIT * back
        self.do(self.ring.took(index, seq, reader.done))

    def die(self, index: int) -> None:
        reader = self.readers[index]
        if not reader.alive:
            return
        if index in self.producers:
            # It ends with its rank, and may be missed first.
            self.lose_producer()
        reader.alive, reader.queue = False, []
        self.do(self.ring.gone(index))

    def other_data(self, stream: int) -> None:
        """A recovery goes on from a position that is not the one that this ring knows."""
        same = [reader for reader in self.readers if reader.stream == stream]
        back = min(reader.done for reader in same)
        value = min(reader.done_value for reader in same if reader.done == back) + 1
        if value % UNIT:
            for reader in same:
                reader.done, reader.done_value = back, value
            for reader in same:
                reader.queue.clear()
            for index, reader in enumerate(self.readers):
                if reader.stream == stream and reader.alive:
                    self.seek(index)

    def start_producer(self) -> None:
        if self.grants:
            reader, lease = self.grants.pop(0)
            welcome, actions = self.ring.producer_up(lease)
            if welcome:
                assert not self.producers, "two producers"
                self.producers.append(reader)
                self.stands, self.jobs = {}, []
            self.do(actions)

    def lose_producer(self) -> None:
        if self.producers:
            self.producers.clear()
            self.jobs.clear()
            self.do(self.ring.producer_gone())

    def be_late(self) -> None:
        if self.grants:
            self.do(self.ring.lease_late(self.grants[-1][1]))

    def make(self) -> None:
        if not self.jobs:
            return
        job = self.jobs.pop(0)
        history, at, value = self.stands.get(job.stream, (-1, -1, -1))
        if (history, at) != (job.history, job.seq):
            at, value = job.seq, int(job.position) + UNIT * (job.seq - job.base)
        wanted = self.ring.wants(job.stream, job.seq)
        assert wanted is not None, "not what was asked for"
        if not wanted:
            self.do(self.ring.unwanted())
        elif job.stream in self.fails:
            self.fails.discard(job.stream)
            self.stands.pop(job.stream, None)
            self.do(self.ring.failed(job.stream, job.seq, "it raised"))
            return
        elif job.seq >= self.end:
            self.do(self.ring.at_end(job.stream, job.seq))
        else:
            # Free must not find it before it is there.
            self.memory[(job.stream, job.seq)] = value
            self.do(self.ring.made(job.stream, job.seq, UNIT, position(value + UNIT)))
        self.stands[job.stream] = (job.history, at + 1, value + UNIT)

    def apply(self, op: Op) -> None:
        kind, a, b = op
        match kind:
            case "seek":
                self.seek(a % READERS)
            case "take":
                self.take(a % READERS, b)
            case "die":
                self.die(a % READERS)
            case "other":
                self.other_data(a % STREAMS)
            case "start":
                self.start_producer()
            case "lose":
                self.lose_producer()
            case "late":
                self.be_late()
            case "make":
                self.make()
            case "fail":
                self.fails.add(a % STREAMS)

    def settle(self) -> None:
        """Nothing breaks any more: all of them get to the end, in lock-step, as collectives have it."""
        self.fails.clear()
        for index in range(READERS):
            self.seek(index)
        for _ in range(END * READERS * 6):
            while self.grants:
                self.start_producer()
            self.make()
            slowest = min(reader.next for reader in self.readers)
            for index, reader in enumerate(self.readers):
                if reader.broken:
                    self.seek(index)
                elif reader.next == slowest:
                    self.take(index, 2)
            if all(reader.ended and reader.next == END for reader in self.readers):
                return
        raise AssertionError(f"it hangs: {self.readers}, {self.ring.__dict__}")


kinds = (
    "seek",
    "take",
    "take",
    "take",
    "die",
    "other",
    "start",
    "lose",
    "late",
    "make",
    "make",
    "make",
    "fail",
)
ops = st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 7), st.integers(0, 4)), max_size=80)


def play(budget: int, todo: list[Op], make_ring: Callable[[int, int], Ring] = Ring) -> World:
    world = World(budget, make_ring)
    world.seek(0)
    world.seek(1)
    world.start_producer()
    for op in todo:
        world.apply(op)
    world.settle()
    return world


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([1, 30, 60, 200, 1000]), ops)
def test_any_order(budget: int, todo: list[Op]) -> None:
    play(budget, todo)


# --------------------------------------------------------------------------------------- planted bugs


class FreesEarly(Ring):
    """Gives back what has been taken, committed or not: still right, since it is made again, but not warm."""

    def took(self, reader: int, seq: int, done: int) -> list[r.Action]:
        return super().took(reader, seq, seq + 1)


class DropsAhead(Ring):
    """Takes the room of batches that a reader is about to be sent."""

    def _is_ahead(self, stream: int, seq: int) -> bool:
        return False


class NeverOver(Ring):
    """Makes nothing beyond the budget."""

    def _next_job(self, out: list[r.Action]) -> RingMake | None:
        if self.used_nbytes + self._largest > self._budget:
            return None
        return super()._next_job(out)


class TwoProducers(Ring):
    """Gives another lease while the one that has it may still come."""

    def producer_up(self, lease: int) -> tuple[bool, list[r.Action]]:
        self._up, self._granted = False, 0 if self._granted is None else self._granted
        self._lease = lease
        return super().producer_up(lease)


class OneHistory(Ring):
    """Lets the producer go on where it stands, though another position is to be gone on from."""

    def _next_job(self, out: list[r.Action]) -> RingMake | None:
        made = super()._next_job(out)
        return None if made is None else structs.replace(made, history=0)


class ForgetsJobs(Ring):
    """Has what a dead producer was asked for stand as asked for."""

    def producer_gone(self) -> list[r.Action]:
        kept = list(self._jobs)
        out = super().producer_gone()
        self._jobs = kept
        return out


class KeepsEnd(Ring):
    """Takes the end of what came before for the end of what is made now."""

    def _begin_anew(self, number: int, first: int, seq: int, position: bytes) -> list[r.Action]:
        end = self.streams[number].end
        out = super()._begin_anew(number, first, seq, position)
        self.streams[number].end = end
        return out


class TrustsPosition(Ring):
    """Gives out what is there, though it follows another position than the reader's."""

    def _begin_anew(self, number: int, first: int, seq: int, where: bytes) -> list[r.Action]:
        return []


class TakesStale(Ring):
    """Keeps what was asked for before another position was said."""

    def wants(self, stream: int, seq: int) -> bool | None:
        for job in self._jobs:
            job.stale = False
        return super().wants(stream, seq)


class KeepsSending(Ring):
    """Sends a reader what follows another position than what it was sent before."""

    def _begin_anew(self, number: int, first: int, seq: int, position: bytes) -> list[r.Action]:
        out = super()._begin_anew(number, first, seq, position)
        for mark in self.marks.values():
            mark.held = False
        return out


def goes_on_elsewhere(make_ring: Callable[[int, int], Ring]) -> None:
    """The producer stands at the number that comes next, but of other data."""
    world = World(1000, make_ring)
    world.seek(0)
    world.start_producer()
    for _ in range(WINDOW):
        world.make()
    for reader in world.readers:
        if reader.stream == 0:
            reader.done, reader.done_value = WINDOW, WINDOW * UNIT + 1
    world.seek(0)
    world.settle()


def ends_elsewhere(make_ring: Callable[[int, int], Ring]) -> None:
    """The other data are longer."""
    world = World(1000, make_ring)
    world.end = 2
    world.seek(0)
    world.start_producer()
    for _ in range(4):
        world.make()
    assert world.readers[0].ended
    world.end = END
    world.other_data(0)
    world.settle()


def one_of_two_seeks(make_ring: Callable[[int, int], Ring]) -> None:
    """Two readers of a stream, and one of them goes on from another position: the other is not misled."""
    world = World(1000, make_ring)
    world.seek(0)
    world.seek(2)
    world.start_producer()
    for _ in range(WINDOW):
        world.make()
    other, misled = world.readers[0], world.readers[2]
    other.done, other.done_value = 1, UNIT + 1
    sent = len(misled.queue)
    world.seek(0)
    for _ in range(2 * WINDOW):
        world.make()
    assert len(misled.queue) == sent
    assert misled.broken


def in_order(*todo: Op, budget: int = 30) -> Callable[[Callable[[int, int], Ring]], None]:
    return lambda make_ring: void(play(budget, list(todo), make_ring))


def void(_world: World) -> None:
    """What is asked for is whether it gets there."""


SCHEDULES: dict[Any, Callable[[Callable[[int, int], Ring]], None]] = {
    DropsAhead: in_order(),
    NeverOver: in_order(budget=1),
    TwoProducers: in_order(("lose", 0, 0), ("late", 0, 0)),
    OneHistory: goes_on_elsewhere,
    ForgetsJobs: in_order(("lose", 0, 0)),
    KeepsEnd: ends_elsewhere,
    TrustsPosition: in_order(("other", 1, 0)),
    TakesStale: in_order(("other", 0, 0), budget=200),
    KeepsSending: one_of_two_seeks,
}


@pytest.mark.parametrize("bug", SCHEDULES)
def test_planted_bugs_are_found(bug: Callable[[int, int], Ring]) -> None:
    SCHEDULES[bug](Ring)
    # Any of the ring's or the world's own checks will do.
    with pytest.raises((AssertionError, KeyError, ValueError)):
        SCHEDULES[bug](bug)


def test_a_reader_that_comes_late_to_its_stream() -> None:
    play(60, [*[("make", 0, 0)] * 4, ("take", 1, 1)])


# -------------------------------------------------------------------------------------------- warmth


def filled(budget: int = 1000, make_ring: Callable[[int, int], Ring] = Ring) -> World:
    """Reader 0 has taken 10 batches, and committed 8."""
    world = World(budget, make_ring)
    world.seek(0)
    world.start_producer()
    for taken in range(10):
        for _ in range(4):
            world.make()
        world.take(0, 1 if taken < 8 else 0)
    return world


def test_after_a_death_the_next_batches_are_there() -> None:
    world = filled()
    world.die(0)
    world.seek(0)
    assert [seq for seq, _ in world.readers[0].queue] == [8, 9, 10, 11]


def test_it_is_seen_where_they_are_not() -> None:
    world = filled(make_ring=FreesEarly)
    world.die(0)
    world.seek(0)
    assert not world.readers[0].queue


def test_where_memory_is_short_the_first_ones_are_there() -> None:
    world = World(budget=80)
    world.seek(0)
    world.start_producer()
    for _ in range(12):
        for _ in range(4):
            world.make()
        world.take(0, 0)
    world.die(0)
    world.seek(0)
    assert [seq for seq, _ in world.readers[0].queue] == [0, 1, 2, 3, 4]
    world.settle()


def test_readers_of_one_stream_share_its_batches() -> None:
    world = World(budget=1000)
    world.readers = [Reader(stream=0) for _ in range(READERS)]
    for index in range(READERS):
        world.seek(index)
    world.start_producer()
    for _ in range(10):
        world.make()
    assert len(world.memory) == WINDOW
    assert all(len(reader.queue) == WINDOW for reader in world.readers)


def test_a_producer_that_dies_again_and_again() -> None:
    world = World(budget=1000)
    world.seek(0)
    for _ in range(DEATHS):
        assert not world.readers[0].broken
        world.start_producer()
        world.lose_producer()
    assert world.readers[0].broken
    assert [tell.kind for tell in world.told] == ["ring-producer"]
    world.settle()


def test_a_lease_that_nobody_acts_on_goes_to_another() -> None:
    world = World(budget=1000)
    world.seek(0)
    world.seek(1)
    (first, _), *_ = world.grants
    world.be_late()
    assert world.grants[-1][0] != first
    welcome, _ = world.ring.producer_up(world.grants[0][1])
    assert not welcome


def test_a_lease_goes_to_one_that_waits() -> None:
    world = filled()
    world.lose_producer()
    assert world.grants[-1][0] == 0
    assert world.readers[0].queue
    world.seek(1)
    assert world.grants[-1][0] == 1
    world.start_producer()
    assert not world.producers
    world.start_producer()
    assert world.producers == [1]
    world.settle()


def test_what_nobody_comes_back_for_is_given_back() -> None:
    world = filled()
    world.die(0)
    assert world.memory
    world.readers.clear()
    world.do(world.ring.forget(0))
    assert not world.memory
    assert world.ring.idle
