"""When a rank counts as late, what its process is at, and what the rank waits in."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from ckptless.daemon.agent.core.slots import Slot
from ckptless.daemon.agent.core.stillness import (
    ASLEEP,
    DEAF_S,
    FEWEST,
    FLOOR_S,
    OVER_S,
    RECENT,
    TIMES,
    TIMES_EVER,
    WINDOW,
    Activity,
    Rhythm,
    Watched,
    waits_in,
)
from ckptless.daemon.agent.ranks.activity import activity
from ckptless.daemon.agent.ranks.standing import Page, Standing, is_in_script
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.page import FOR_AGENT, GroupCalls, Stepped
from ckptless.pytorch_hooks.agent_session.page import FIRST_STEPS
from ckptless.pytorch_hooks.agent_session.page import Page as RankPage


def steps(*took_s: float, first: int = 0) -> list[Stepped]:
    return [Stepped(number, one, 0.0, 0.0, 0.0) for number, one in enumerate(took_s, first)]


def test_before_a_few_steps_nothing_is_late() -> None:
    rhythm = Rhythm()
    rhythm.take(steps(*[0.1] * (FEWEST - 1)))
    assert rhythm.late_after_s is None
    rhythm.take(steps(*[0.1] * (FEWEST - 1)))  # of another rank of the node
    assert rhythm.late_after_s is None
    rhythm.take(steps(0.1, first=FEWEST))
    assert rhythm.late_after_s == FLOOR_S


def test_the_longest_of_recent_steps_counts_and_an_older_one_less() -> None:
    rhythm = Rhythm()
    rhythm.take(steps(*[0.1] * FEWEST, 60.0))
    assert rhythm.late_after_s == TIMES * 60.0
    rhythm.take(steps(*[1.0] * (RECENT - 1), first=100))
    assert rhythm.late_after_s == TIMES * 60.0
    rhythm.take(steps(1.0, first=1000))
    assert rhythm.late_after_s == TIMES_EVER * 60.0, "an evaluation comes again"
    assert rhythm.longest_s == 1.0


def test_a_job_of_wild_steps_is_late_hardly_ever() -> None:
    """Log-normal step times, spread by a factor of e: once in a day, and then it has to sleep as well."""
    late = 0
    for seed in range(200):
        draw, rhythm, spent_s, step = random.Random(seed), Rhythm(), 0.0, 0
        while spent_s < 3600.0:
            took_s = draw.lognormvariate(0.0, 1.0)
            late += rhythm.late_after_s is not None and took_s > rhythm.late_after_s
            rhythm.take(steps(took_s, first=step))
            spent_s, step = spent_s + took_s, step + 1
    assert late <= 200 / 24


def looked(watched: Watched, now: float, *activities: Activity | None) -> None:
    """Look at what the kernel says, `OVER_S` apart."""
    for number, one in enumerate(activities):
        watched.act(one, now + number * OVER_S)


@pytest.mark.parametrize(
    ("activities", "silent_s", "how"),
    [
        ([Activity(1.0), Activity(1.0)], 0.0, "asleep"),
        ([Activity(1.0), Activity(1.0 + ASLEEP * OVER_S + 0.01)], 0.0, "working"),
        ([Activity(1.0), Activity(1.0), Activity(2.0)], 0.0, "working"),
        ([Activity(1.0), Activity(2.0), Activity(2.0)], 0.0, "asleep"),
        ([Activity(1.0, {7: 1.0}), Activity(1.0, {7: 2.0})], 0.0, "working"),  # it wants to run, and may not
        ([Activity(1.0, {7: 1.0, 8: 3.0}), Activity(1.0, {7: 1.0})], 0.0, "asleep"),  # a thread has ended
        ([Activity(1.0), Activity(1.0, {9: 1.0})], 0.0, "working"),  # another one has begun
        ([Activity(1.0), Activity(1.0, blocked=True)], 0.0, "working"),
        ([Activity(1.0, blocked=True), Activity(1.0)], 0.0, "working"),
        ([Activity(1.0), None], 0.0, "working"),
        ([Activity(1.0)], 0.0, "working"),
        ([], DEAF_S + 0.1, "deaf"),
        ([Activity(1.0), Activity(3.0)], DEAF_S + 0.1, "deaf"),
        ([Activity(1.0), Activity(3.0)], DEAF_S, "working"),
        ([Activity(1.0), Activity(1.0)], DEAF_S + 0.1, "deaf"),
        ([Activity(1.0, stopped=True)], DEAF_S + 0.1, "stopped"),
        ([Activity(1.0, stopped=True)], 0.0, "stopped"),
    ],
)
def test_what_a_process_is_at(activities: list[Activity | None], silent_s: float, how: str) -> None:
    watched = Watched(0.0)
    looked(watched, 1.0, *activities)
    assert watched.how(silent_s) == how


def test_whoever_gets_on_begins_anew() -> None:
    watched = Watched(0.0)
    assert watched.see(b"a", 1.0) == 0.0
    looked(watched, 2.0, Activity(1.0), Activity(1.0))
    watched.at = "here"
    assert watched.see(b"a", 9.0) == 8.0
    assert watched.how(0.0) == "asleep"
    moved = watched
    assert moved.see(b"b", 10.0) == 0.0
    assert moved.how(0.0) == "working"
    assert moved.at is None
    assert watched.see(b"b", 11.0) == 1.0


def group(name: str, begun: int, done: int, elements: int = 9) -> GroupCalls:
    operation = "allreduce" if name else "recv"
    return GroupCalls(name, 4, begun, done, 0, operation, elements)


@pytest.mark.parametrize(
    ("groups", "for_agent", "call"),
    [
        ([], False, None),
        ([group("", 3, 3), group("0", 5, 5)], False, None),
        ([group("0", 5, 5)], True, m.Call(group="", operation=FOR_AGENT)),
        (
            [group("", 3, 3), group("0", 5, 5), group("1", 7, 5)],
            True,
            m.Call(group="1", size=4, number=6, operation="allreduce", elements=9),
        ),
        ([group("", 3, 2), group("0", 5, 4)], False, m.Call(group="", operation="recv", peer=8)),
        ([group("", 3, 2, 0)], False, m.Call(group="", operation="recv")),
    ],
)
def test_what_a_rank_waits_in(groups: list[GroupCalls], for_agent: bool, call: m.Call | None) -> None:
    assert waits_in(groups, for_agent=for_agent) == call


def test_of_a_rank_that_stands_still_it_is_told_once() -> None:
    slot = Slot(0)
    still = m.Still(still_s=3.5, late=True, how="working", phase="compute")
    assert not slot.stands(None, None)
    assert slot.stands(still, None)
    older = structs.replace(still, still_s=4.5)
    assert not slot.stands(older, None)
    assert slot.told(0.0).still == older
    assert slot.stands(structs.replace(still, still_s=5.5, how="asleep"), None)
    assert slot.stands(None, None)
    assert slot.stands(still, None)
    over = structs.replace(still, over=True)
    assert [slot.stands(one, 50.0) for one in (still, still, over, over)] == [True, False, True, False]
    assert [slot.stands(None, until) for until in (50.0, 50.0, 60.0, None)] == [True, False, True, True]
    slot.stands(still, 50.0)
    assert [slot.told(now).allowed_s for now in (20.0, 50.0, 51.0)] == [30.0, 0.0, 0.0]
    slot.enter("left", 1, 0.0)
    told = slot.told(0.0)
    assert (told.still, told.allowed_s) == (None, None)


class Rank:
    """A rank and its agent, one look after the other."""

    def __init__(self) -> None:
        self.page = Page.make(0.0)
        self.rank = RankPage(os.dup(self.page.fd))
        self.standing = Standing(stall_s=300.0)
        self.slot = Slot(0)
        # Pages have the machine's clock.
        self.now = float(int(time.monotonic()))
        self.step = 0
        self.until: float | None = None
        self.restored()

    def restored(self) -> None:
        self.slot.enter("restored", 1, self.now)
        self.rank.begin(self.step)
        assert self.look() is None

    def steps(self, count: int, took_s: float = 0.5) -> None:
        for _ in range(count):
            self.stand(took_s)
            self.step += 1
            self.rank.stepped(self.step, self.now, 0.0)
        assert self.look() is None

    def look(self) -> m.Still | None:
        still, self.until = self.standing.look(self.page, self.slot, os.getpid(), self.now)
        return still

    def stand(self, seconds: float) -> list[m.Still]:
        """Return what is told in so many seconds without a move."""
        told, until = [], self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            if (still := self.look()) is not None:
                told.append(still)
        return told

    def close(self) -> None:
        self.page.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.close()


def test_a_rank_is_late_by_the_steps_that_its_page_has(rank: Rank) -> None:
    rank.steps(FIRST_STEPS + FEWEST)
    assert rank.stand(FLOOR_S - 0.25) == []
    (still,) = rank.stand(0.25)
    assert (still.late, still.still_s, still.longest_s, still.phase) == (True, FLOOR_S, 0.5, "compute")
    rank.steps(1, 2.0)
    assert rank.stand(TIMES * (FLOOR_S + 2.0) - 0.25) == []
    assert len(rank.stand(0.25)) == 1


def test_what_its_script_has_said_is_told_of_one_that_gets_on_too(rank: Rank) -> None:
    """In an evaluation of its own a rank may be in one collective after the other, and makes no step."""
    rank.steps(FIRST_STEPS + FEWEST)
    with rank.rank.phase("evaluation", 1000.0):
        for number in range(20):
            rank.rank.waits(for_agent=number % 2 == 0)
            assert rank.stand(0.25) == []
            assert (rank.until is None) == ((number + 1) * 0.25 < FLOOR_S)
        rank.step += 1
        rank.rank.stepped(rank.step, rank.now, 0.0)
        rank.look()
        # A step is made.
        assert rank.until is None
    with rank.rank.phase("evaluation", 1000.0):
        (*_, still) = rank.stand(TIMES * 2 * FLOOR_S)
        assert (still.phase, still.over) == ("evaluation", False)
        rank.now += 1000.0
        over = rank.look()
        assert over is not None
        assert over.over


def test_what_its_script_has_said_is_told_before_a_short_stall_is_over(rank: Rank) -> None:
    rank.standing = Standing(stall_s=2.0)
    rank.steps(1)
    with rank.rank.phase("evaluation", 1000.0):
        rank.stand(1.0)
        assert rank.until is not None


def test_before_that_it_is_told_for_the_longest_stall_alone(rank: Rank) -> None:
    rank.steps(FIRST_STEPS + FEWEST - 1)
    assert rank.stand(149.0) == []
    assert {still.late for still in rank.stand(2.0)} == {False}


def test_of_what_did_not_help_it_is_learned(rank: Rank) -> None:
    """A rank sleeps; another process, too, until its step comes: so long it may from then on."""
    rank.steps(FIRST_STEPS + FEWEST)
    assert len(rank.stand(4.0)) == 3
    rank.slot.enter("left", 1, rank.now)
    assert rank.look() is None
    rank.restored()
    assert rank.stand(30.0)
    rank.steps(1)
    rank.steps(FEWEST)
    assert rank.stand(TIMES_EVER * 30.0 - 0.5) == []
    assert rank.stand(2.0)


def test_one_whose_interpreter_is_held_is_asked_where_also_in_a_collective(rank: Rank) -> None:
    """The collective may be over: the thread that says so on the page waits for the interpreter."""
    rank.steps(FIRST_STEPS + FEWEST)
    *_, still = rank.stand(FLOOR_S)
    assert is_in_script(still)
    waits = structs.replace(still, call=m.Call(group="world", operation="all_reduce", number=7))
    assert not is_in_script(waits)
    assert is_in_script(structs.replace(waits, how="deaf"))


def test_what_ended_with_its_generation_is_no_rhythm(rank: Rank) -> None:
    rank.steps(FIRST_STEPS + FEWEST)
    rank.stand(60.0)
    rank.rank.waits(for_agent=True)
    assert rank.look() is None
    rank.slot.enter("left", 1, rank.now)
    assert rank.look() is None
    rank.restored()
    rank.steps(FIRST_STEPS + 1)
    assert rank.stand(FLOOR_S - 0.25) == []
    assert len(rank.stand(0.25)) == 1


def test_a_recovery_that_is_over_between_two_looks_ends_a_standstill(rank: Rank) -> None:
    rank.steps(FIRST_STEPS + FEWEST)
    rank.stand(4.0)
    rank.slot.enter("restored", 2, rank.now)
    rank.rank.begin(rank.step)
    rank.steps(FIRST_STEPS + 1)
    assert rank.stand(FLOOR_S - 0.25) == []
    assert len(rank.stand(0.25)) == 1


def test_a_pace_is_told_of_a_dozen_of_steps(rank: Rank) -> None:
    rank.steps(FIRST_STEPS + WINDOW - 1)
    assert rank.slot.told(0.0).pace is None
    rank.steps(1)
    pace = rank.slot.told(0.0).pace
    assert pace is not None
    assert (pace.step, pace.took_s) == (FIRST_STEPS + WINDOW, 0.5)
    rank.slot.enter("finished", 1, rank.now)
    assert rank.slot.told(0.0).pace == pace
    rank.slot.enter("assigned", 2, rank.now)
    assert rank.slot.told(0.0).pace is None


# ---------------------------------------------------------------------------------------- real processes


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import time; time.sleep(100)", "asleep"),
        ("while True: pass", "working"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])", "working"),
        ("import subprocess; [subprocess.run(['true']) for _ in iter(int, 1)]", "working"),
        ("import os; os.kill(os.getpid(), 19)", "stopped"),
    ],
)
def test_what_the_kernel_says_of_a_process(code: str, how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            watched, deadline = Watched(0.0), time.monotonic() + 30.0
            while watched.how(0.0) != how or how == "working":
                watched.act(activity(process.pid), time.monotonic())
                time.sleep(0.1)
                if watched._since is not None and how == "working" and time.monotonic() > deadline - 25.0:
                    break
                assert time.monotonic() < deadline, watched
            assert watched.how(0.0) == how
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_of_what_the_kernel_does_not_tell_all_nothing_is_known(tmp_path: Path) -> None:
    assert activity(os.getpid(), tmp_path) is None
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    (tmp_path / "7" / "stat").write_text("7 (a) S b) S " + " ".join(["1"] * 40))
    (tmp_path / "7" / "task" / "7" / "stat").write_text("7 (x) R) D " + " ".join(["1"] * 40))
    (tmp_path / "7" / "task" / "7" / "schedstat").write_text("5 2000000000 1\n")
    assert activity(7, tmp_path) is None, "this kernel names no children"
    (tmp_path / "7" / "task" / "7" / "children").write_text("\n")
    found = activity(7, tmp_path)
    assert found is not None
    assert (found.wanted_s, found.blocked, found.stopped) == ({7: 2.0}, True, False)
