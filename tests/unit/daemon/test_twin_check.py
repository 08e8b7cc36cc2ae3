"""A node's versions against the next twin's: what is waited for, what is told of, what is let be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.versions.twin_check import TwinCheck
from ckptless.daemon.protocol.peers.messages import CompareTwins
from ckptless.daemon.settings.options import TwinsMode

SHAPE = "0" * 16


def digest(value: int) -> str:
    return f"{SHAPE}{value:016x}"


@dataclass
class Ring:
    """Nodes 0 to n - 1, with one rank each, all of them twins; messages arrive when `deliver` is called."""

    count: int
    mode: TwinsMode = "act"
    random: Random = field(default_factory=lambda: Random(0))
    checks: list[TwinCheck] = field(init=False)
    acked: set[tuple[int, int]] = field(default_factory=set)
    events: list[str] = field(default_factory=list)
    under_way: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checks = [self.make(node) for node in range(self.count)]

    def make(self, node: int, generation: int = 1) -> TwinCheck:
        def send(to: int, message: CompareTwins) -> None:
            back = lambda answer: self.later(lambda: check.answered(answer))  # noqa: E731
            self.later(lambda: self.checks[to].asked(message, back))

        check = TwinCheck(node, self.mode, send=send)
        check.on_event = lambda kind, _text: self.events.append(kind)
        check.follow(generation)
        return check

    def later(self, action: Callable[[], None]) -> None:
        self.under_way.append(action)

    def commit(self, node: int, step: int, value: int) -> None:
        done = lambda: self.acked.add((node, step))  # noqa: E731
        self.checks[node].committed((0, step), node, digest(value), tuple(range(self.count)), done)

    def all_commit(self, step: int, values: list[int]) -> None:
        for node in self.random.sample(range(self.count), self.count):
            self.commit(node, step, values[node])
            if self.random.random() < 0.5:
                self.deliver()
        self.deliver()

    def deliver(self) -> None:
        while self.under_way:
            self.under_way.pop(self.random.randrange(len(self.under_way)))()

    def held_up(self, step: int) -> set[int]:
        return {node for node in range(self.count) if (node, step) not in self.acked}


def trained(count: int, mode: TwinsMode = "act", seed: int = 0) -> Ring:
    """They have begun at step 4, and agreed on step 5."""
    ring = Ring(count, mode, Random(seed))
    ring.all_commit(4, [0] * count)
    ring.all_commit(5, [5] * count)
    assert not ring.held_up(4)
    assert not ring.held_up(5)
    return ring


@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.integers(0, 1000))
def test_a_step_counts_exactly_where_it_is_as_the_next_ones(values: list[int], seed: int) -> None:
    """In whatever order they commit, and messages arrive; both ends of a comparison tell of it."""
    count = len(values)
    ring = trained(count, seed=seed)
    ring.all_commit(6, values)
    differs = {node for node in range(count) if values[node] != values[(node + 1) % count]}
    assert ring.held_up(6) == differs
    for node, check in enumerate(ring.checks):
        others = {doubt.other for doubt in check.doubts}
        neighbours = {(node + 1) % count, (node - 1) % count}
        assert others == {other for other in neighbours if values[other] != values[node]}
        assert all((doubt.step, doubt.rank) == (6, node) for doubt in check.doubts)
    assert not ring.events


def test_what_all_begin_with_is_not_compared() -> None:
    ring = Ring(2)
    ring.all_commit(4, [1, 2])
    assert not ring.held_up(4)
    assert not ring.events


def test_a_rank_alone_waits_for_nobody() -> None:
    ring = Ring(1)
    ring.commit(0, 1, 1)
    ring.commit(0, 2, 1)
    assert not ring.held_up(2)


def test_who_is_late_is_waited_for() -> None:
    ring = trained(2)
    ring.commit(0, 6, 6)
    ring.deliver()
    assert ring.held_up(6) == {0, 1}
    ring.commit(1, 6, 6)
    ring.deliver()
    assert not ring.held_up(6)


def test_those_that_never_agreed_are_let_be() -> None:
    """Two of three have the same hardware: no later difference stops the job, nor is a version doubted."""
    ring = Ring(3)
    ring.all_commit(0, [0, 0, 0])
    for step in range(1, 9):
        ring.all_commit(step, [step, step, step + 100])
        assert not ring.held_up(step)
    assert all(not check.doubts and not check.tells(0) for check in ring.checks)
    assert set(ring.events) == {"twins-unlike"}
    assert len(ring.events) <= 3


def test_a_newcomer_is_held_to_what_the_others_have_agreed_on() -> None:
    ring = trained(3)
    ring.checks[2] = ring.make(2, generation=2)
    ring.checks[0].follow(2)
    ring.checks[1].follow(2)
    ring.all_commit(5, [5, 5, 5])
    ring.all_commit(6, [6, 6, 7])
    assert ring.held_up(6) == {1, 2}
    assert ring.checks[0].tells(0)
    assert ring.checks[2].tells(0)


@pytest.mark.parametrize(("mode", "events"), [("warn", ["twins-differ"] * 3), ("off", [])])
def test_without_acting(mode: TwinsMode, events: list[str]) -> None:
    ring = trained(2, mode) if mode == "warn" else Ring(2, mode)
    for step in (6, 7):
        ring.all_commit(step, [1, 2])
        assert not ring.held_up(step)
    assert ring.events == events[:2]  # each end once, however many steps there are
    assert all(not check.doubts and not check.tells(0) for check in ring.checks)


def test_another_layout_is_no_difference() -> None:
    ring = trained(2)
    ring.checks[0].committed((0, 6), 0, "1" * 16 + "2" * 16, (0, 1), lambda: ring.acked.add((0, 6)))
    ring.commit(1, 6, 6)
    ring.deliver()
    assert not ring.held_up(6)
    assert set(ring.events) == {"twins-not-compared"}


def test_nobody_waits_for_a_node_that_does_not_answer() -> None:
    ring = trained(2)
    ring.commit(0, 6, 6)
    ring.checks[0].lost(1, "gone")
    assert (0, 6) in ring.acked
    assert ring.events == ["twins-not-compared"]


def test_another_generation() -> None:
    """What comes early waits; what is of an old one is refused, and said so."""
    ring = trained(2)
    ring.checks[0].follow(2)
    ring.commit(0, 5, 5)
    ring.commit(0, 6, 6)
    ring.deliver()
    assert (0, 6) not in ring.acked
    ring.checks[1].follow(2)
    ring.commit(1, 5, 5)
    ring.commit(1, 6, 6)
    ring.deliver()
    assert not ring.held_up(6)
    old = CompareTwins(generation=1, shard=0, step=6, rank=0, digest=digest(9), known=True)
    ring.checks[1].asked(old, lambda _answer: pytest.fail("it was answered"))
    assert ring.events == ["stale-record"]
