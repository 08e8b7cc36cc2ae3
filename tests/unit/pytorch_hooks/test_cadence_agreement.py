"""Ranks that measure different things, at different speeds, commit the same steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.commit.cadence import MAX_STEPS, Cadence
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.torch_private import calls as torch_private

BUDGET = 0.05
RANKS = 4
STEPS = 4000
DEADLINE_S = 60.0


class Generation:
    """What a cadence needs of the process groups: the store that all ranks of a generation have."""

    def __init__(self, store: torch_private.Store, generation: int) -> None:
        self._store, self.generation = store, generation

    def in_store(self, call: Callable[[torch_private.Store], Any]) -> Any:
        return call(self._store)


class Rank:
    """One that trains by a clock of its own, which its commits and steps move on by chance."""

    def __init__(self, rank: int, store: torch_private.Store) -> None:
        self.rank, self.committed = rank, list[int]()
        self.intervals = set[int]()
        self._chance, self._store, self._now = random.Random(rank), store, 0.0

    def train(self, generation: int, start: int, end: int) -> None:
        groups = cast("ProcessGroups", Generation(self._store, generation))
        cadence = Cadence(groups, "auto", BUDGET)
        meter = cadence.meter
        cadence.begin(start, self.rank, RANKS)
        for step in range(start + 1, end + 1):
            self._now += self._chance.uniform(0.05, 0.15)
            due = cadence.is_due(step)
            meter.enter(self._now)
            # What a commit costs changes as it goes, and one rank has it dearer than the others.
            most_s = (1 + (step // 1000) % 3) * (0.07 if self.rank == 2 else 0.02)
            self._now += self._chance.uniform(0.01, most_s) if due else 0.0
            meter.leave(self._now, committed=due)
            if due:
                self.committed.append(step)
                cadence.committed(step)
            self.intervals.add(cadence.every)


def together(ranks: list[Rank], generation: int, start: int, ends: list[int]) -> None:
    """All at once, nobody waiting for anybody but by the cadence itself."""
    threads = [
        threading.Thread(target=rank.train, args=(generation, start, end), daemon=True)
        for rank, end in zip(ranks, ends, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a rank waits for a plan that does not come"


@pytest.fixture
def ranks() -> list[Rank]:
    store = torch_private.HashStore()
    return [Rank(rank, store) for rank in range(RANKS)]


def test_all_ranks_commit_the_same_steps(ranks: list[Rank]) -> None:
    together(ranks, 1, 0, [STEPS] * RANKS)
    first = ranks[0]
    assert all(rank.committed == first.committed for rank in ranks)
    assert len(first.intervals) > 1, "it never changed: nothing was agreed on"
    gaps = [later - now for now, later in zip(first.committed, first.committed[1:], strict=False)]
    assert max(gaps) <= MAX_STEPS


def test_a_new_generation_begins_from_the_step_that_is_restored_and_nothing_else(ranks: list[Rank]) -> None:
    # Rank 0 goes furthest, as the others cannot pass a plan that it has not made; then all go back.
    together(ranks, 1, 0, [1500, 1333, 1480, 1401])
    common = set.intersection(*(set(rank.committed) for rank in ranks))
    restored = max(common)
    # Up to where the slowest one came, nobody has committed a step that another one has not.
    assert all([s for s in rank.committed if s <= 1333] == sorted(common) for rank in ranks)
    before = [list(rank.committed) for rank in ranks]
    together(ranks, 2, restored, [restored + 2000] * RANKS)
    after = [rank.committed[len(known) :] for rank, known in zip(ranks, before, strict=True)]
    assert all(steps == after[0] for steps in after)
    assert after[0][0] == restored + 1


def begin_all(cadences: list[Cadence]) -> dict[int, str]:
    """Return what each rank says against it, by rank."""
    said: dict[int, str] = {}

    def begin(rank: int) -> None:
        try:
            cadences[rank].begin(0, rank, len(cadences))
        except UsageError as error:
            said[rank] = str(error)

    # Rank 0 last: the others wait for its word.
    threads = [threading.Thread(target=begin, args=(rank,), daemon=True) for rank in range(len(cadences))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    return said


def groups_of(store: torch_private.Store, generation: int = 1) -> ProcessGroups:
    return cast("ProcessGroups", Generation(store, generation))


def test_ranks_that_were_told_different_intervals_are_named() -> None:
    store = torch_private.HashStore()
    cadences: list[Cadence] = [Cadence(groups_of(store), every) for every in (2, 2, 3, 2)]
    assert begin_all(cadences) == {
        2: "rank 2 was started with commit_every=3, and rank 1 with commit_every=2: "
        "give ckptless.run the same on every rank",
        3: "rank 3 was started with commit_every=2, and rank 2 with commit_every=3: "
        "give ckptless.run the same on every rank",
    }


def test_auto_and_a_number_or_two_budgets_are_different() -> None:
    store = torch_private.HashStore()
    groups = groups_of(store)
    cadences: list[Cadence] = [
        Cadence(groups, "auto", 0.01),
        Cadence(groups, 5),
        Cadence(groups, "auto", 0.02),
        Cadence(groups, "auto", 0.01),
    ]
    said = begin_all(cadences)
    assert said.keys() == {1, 2, 3}
    assert said[1].startswith(
        'rank 1 was started with commit_every=5, and rank 0 with commit_every="auto" and commit_budget=0.01:'
    )
    assert 'rank 2 was started with commit_every="auto" and commit_budget=0.02,' in said[2]


def test_each_generation_compares_anew() -> None:
    """A rank may come back as another program."""
    store = torch_private.HashStore()
    same: list[Cadence] = [Cadence(groups_of(store, 1), 2), Cadence(groups_of(store, 1), 2)]
    assert begin_all(same) == {}
    other: list[Cadence] = [Cadence(groups_of(store, 2), 4), Cadence(groups_of(store, 2), 2)]
    assert begin_all(other).keys() == {1}
