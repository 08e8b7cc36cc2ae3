"""What speaks for a silent node and what against it: whose word counts, and when."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ckptless.daemon.ckptlessd.membership import watch as w
from ckptless.daemon.ckptlessd.membership.suspicion import suspicion_s
from ckptless.daemon.ckptlessd.recovery.events import AgentAnswers, NodeLost
from ckptless.daemon.protocol.peers.membership import Saw, Suspect
from ckptless.daemon.settings.config import Timers

DARK_S, BEAT_S = 1.0, 0.25
TIMES = Timers(beat_s=BEAT_S, dark_s=DARK_S)
OTHERS = (1, 2, 3, 4)


@dataclass
class Watcher:
    """Node 0, which watches nodes 1 to 4; they are connected and beat, but for node 1, which is silent."""

    now: float = 100.0
    judges: bool = True

    def __post_init__(self) -> None:
        self.it = w.Membership(0, TIMES)
        self.it.watch(OTHERS, OTHERS, self.now)
        self.said: list[w.Output] = []

    def tick(self, seconds: float = 0.125) -> list[w.Output]:
        """So much later; all but node 1 have beaten until then."""
        found: list[w.Output] = []
        for _ in range(round(seconds / 0.125)):
            self.now += 0.125
            for node in OTHERS[1:]:
                self.it.heard(node, self.now)
            self.it.tick(self.now, lambda _when: self.judges)
            found += self.it.take()
        self.said += found
        return found

    def suspect(self) -> None:
        """Until nothing has answered a look, and others were asked."""
        self.tick(DARK_S / 2 + 0.125)
        self.it.looked(1, "silent", self.now)
        self.it.take()

    @property
    def gone(self) -> list[int]:
        return [one.node for one in self.said if isinstance(one, NodeLost)]

    def says(self, node: int, *, lives: bool) -> list[w.Output]:
        self.it.hear(node, Saw(node=1, lives=lives), self.now)
        found = self.it.take()
        self.said += found
        return found


def questions(found: list[w.Output]) -> list[int]:
    return [one.node for one in found if isinstance(one, w.Say) and isinstance(one.message, Suspect)]


def test_a_refusal_does_not_beat_a_living_link() -> None:
    """The agent may just be started again, or its port be closed to this node; its daemon knows better."""
    watcher = Watcher()
    watcher.it.looked(1, "refused", watcher.now)
    assert watcher.it.take() == []
    watcher.it.unlinked(1, "the connection was reset", watcher.now)
    watcher.it.looked(1, "refused", watcher.now)
    assert [one.node for one in watcher.it.take() if isinstance(one, NodeLost)] == [1]


def seen_by_another(answer: w.Answer = "silent") -> Watcher:
    """Node 0 for long looks at node 1 itself, with that answer, while node 2 goes on to see it."""
    watcher = Watcher()
    watcher.suspect()
    for _ in range(4):
        watcher.tick(DARK_S)
        watcher.it.looked(1, answer, watcher.now)
        watcher.says(2, lives=True)
    return watcher


@pytest.mark.parametrize("sign", ["answer", "connection", "word"])
def test_who_was_not_reached_and_then_is_is_not_apart(sign: str) -> None:
    watcher = seen_by_another()
    assert watcher.it.apart(watcher.now) == {1}
    assert watcher.it.lived_since(watcher.now - 0.1) == {2, 3, 4}
    if sign == "answer":
        watcher.it.looked(1, "open", watcher.now)
    elif sign == "connection":
        watcher.it.linked(1, watcher.now)
    else:
        watcher.it.heard(1, watcher.now)
    assert watcher.it.apart(watcher.now) == frozenset()
    assert watcher.it.lived_since(watcher.now - 0.1) == {1, 2, 3, 4}
    assert watcher.it.lived_since(watcher.now) == set()


def test_who_was_given_up_is_not_apart() -> None:
    watcher = seen_by_another()
    watcher.it.known_gone(1)
    assert watcher.it.apart(watcher.now) == frozenset()


@pytest.mark.parametrize("answer", ["unsure", "refused"])
def test_only_a_look_that_nothing_answers_shows_that_a_node_is_apart(answer: w.Answer) -> None:
    watcher = Watcher()
    watcher.tick(DARK_S / 2 + 0.125)
    for _ in range(4):
        watcher.it.looked(1, answer, watcher.now)
        watcher.says(2, lives=True)
        watcher.tick(DARK_S)
    assert watcher.it.apart(watcher.now) == frozenset()


def test_one_that_nobody_has_seen_for_long_is_not_apart() -> None:
    """It may be dead. A daemon that is slow itself gives the others longer to say that they see it."""
    watcher = seen_by_another()
    watcher.it.health.score = 1
    assert watcher.it.apart(watcher.now + 1.9 * w.APART * DARK_S) == {1}
    assert watcher.it.apart(watcher.now + 2.1 * w.APART * DARK_S) == frozenset()


def test_that_others_saw_it_before_it_was_silent_here_does_not_make_it_apart() -> None:
    watcher = seen_by_another()
    watcher.it.looked(1, "open", watcher.now)
    watcher.tick()
    watcher.it.looked(1, "silent", watcher.now)
    watcher.it.health.score = 8
    assert watcher.it.apart(watcher.now + w.APART * DARK_S) == frozenset()


def test_half_of_the_time_is_silence_before_anybody_is_asked() -> None:
    watcher = Watcher()
    found = watcher.tick(DARK_S / 2)
    assert questions(found) == []
    found = watcher.tick()
    assert questions(found) == [2, 3, 4]
    # And not again before as long has passed.
    assert questions(watcher.tick(DARK_S / 2 - 0.125)) == []
    assert questions(watcher.tick()) == [2, 3, 4]


def test_one_who_says_the_same_is_not_enough() -> None:
    watcher = Watcher()
    watcher.suspect()
    watcher.says(2, lives=False)
    watcher.tick(DARK_S)
    assert watcher.gone == []
    for node in (3, 4):
        watcher.says(node, lives=False)
    watcher.tick()
    assert watcher.gone == [1]
    assert suspicion_s(1.0, 1, 3) == pytest.approx(2.0)


@pytest.mark.parametrize("all_agree", [False, True])
def test_those_who_were_asked_only_now_have_time_to_answer(all_agree: bool) -> None:
    """However long the node was silent before: nobody else was there to be asked."""
    watcher = Watcher()
    for node in OTHERS[1:]:
        watcher.it.unlinked(node, "away", watcher.now)
    watcher.suspect()
    watcher.tick(1.875)
    for node in OTHERS[1:]:
        watcher.it.linked(node, watcher.now)
    assert questions(watcher.tick()) == [2, 3, 4]
    for node in OTHERS[1:] if all_agree else ():
        watcher.says(node, lives=False)
    watcher.tick(DARK_S / 2 - 0.125)
    assert watcher.gone == ([1] if all_agree else [])
    watcher.tick()
    assert watcher.gone == [1]


def test_one_who_sees_it_is_enough() -> None:
    watcher = Watcher()
    watcher.suspect()
    assert [type(one) for one in watcher.says(2, lives=True)] == [w.Withdrawn]
    assert watcher.it.health.score == 1, "it had accused a node that lives"
    watcher.tick(DARK_S / 2)
    assert watcher.gone == []


@pytest.mark.parametrize("was_heard", [False, True])
def test_the_word_of_all_others_is_not_enough_without_a_look_of_its_own(was_heard: bool) -> None:
    watcher = Watcher()
    if was_heard:
        watcher.it.heard(1, watcher.now)
    watcher.tick(DARK_S / 2 + 0.125)
    for node in (2, 3, 4):
        watcher.says(node, lives=False)
    watcher.tick(2 * DARK_S)
    assert watcher.gone == []
    watcher.it.looked(1, "silent", watcher.now)
    watcher.tick()
    assert watcher.gone == [1]


def test_a_node_that_another_sees_answers_where_there_is_no_connection_to_it() -> None:
    watcher = Watcher()
    watcher.it.unlinked(1, "reset", watcher.now)
    watcher.suspect()
    watcher.tick()
    assert watcher.says(2, lives=True)[-1] == AgentAnswers(1, answers=True)


def test_a_suspicion_is_withdrawn_only_where_nothing_had_answered() -> None:
    watcher = Watcher()
    watcher.tick(DARK_S / 2 + 0.125)
    watcher.it.heard(1, watcher.now)
    assert watcher.it.take() == [], "it was silent, and the look at it was not answered yet"
    watcher.it.unlinked(1, "reset", watcher.now)
    watcher.it.looked(1, "silent", watcher.now)
    watcher.it.take()
    watcher.it.linked(1, watcher.now)
    assert watcher.it.take() == [], "nobody had suspected it yet"


def test_a_stranger_s_word_neither_condemns_nor_saves() -> None:
    watcher = Watcher()
    watcher.suspect()
    assert watcher.says(9, lives=True) == []
    for node in (2, 3, 4):
        watcher.says(node, lives=False)
    watcher.tick(DARK_S)
    assert watcher.gone == [1]


def test_a_word_that_comes_unasked_is_none() -> None:
    watcher = Watcher()
    assert watcher.says(2, lives=True) == []
    assert watcher.says(2, lives=False) == []


def test_who_has_confirmed_is_not_asked_again_and_counts_on() -> None:
    watcher = Watcher()
    watcher.suspect()
    watcher.says(2, lives=False)
    watcher.says(3, lives=False)
    found = watcher.tick(DARK_S / 2 + 0.125)
    assert questions(found) == [4]
    watcher.says(4, lives=False)
    watcher.tick()
    assert watcher.gone == [1]


def test_what_comes_of_a_look_after_the_verdict_is_nothing() -> None:
    watcher = Watcher()
    watcher.it.unlinked(1, "reset", watcher.now)
    watcher.it.looked(1, "refused", watcher.now)
    watcher.it.take()
    for answer in ("open", "refused", "lives", "silent"):
        watcher.it.looked(1, answer, watcher.now)
        assert watcher.it.take() == []


@pytest.mark.parametrize(("answer", "kept"), [("open", True), ("lives", True), ("silent", False)])
def test_what_a_look_says_of_a_suspicion(answer: w.Answer, kept: bool) -> None:
    watcher = Watcher()
    watcher.suspect()
    watcher.it.looked(1, answer, watcher.now)
    assert (w.Withdrawn in [type(one) for one in watcher.it.take()]) is kept
    for node in (2, 3, 4):
        watcher.says(node, lives=False)
    watcher.tick(DARK_S / 2)
    assert (watcher.gone == []) is kept


def test_only_what_has_no_connection_answers_for_itself() -> None:
    watcher = Watcher()
    watcher.it.looked(1, "open", watcher.now)
    assert watcher.it.take() == []
    watcher.it.unlinked(1, "reset", watcher.now)
    watcher.it.take()
    for answer, told in (("open", True), ("silent", False)):
        watcher.it.looked(1, answer, watcher.now)  # type: ignore[arg-type]  # each is an Answer
        assert watcher.it.take() == [AgentAnswers(1, answers=told)]


def test_silence_while_this_daemon_was_late_is_its_own() -> None:
    watcher = Watcher()
    watcher.tick(BEAT_S)
    watcher.now += 50.0
    watcher.it.tick(watcher.now, lambda _when: True)
    assert watcher.it.take() == []
    assert watcher.it.health.score == 8
    watcher.it.tick(watcher.now + 0.1, lambda _when: True)
    assert not [one for one in watcher.it.take() if isinstance(one, w.HangUp | NodeLost)]


def test_a_beat_that_is_late_by_no_more_than_a_beat_is_on_time() -> None:
    watcher = Watcher()
    watcher.tick()
    due = watcher.now + BEAT_S
    watcher.it.tick(due + BEAT_S, lambda _when: False)
    assert watcher.it.health.factor == 1.0
    watcher.it.tick(due + 3.5 * BEAT_S, lambda _when: False)
    assert watcher.it.health.factor > 1.0


def test_silence_of_before_this_daemon_was_late_counts_on() -> None:
    watcher = Watcher()
    watcher.tick(DARK_S / 2)
    late_s = 10.0
    watcher.now += 0.125 + late_s
    watcher.it.tick(watcher.now, lambda _when: True)
    watcher.it.unlinked(1, "reset", watcher.now)
    watcher.it.looked(1, "refused", watcher.now)
    (gone,) = (one for one in watcher.it.take() if isinstance(one, NodeLost))
    assert gone.age_s == pytest.approx(DARK_S / 2 + 0.125)


def test_a_connection_that_was_silent_before_this_daemon_was_late_is_ended_no_later() -> None:
    watcher = Watcher()
    watcher.tick(DARK_S / 2)
    watcher.now += 10.125
    watcher.it.tick(watcher.now, lambda _when: True)
    assert not [one for one in watcher.tick(DARK_S / 2 - 0.125) if isinstance(one, w.HangUp)]
    assert [one.node for one in watcher.tick() if isinstance(one, w.HangUp)] == [1]


def test_beats_keep_their_time_where_no_tick_falls_on_them() -> None:
    watcher = Watcher()
    beats = sum(watcher.it.tick(watcher.now + tick / 10, lambda _when: False) for tick in range(1001))
    assert beats == pytest.approx(100 / BEAT_S, abs=2)


def test_after_a_cut_it_is_looked_and_asked_again() -> None:
    watcher = Watcher(judges=False)
    watcher.suspect()
    for node in (2, 3, 4):
        watcher.says(node, lives=False)
    watcher.tick(4 * DARK_S)
    assert watcher.gone == []
    watcher.judges = True
    watcher.tick()
    assert watcher.gone == [], "what it saw while it was cut off says nothing"
    watcher.it.looked(1, "silent", watcher.now)
    watcher.tick()
    for node in (2, 3, 4):
        watcher.says(node, lives=False)
    watcher.tick()
    assert watcher.gone == [1]


def test_a_silent_connection_is_ended() -> None:
    watcher = Watcher()
    assert not [one for one in watcher.tick(DARK_S) if isinstance(one, w.HangUp)]
    (hang_up,) = (one for one in watcher.tick() if isinstance(one, w.HangUp))
    assert (hang_up.node, hang_up.why) == (1, "its daemon was silent for 1.1 s")


def test_a_silent_connection_to_one_that_is_not_watched_is_ended_too() -> None:
    """Over it that daemon counts as heard: one that is cut off must not hold a lease by it."""
    watcher = Watcher()
    watcher.it.watch((2, 3, 4), OTHERS, watcher.now)
    found = watcher.tick(DARK_S + 0.125)
    assert {type(one) for one in found} == {w.HangUp}
    assert {one.node for one in found if isinstance(one, w.HangUp)} == {1}
    watcher.it.unlinked(1, "its daemon was silent", watcher.now)
    assert watcher.it.take() == [AgentAnswers(1, answers=False)]
    assert watcher.tick(3 * DARK_S) == []
    assert set(watcher.it.watched) == {2, 3, 4}


def test_who_asks_about_a_node_is_answered_at_once_or_once_it_was_looked_at() -> None:
    watcher = Watcher()
    watcher.it.hear(4, Suspect(node=2), watcher.now)
    assert watcher.it.take() == [w.Say(4, Saw(node=2, lives=True))]
    watcher.tick(DARK_S / 2 - 0.125)
    watcher.it.hear(4, Suspect(node=1), watcher.now)
    assert watcher.it.take() == [w.Say(4, Saw(node=1, lives=True))]
    watcher.tick()
    for asker, looks in ((4, [w.Look(1)]), (3, [])):
        watcher.it.hear(asker, Suspect(node=1), watcher.now)
        assert watcher.it.take() == looks
    watcher.it.looked(1, "silent", watcher.now)
    saw = Saw(node=1, lives=False)
    assert watcher.it.take() == [w.Say(3, saw), w.Say(4, saw)]


def test_of_one_whose_connection_has_just_ended_nobody_is_told_that_it_lives_without_a_look() -> None:
    watcher = Watcher()
    watcher.it.unlinked(2, "reset", watcher.now)
    watcher.it.hear(4, Suspect(node=2), watcher.now)
    assert watcher.it.take() == [w.Look(2)]
    watcher.it.looked(2, "silent", watcher.now)
    assert w.Say(4, Saw(node=2, lives=False)) in watcher.it.take()


def test_a_node_without_a_connection_is_looked_at_with_every_tick_but_not_before_it_has_answered() -> None:
    watcher = Watcher()
    watcher.it.unlinked(1, "reset", watcher.now)
    assert watcher.it.take() == [w.Look(1)]
    assert w.Look(1) not in watcher.tick(DARK_S / 2)
    for _ in range(4):
        watcher.it.looked(1, "open", watcher.now)
        assert w.Look(1) in watcher.tick()


def test_a_node_is_looked_at_once_however_many_ask() -> None:
    watcher = Watcher()
    looks: list[w.Output] = []
    for asker in (2, 3):
        watcher.it.hear(asker, Suspect(node=1), watcher.now + DARK_S)
        looks += watcher.it.take()
    watcher.it.unlinked(1, "the connection was reset", watcher.now + DARK_S)
    looks += watcher.it.take()
    assert looks == [w.Look(1)]
    watcher.it.looked(1, "open", watcher.now + DARK_S)
    said = [one for one in watcher.it.take() if isinstance(one, w.Say)]
    assert said == [w.Say(asker, Saw(node=1, lives=True)) for asker in (2, 3)]


def test_which_three_are_asked_depends_on_who_asks() -> None:
    asked = set()
    for me in (0, 9, 10):
        it = w.Membership(me, TIMES)
        it.watch(range(1, 8), range(1, 8), 100.0)
        for node in range(2, 8):
            it.heard(node, 100.9)
        it.tick(101.0, lambda _when: True)
        nodes = tuple(questions(it.take()))
        assert len(nodes) == w.ASKED
        asked.add(nodes)
    assert len(asked) == 3


def test_who_is_away_and_who_was_met() -> None:
    watcher = Watcher()
    watcher.it.watch((*OTHERS, 5), OTHERS, watcher.now, {6})
    watcher.tick(2 * DARK_S)
    assert watcher.it.away(watcher.now) == set()
    watcher.tick()
    assert watcher.it.away(watcher.now) == {5}, "6 is looked at seldom; 1 is connected"
    assert not watcher.it.was_met(1)
    assert not watcher.it.was_met(7)
    watcher.it.unlinked(1, "reset", watcher.now)
    assert watcher.it.was_met(1)
    assert watcher.it.lived_since(watcher.now - 0.01) == {2, 3, 4}


def test_why_a_node_is_lost_is_said() -> None:
    watcher = Watcher()
    watcher.it.watch((*OTHERS, 5), OTHERS, watcher.now)
    watcher.it.looked(5, "refused", watcher.now)
    (gone,) = watcher.it.take()
    assert gone == NodeLost(
        5, "its daemon was never met; its agent is gone", 0.0, dark=False, source="membership"
    )
    watcher.it.unlinked(1, "the connection was reset", watcher.now)
    watcher.it.looked(1, "refused", watcher.now + 2.0)
    (gone,) = (one for one in watcher.it.take() if isinstance(one, NodeLost))
    assert gone == NodeLost(
        1, "the connection was reset; its agent is gone", 2.0, dark=False, source="membership"
    )


def test_the_verdict_comes_in_that_moment_and_only_of_what_was_heard_since() -> None:
    watcher = Watcher()
    watcher.suspect()
    for node in (2, 3, 4):
        watcher.says(node, lives=False)
    asked: list[float] = []

    def judge(when: float) -> bool:
        asked.append(when)
        return True

    watcher.it.tick(100.0 + DARK_S - 0.01, judge)
    assert not [one for one in watcher.it.take() if isinstance(one, NodeLost)]
    watcher.it.tick(100.0 + DARK_S, judge)
    (gone,) = (one for one in watcher.it.take() if isinstance(one, NodeLost))
    silent = "node-0 has heard nothing of it for 1.0 s"
    assert gone.reason == f"{silent}; nothing on it answers, 3 of 3 others say the same"
    assert gone.dark
    assert asked == [100.0 + DARK_S / 2] * 2


def test_what_is_not_watched_is_nothing_to_this_daemon() -> None:
    watcher = Watcher()
    watcher.it.unlinked(9, "reset", watcher.now)
    watcher.it.heard(9, watcher.now)
    watcher.it.known_gone(9)
    watcher.it.looked(9, "silent", watcher.now)
    watcher.it.hear(2, Saw(node=9, lives=True), watcher.now)
    assert watcher.it.take() == []
    assert set(watcher.it.watched) == set(OTHERS)


def test_a_node_that_is_looked_at_seldom_is_looked_at_often_once_it_is_suspected() -> None:
    watcher = Watcher()
    watcher.it.watch(OTHERS, OTHERS, watcher.now, {6})

    def looks(seconds: float, answer: w.Answer) -> int:
        count = 0
        for _ in range(round(seconds / 0.125)):
            found = [one for one in watcher.tick() if one == w.Look(6)]
            count += len(found)
            if found:
                watcher.it.looked(6, answer, watcher.now)
                watcher.it.take()
        return count

    assert looks(2 * DARK_S, "open") <= 2
    assert looks(3 * DARK_S, "silent") >= 8
