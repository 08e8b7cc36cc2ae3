"""A script that loops over a DataLoader past `run.batches` is told so; whoever does not is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from ckptless.pytorch_hooks.cursor.own_loops import LOOKS, OwnLoops

DATA = torch.utils.data.TensorDataset(torch.randn(64, 2))
COMMITS = 2 * LOOKS


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def loops(told: list[str]) -> OwnLoops:
    return OwnLoops(told.append, told.append)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_loop_of_steps_is_told_once(loops: OwnLoops, told: list[str], batches: int) -> None:
    iterator = iter(DataLoader(DATA, batch_size=1))
    for _ in range(10):
        for _ in range(batches):
            next(iterator)
        loops.look()
    assert len(told) == 1
    assert "run.batches(loader)" in told[0]


def test_one_that_begins_late_is_told(loops: OwnLoops, told: list[str]) -> None:
    for _ in range(LOOKS - 2):
        loops.look()
    iterator = iter(DataLoader(DATA))
    for _ in range(4):
        next(iterator)
        loops.look()
    assert len(told) == 1


def test_what_run_batches_takes_is_ours(loops: OwnLoops, told: list[str]) -> None:
    def batches() -> Iterator[object]:
        yield from DataLoader(DATA, batch_size=1)

    found = batches()
    for _ in range(COMMITS):
        with loops.known():
            next(found)
        loops.look()
    assert told == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_is_none(loops: OwnLoops, told: list[str], workers: int) -> None:
    loader: DataLoader[object] = DataLoader(
        DATA, batch_size=16, num_workers=workers, persistent_workers=bool(workers)
    )
    for _ in range(6):
        for _batch in loader:
            pass
        loops.look()
    assert told == []


def test_a_batch_that_is_used_for_all_steps_is_none(loops: OwnLoops, told: list[str]) -> None:
    iterator = iter(DataLoader(DATA))
    next(iterator)
    for _ in range(COMMITS):
        loops.look()
    assert told == []


def test_nobody_listens_once_it_is_told_or_found_to_be_none(loops: OwnLoops) -> None:
    for _ in range(LOOKS):
        loops.look()
    iterator = iter(DataLoader(DATA))
    next(iterator)
    loops.look()
    assert loops._given == {}


@pytest.mark.parametrize("how", ["", "asks for the epoch", "asks for the step between epochs"])
def test_a_loop_over_epochs_that_does_not_ask_where_it_is(loops: OwnLoops, told: list[str], how: str) -> None:
    for epoch in range(4):
        loops.knows_epochs |= how == "asks for the epoch"
        loops.next_epoch(epoch)
        # As at an epoch's end, and where a loop goes on until a step.
        loops.asked = how == "asks for the step between epochs"
    assert len(told) == (not how)
    assert all("range(run.epoch, epochs)" in text for text in told)


def late(commit: Callable[[], None]) -> None:
    for step in range(3):
        commit()
        if step == 2:
            break


def in_time(commit: Callable[[], None]) -> None:
    for step in range(9):
        if step == 3:
            break
        commit()


def by_another(commit: Callable[[], None]) -> None:
    for step in range(9):
        one_step(commit)
        if step == 2:
            break


def one_step(commit: Callable[[], None]) -> None:
    commit()


@pytest.mark.parametrize(
    ("pace", "words"),
    [
        ((2, 1, 1, 1, 1), "ahead of the step"),
        ((5, 4, 4, 4), "ahead of the step"),
        ((1, 0, 0, 0), "several steps of one batch"),
        ((1, 0, 1, 0), "several steps of one batch"),
        ((1, 1, 1, 1, 1), ""),
        ((4, 4, 4, 4, 3), ""),
        ((1, 4, 4, 4), ""),
        ((2, 1, 1), ""),
        ((0, 0, 0, 0), ""),
        ((3, 1, 1, 1), ""),
    ],
)
def test_steps_that_have_not_a_batch_each_are_told(
    loops: OwnLoops, told: list[str], pace: tuple[int, ...], words: str
) -> None:
    """Also in a process that is entered again, whose count begins anew."""
    for _entry in range(2):
        told.clear()
        loops.enter()
        for count in pace:
            for _batch in range(count):
                loops.gave()
            loops.stepped()
        assert len(told) == bool(words)
        assert all(words in one for one in told)


@pytest.mark.parametrize("train", [late, by_another, in_time], ids=lambda train: train.__name__)
def test_a_loop_that_ends_behind_its_commit_is_told_once(train: Callable[..., None]) -> None:
    told: list[str] = []
    loops = OwnLoops(lambda _text: None, told.append)
    train(lambda: loops.look_at_code(train, {}, lambda: lambda _one: False))
    assert len(told) == (train is not in_time)
    assert all("test_own_loops.py ends the loop behind run.commit" in text for text in told)
