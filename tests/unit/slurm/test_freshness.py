"""When Slurm is asked, and what an answer is worth, over thousands of histories."""

import itertools
import math
from dataclasses import dataclass, field
from random import Random

import pytest

from ckptless.daemon.slurm.freshness import PollPace, Track

PACE = PollPace(min_interval_s=1.0, most_interval_s=30.0)


def asked(*begun_s: float) -> Track:
    """One whose queries began then; the last one is under way, the others were answered."""
    track = Track(PACE)
    for at_s in begun_s:
        if track.in_flight:
            track.end()
        track.begin(at_s)
    return track


def test_an_answer_is_as_old_as_the_beginning_of_its_query() -> None:
    track = asked(10.0)
    track.end()
    assert track.answered_s == 10.0
    assert track.fresh(10.0)
    assert not track.fresh(10.1)
    assert track.next_s == 10.0 + PACE.min_interval_s
    assert Track(PACE).answered_s == -math.inf


def test_after_an_order_of_ours_old_answers_are_not_fresh_and_one_query_may_begin_at_once() -> None:
    track = asked(10.0)
    track.end()
    track.change(10.2)
    assert not track.fresh(0.0)
    assert track.next_s == -math.inf
    # It began no later than the order was over: what it says may be from before.
    track.begin(10.2)
    track.end()
    assert not track.fresh(0.0)
    track.change(10.3)
    assert track.next_s == -math.inf
    track.begin(10.4)
    track.end()
    assert track.fresh(0.0)
    # The same order gives one early query, not two.
    track.change(10.5)
    track.begin(10.6)
    track.end("away")
    assert track.next_s > 10.6


def test_a_query_that_began_before_an_order_says_nothing_of_it() -> None:
    track = asked(10.0)
    track.change(10.1)
    track.end()
    assert not track.fresh(0.0)
    assert track.next_s == -math.inf


def test_failures_are_further_and_further_apart() -> None:
    track, now_s, gaps = Track(PACE), 0.0, []
    for _ in range(2000):
        track.begin(now_s)
        track.end("away")
        track.change(now_s)
        gaps.append(track.next_s - now_s)
        now_s = track.next_s
        assert track.trouble == "away"
    assert gaps[:6] == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert set(gaps[5:]) == {30.0}
    track.begin(now_s)
    track.end()
    assert (track.failures, track.trouble, track.next_s) == (0, "", now_s + 1.0)


@pytest.mark.parametrize(("least", "most"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, math.inf)])
def test_a_pace_that_is_none(least: float, most: float) -> None:
    with pytest.raises(ValueError, match="pace"):
        PollPace(min_interval_s=least, most_interval_s=most)


@dataclass
class History:
    """A model beside the track: the plain lists of what happened, from which the promises are checked."""

    track: Track = field(default_factory=lambda: Track(PACE))
    now_s: float = 0.0
    began: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)

    def read(self, max_age_s: float) -> None:
        oldest_s = self.now_s - max_age_s
        fresh = [at for at in self.answered if at >= oldest_s and all(at > change for change in self.changed)]
        assert self.track.fresh(oldest_s) == bool(fresh)
        if not fresh and not self.track.in_flight and self.now_s >= self.track.next_s:
            self.track.begin(self.now_s)
            self.began.append(self.now_s)

    def end(self, ok: bool) -> None:
        if self.track.in_flight:
            self.track.end("" if ok else "away")
            if ok:
                self.answered.append(self.began[-1])

    def change(self) -> None:
        self.track.change(self.now_s)
        self.changed.append(self.now_s)


def live(random: Random) -> History:
    """Sixty things that happen, in any order, then a reader who has time."""
    history = History()
    for _ in range(random.randrange(60)):
        what = random.randrange(4)
        if what == 0:
            history.now_s += random.choice([0.0, 0.01, 0.5, 1.0, 3.0, 40.0])
        elif what == 1:
            history.read(random.choice([0.0, 0.1, 1.0, 5.0]))
        elif what == 2:
            history.end(ok=random.random() < 0.5)
        else:
            history.change()
    history.now_s += PACE.most_interval_s
    history.end(ok=True)
    history.now_s += PACE.most_interval_s
    history.read(0.0)
    history.end(ok=True)
    return history


@pytest.mark.parametrize("hundred", range(50))
def test_any_history(hundred: int) -> None:
    for seed in range(hundred * 100, hundred * 100 + 100):
        history = live(Random(seed))
        # However many read, and however greedily: an interval apart, but for one early query per order.
        gaps = [after - before for before, after in itertools.pairwise(history.began)]
        assert sum(gap < PACE.min_interval_s - 1e-9 for gap in gaps) <= len(history.changed), seed
        # Who waits long enough gets an answer from after now, and from after every order.
        assert history.track.answered_s == history.now_s, seed
        assert history.track.fresh(history.now_s), seed
