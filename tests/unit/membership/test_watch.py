"""Who is gone, and who only seems to be: one daemon's view, with others that it can ask."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.membership.suspicion import ALONE_FACTOR, WORST, LocalHealth, suspicion_s
from ckptless.daemon.ckptlessd.membership.watch import (
    Answer,
    HangUp,
    Look,
    Membership,
    Say,
    Withdrawn,
)
from ckptless.daemon.ckptlessd.recovery.events import AgentAnswers, NodeLost
from ckptless.daemon.protocol.peers.membership import Saw, Suspect
from ckptless.daemon.settings.config import Timers

DARK_S = 1.2
TIMES = Timers(beat_s=0.2, dark_s=DARK_S)
ME, OTHERS = 0, (1, 2, 3, 4)
TICK_S = 0.05


@dataclass
class Nodes:
    """Node 0's membership. The others beat, and answer what they are asked, unless they are `silent`."""

    answers: dict[int, Answer] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    # What the others say of a node when they are asked; nothing where it is missing.
    say: dict[int, bool] = field(default_factory=dict)
    decides: bool = True
    now: float = 100.0

    def __post_init__(self) -> None:
        self.member = Membership(ME, TIMES)
        self.member.watch(OTHERS, (), self.now)
        for node in OTHERS:
            self.member.linked(node, self.now)
        self.outputs: list[object] = []

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            if self.member.tick(self.now, lambda _when: self.decides):
                for node in set(OTHERS) - self.silent:
                    self.member.heard(node, self.now)
            self.carry()

    def starve(self, seconds: float) -> None:
        """No CPU: nothing is heard, nothing is done."""
        self.now += seconds

    def carry(self) -> None:
        while outputs := self.member.take():
            self.outputs += outputs
            for output in outputs:
                self.do(output)

    def do(self, output: object) -> None:
        match output:
            case Look():
                self.member.looked(output.node, self.answers.get(output.node, "silent"), self.now)
            case HangUp():
                self.member.unlinked(output.node, output.why, self.now)
            case Say(node=asked, message=Suspect() as question) if question.node in self.say:
                if asked != question.node:
                    saw = Saw(node=question.node, lives=self.say[question.node])
                    self.member.hear(asked, saw, self.now)
            case _:
                pass

    @property
    def gone(self) -> list[NodeLost]:
        return [output for output in self.outputs if isinstance(output, NodeLost)]

    def until_gone(self) -> float:
        """Seconds from its last word to the verdict on node 1."""
        begun = self.now
        while not self.gone:
            self.pass_time(TICK_S)
            assert self.now - begun < 60.0
        return self.now - begun


# --------------------------------------------------------------------------------------- judgements


def test_a_dark_node_is_lost_in_time_when_others_say_the_same() -> None:
    nodes = Nodes(silent={1}, say={1: False})
    assert nodes.until_gone() <= DARK_S + 2 * TIMES.beat_s
    (gone,) = nodes.gone
    assert (gone.node, gone.dark) == (1, True)
    assert "3 of 3 others say the same" in gone.reason
    assert gone.age_s == pytest.approx(DARK_S, abs=TIMES.beat_s)


def test_alone_it_takes_three_times_as_long() -> None:
    nodes = Nodes(silent={1})
    assert ALONE_FACTOR * DARK_S - TIMES.beat_s <= nodes.until_gone() <= ALONE_FACTOR * DARK_S + 0.5


def test_what_others_see_lives() -> None:
    nodes = Nodes(silent={1}, say={1: True})
    nodes.pass_time(20.0)
    assert nodes.gone == []


def test_a_stopped_daemon_on_a_living_node_is_only_away() -> None:
    nodes = Nodes(silent={1}, answers={1: "open"})
    nodes.pass_time(20.0)
    assert nodes.gone == []
    assert any(isinstance(output, HangUp) and output.node == 1 for output in nodes.outputs)
    assert AgentAnswers(1, answers=True) in nodes.outputs


def test_an_agent_that_is_gone_is_lost_at_once() -> None:
    nodes = Nodes(answers={1: "refused"}, silent={1})
    nodes.member.unlinked(1, "its daemon closed the connection", nodes.now)
    nodes.carry()
    (gone,) = nodes.gone
    assert (gone.dark, gone.reason) == (False, "its daemon closed the connection; its agent is gone")


def test_who_is_cut_off_accuses_nobody_until_it_has_looked_again() -> None:
    nodes = Nodes(silent={1}, say={1: False}, decides=False)
    nodes.pass_time(10.0)
    assert nodes.gone == []
    nodes.answers[1] = "open"
    nodes.decides = True
    nodes.pass_time(10.0)
    assert nodes.gone == []


def test_who_was_starved_does_not_accuse_those_it_could_not_hear() -> None:
    nodes = Nodes()
    nodes.pass_time(1.0)
    nodes.starve(30.0)
    # Everything that came meanwhile is still unread at the first tick after it.
    nodes.member.tick(nodes.now, lambda _when: True)
    assert not any(isinstance(output, HangUp | NodeLost) for output in nodes.member.take())
    assert nodes.member.health.score > 0
    nodes.pass_time(10.0)
    assert nodes.gone == []
    assert nodes.member.health.score == 0


def test_a_starved_daemon_takes_longer_to_accuse() -> None:
    quick, starved = Nodes(silent={1}, say={1: False}), Nodes(silent={1}, say={1: False})
    starved.member.health.worse(starved.now, 3)
    assert starved.until_gone() > 1.5 * quick.until_gone()


def test_nothing_is_asked_of_a_node_whose_fate_is_known() -> None:
    nodes = Nodes(silent={1})
    nodes.member.known_gone(1)
    nodes.pass_time(10.0)
    assert not any(isinstance(output, Look | NodeLost) for output in nodes.outputs)


def test_looking_ends_when_it_is_connected_again() -> None:
    nodes = Nodes(silent={1})
    nodes.pass_time(DARK_S)
    nodes.silent.clear()
    nodes.member.linked(1, nodes.now)
    nodes.outputs.clear()
    nodes.pass_time(10.0)
    assert [type(output) for output in nodes.outputs] == [Withdrawn]


# ------------------------------------------------------------------------------------------- others


def test_asked_about_one_that_it_hears() -> None:
    nodes = Nodes()
    nodes.member.hear(2, Suspect(node=1), nodes.now)
    assert Say(2, Saw(node=1, lives=True)) in nodes.member.take()


@pytest.mark.parametrize("answer", ["open", "refused", "lives", "silent"])
def test_asked_about_one_that_it_does_not_hear(answer: Answer) -> None:
    nodes = Nodes(silent={1})
    nodes.pass_time(DARK_S * 0.7)
    nodes.member.hear(2, Suspect(node=9), nodes.now)
    nodes.member.hear(3, Suspect(node=9), nodes.now)
    assert [output for output in nodes.member.take() if isinstance(output, Look)] == [Look(9)]
    nodes.member.looked(9, answer, nodes.now)
    saw = Saw(node=9, lives=answer != "silent")
    assert nodes.member.take() == [Say(2, saw), Say(3, saw)]


def test_who_cannot_tell_says_nothing() -> None:
    nodes = Nodes()
    nodes.member.hear(2, Suspect(node=9), nodes.now)
    nodes.member.take()
    nodes.member.looked(9, "unsure", nodes.now)
    assert nodes.member.take() == []


def test_the_word_of_one_who_was_not_asked_does_not_count() -> None:
    nodes = Nodes(silent={1})
    nodes.pass_time(DARK_S * 0.7)
    for stranger in range(10, 20):
        nodes.member.hear(stranger, Saw(node=1, lives=False), nodes.now)
    assert nodes.until_gone() > 2 * DARK_S


# -------------------------------------------------------------------------------------- arithmetic


@given(st.floats(0.1, 10.0), st.integers(0, 5), st.integers(0, 5))
def test_more_who_say_the_same_make_it_shorter(shortest_s: float, confirmed: int, asked: int) -> None:
    found = suspicion_s(shortest_s, confirmed, asked)
    assert shortest_s <= found <= ALONE_FACTOR * shortest_s
    assert suspicion_s(shortest_s, confirmed + 1, asked) <= found
    assert suspicion_s(shortest_s, asked, asked) == (shortest_s if asked else ALONE_FACTOR * shortest_s)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 5.0)), max_size=50))
def test_health_has_bounds_and_comes_back(history: list[tuple[bool, float]]) -> None:
    health, now = LocalHealth(), 0.0
    for worse, later_s in history:
        now += later_s
        if worse:
            health.worse(now)
        else:
            health.on_time(now)
        assert 0 <= health.score <= WORST
    for _ in range(WORST):
        now += 1.01
        health.on_time(now)
    assert health.factor == 1


def test_each_complaint_makes_a_daemon_wait_once_more_as_long() -> None:
    health = LocalHealth()
    health.worse(1.0)
    assert health.factor == 2
    health.worse(1.0, points=3)
    assert health.factor == 5


# ------------------------------------------------------------------------------- looked at seldom


def looks(nodes: Nodes, node: int) -> int:
    return sum(isinstance(output, Look) and output.node == node for output in nodes.outputs)


def test_a_node_that_is_no_neighbour_is_looked_at_seldom_and_only_while_that_is_wanted() -> None:
    nodes = Nodes(answers={9: "open"})
    nodes.member.watch(OTHERS, OTHERS, nodes.now, {9})
    nodes.pass_time(10 * DARK_S)
    assert 9 <= looks(nodes, 9) <= 11
    assert AgentAnswers(9, answers=True) in nodes.outputs
    # Nobody here wants a connection to it, so that it is not away without one.
    assert nodes.member.away(nodes.now) == set()
    nodes.member.watch(OTHERS, OTHERS, nodes.now)
    nodes.carry()
    assert nodes.outputs[-1] == AgentAnswers(9, answers=False)
    before = looks(nodes, 9)
    nodes.pass_time(10 * DARK_S)
    assert looks(nodes, 9) == before


def test_a_node_that_is_no_neighbour_and_that_others_see_is_apart() -> None:
    nodes = Nodes(say={9: True})
    nodes.member.watch(OTHERS, OTHERS, nodes.now, {9})
    nodes.pass_time(2 * DARK_S)
    assert nodes.member.apart(nodes.now) == frozenset()
    nodes.pass_time(2 * DARK_S)
    assert nodes.member.apart(nodes.now) == {9}
    assert nodes.gone == []


def test_what_is_not_watched_any_more_answers_no_more() -> None:
    """Else it would be heard for ever by a node that is cut off, whose lease it could hold."""
    nodes = Nodes(silent={1}, answers={1: "open"})
    nodes.pass_time(5.0)
    assert AgentAnswers(1, answers=True) in nodes.outputs
    nodes.member.watch((2, 3, 4), (2, 3, 4), nodes.now)
    nodes.carry()
    assert nodes.outputs[-1] == AgentAnswers(1, answers=False)


def test_three_others_are_asked_and_no_more() -> None:
    nodes = Nodes(silent={1})
    nodes.member.watch((*OTHERS, 5, 6), (), nodes.now)
    for node in (5, 6):
        nodes.member.linked(node, nodes.now)
    for _ in range(round(0.7 * DARK_S / TICK_S)):
        nodes.pass_time(TICK_S)
        for node in (5, 6):
            nodes.member.heard(node, nodes.now)
    asked = [out.node for out in nodes.outputs if isinstance(out, Say) and out.message == Suspect(node=1)]
    assert len(set(asked)) == 3


def test_a_daemon_is_away_when_it_has_had_no_connection_for_twice_as_long() -> None:
    nodes = Nodes(silent={1}, answers={1: "open"})
    nodes.member.unlinked(1, "cut", nodes.now)
    nodes.carry()
    nodes.pass_time(2 * DARK_S - 2 * TICK_S)
    assert nodes.member.away(nodes.now) == set()
    nodes.pass_time(4 * TICK_S)
    assert nodes.member.away(nodes.now) == {1}
