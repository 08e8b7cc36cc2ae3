"""What a node holds and need not is given back, and never missed: against every loss that copies are for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptless.daemon.replication import re_replication as remaking
from ckptless.daemon.replication.protection import Item
from ckptless.daemon.replication.re_replication import Holders, Watermark, surplus

from .test_remaking import STEP, assignment

KEEP = 3
RANKS, SPARES = 3, 3
EVENTS = 150


class Cluster:
    """FSDP after a recovery: ranks commit, copies arrive, and nodes give back, in any order that can be.

    `kept` is the same without giving anything back.
    """

    def __init__(self, chance: random.Random, copies: int) -> None:
        self.chance = chance
        nodes = list(range(RANKS + SPARES))
        places = chance.sample(nodes, RANKS)
        self.items = [Item("tensors", n) for n in range(RANKS)] + [Item("record", n) for n in range(RANKS)]
        # Who had what before: by any placement, and not all of them have every step.
        self.held: dict[int, dict[Item, set[int]]] = {node: {} for node in nodes}
        for item in self.items:
            for node in chance.sample(nodes, 1 + copies):
                self.held[node][item] = set(range(STEP - chance.randrange(KEEP), STEP + 1))
        have = {item: [node for node in nodes if item in self.held[node]] for item in self.items}
        tensors = {n: have[Item("tensors", n)] for n in range(RANKS)}
        self.now = assignment(places, nodes, tensors, [have[Item("record", n)] for n in range(RANKS)])
        self.to = Holders(self.now, copies)
        for item in self.items:
            self.held[self.home(item)].setdefault(item, set()).add(STEP)
        self.kept = {n: {item: set(steps) for item, steps in of.items()} for n, of in self.held.items()}
        self.marks = {node: Watermark(STEP) for node in nodes}
        self.committed = [STEP] * RANKS
        self.missing = {(item, STEP): self.targets(item) for item in self.items}
        self.given = 0

    def home(self, item: Item) -> int:
        """The node whose rank has it."""
        return self.now.places[item.number].node

    def targets(self, item: Item) -> set[int]:
        """Return who is to hold it beside its home."""
        return {info.node for info in self.to.targets(item)}

    def put(self, node: int, item: Item, step: int) -> None:
        """It is held there, and tells the node of a commit."""
        if item.kind == "record":
            self.marks[node].saw_commit(step)
        for held in (self.held, self.kept):
            steps = {*held[node].get(item, ()), step}
            held[node][item] = set(sorted(steps)[-KEEP:])

    def commit(self, rank: int) -> None:
        """The next step, if gradients of all can be there, and the copies of the last one are."""
        step = self.committed[rank]
        items = (Item("tensors", rank), Item("record", rank))
        if min(self.committed) < step or any(self.missing[item, step] for item in items):
            return
        self.committed[rank] = step + 1
        for item in items:
            self.put(self.home(item), item, step + 1)
            self.missing[item, step + 1] = self.targets(item)

    def arrive(self, item: Item) -> None:
        """One of its holders has its oldest step that is on the way."""
        for step in sorted(step for of, step in self.missing if of == item):
            if missing := self.missing[item, step]:
                self.put(node := self.chance.choice(sorted(missing)), item, step)
                missing.discard(node)
                return

    def give_back(self, node: int) -> None:
        """What the watermark has passed."""
        for item in surplus(self.to, node, self.held[node].keys()):
            if self.marks[node].passed(max(self.held[node][item])):
                del self.held[node][item]
                self.given += 1


def restorable(held: dict[int, dict[Item, set[int]]], items: list[Item], lost: set[int]) -> int | None:
    """The newest step of which everything is left."""
    steps = [set().union(*(of.get(item, set()) for n, of in held.items() if n not in lost)) for item in items]
    return max(set.intersection(*steps), default=None)


def losses(copies: int) -> Iterator[set[int]]:
    """Every set of nodes that copies are there for."""
    for count in range(copies + 1):
        yield from map(set, combinations(range(RANKS + SPARES), count))


def play(chance: random.Random, copies: int) -> Cluster:
    """Fails where something was given back that would be asked for."""
    cluster = Cluster(chance, copies)
    for _ in range(EVENTS):
        before = cluster.given
        number = chance.randrange(RANKS + SPARES)
        kind = chance.randrange(4)
        if kind == 0:
            cluster.commit(number % RANKS)
        elif kind == 1:
            cluster.give_back(number)
        else:
            cluster.arrive(chance.choice(cluster.items))
        if before == cluster.given == 0:
            continue
        for lost in losses(copies):
            there = restorable(cluster.held, cluster.items, lost)
            without = restorable(cluster.kept, cluster.items, lost)
            assert there == without, f"without {lost} step {without} was to be restored, not {there}"
    return cluster


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 32), st.integers(1, 2))
def test_nothing_is_given_back_that_could_still_be_asked_for(seed: int, copies: int) -> None:
    play(random.Random(seed), copies)


def test_in_the_end_all_of_it_is_given_back_by_all_who_hear_of_commits() -> None:
    for seed in range(20):
        cluster = play(random.Random(seed), 2)
        for _ in range(40):
            for rank in range(RANKS):
                cluster.commit(rank)
            for item in cluster.items:
                cluster.arrive(item)
        for node in cluster.held:
            cluster.give_back(node)
            if cluster.marks[node].step is not None:
                assert not surplus(cluster.to, node, cluster.held[node].keys())
        assert cluster.given


def test_what_is_given_back_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test itself."""
    monkeypatch.setattr(remaking, "HELD_AFTER", 1)

    def play_all() -> None:
        for seed in range(200):
            play(random.Random(seed), 2)

    with pytest.raises(AssertionError, match="was to be restored"):
        play_all()


def test_the_watermark_is_the_third_newest_step_that_was_committed() -> None:
    mark = Watermark(STEP)
    for step in (STEP - 1, STEP, STEP + 1, STEP + 1, STEP + 3):
        assert not mark.saw_commit(step)
        assert not mark.passed(STEP)
    assert mark.saw_commit(STEP + 2)
    assert mark.step == STEP + 1
    assert not mark.saw_commit(STEP + 2)
    assert mark.passed(STEP)
    assert mark.passed(None)
    # Its home gives it to this node after all, since another cannot be reached.
    assert not mark.passed(STEP + 1)
    assert mark.saw_commit(STEP + 7)
    assert mark.step == STEP + 2


def test_the_steps_after_the_first_one_of_all_count_too() -> None:
    for mark in (Watermark(None), Watermark(0)):
        assert [mark.saw_commit(step) for step in (1, 2, 3)] == [False, False, True]
        assert mark.step == 1


def test_a_holder_that_is_not_to_be_one_any_more() -> None:
    now = assignment([0], [0, 1, 2, 3], {0: [0, 3]}, [[0, 3]])
    assert surplus(Holders(now, 2), 3, [Item("tensors", 0)]) == (Item("tensors", 0),)


def test_what_belongs_to_no_rank_is_not_given_back() -> None:
    held = [Item("record", 2), Item("tensors", 2)]
    to = Holders(assignment([0, 1], [0, 1, 2], {}, []), 1)
    assert surplus(to, 2, held) == ()
    assert surplus(to, 2, [*held, Item("record", 0)]) == (Item("record", 0),)


def test_in_a_first_generation_nothing_is_given_back() -> None:
    now = replace(assignment([0, 1], [0, 1, 2], {}, []), restore_step=None)
    assert surplus(Holders(now, 1), 2, [Item("record", 0)]) == ()
    assert not Watermark(None).passed(None)
