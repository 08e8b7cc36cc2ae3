"""Loops that may end behind their commit, found in their byte code, in the Python that is here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from ckptless.pytorch_hooks.cursor.turns import is_in_loop, left_behind

Commit = Callable[[], int]
TURNS = 3


def breaks(commit: Commit) -> None:
    for _batch in range(TURNS):
        if commit() >= TURNS:
            pass
        if TURNS == 1:
            break  # late


def breaks_with_work_behind(commit: Commit) -> int:
    found = 0
    for batch in range(TURNS):
        commit()
        if batch == TURNS - 1:
            break  # late
    for one in range(TURNS):
        found += one
    return found


def returns(commit: Commit) -> int:
    while True:
        commit()
        if commit() > 2:
            return TURNS  # late


def ends_in_a_context(commit: Commit) -> None:
    for _batch in range(TURNS):
        with nullcontext():
            commit()
            if commit() > 2:
                break  # late


def ends_behind_an_evaluation(commit: Commit) -> None:
    for _epoch in range(TURNS):
        for batch in range(TURNS):
            commit()
            if batch % 2:
                for _other in range(TURNS):
                    if batch:
                        continue
                if commit() > 4:
                    break  # late


def breaks_in_try(commit: Commit) -> None:
    for _batch in range(TURNS):
        try:
            commit()
        finally:
            len("cleared")
        if commit() > 2:
            break  # late


LATE = (
    breaks,
    breaks_with_work_behind,
    returns,
    ends_in_a_context,
    ends_behind_an_evaluation,
    breaks_in_try,
)


def asks_first(commit: Commit) -> None:
    for batch in range(TURNS):
        if batch >= TURNS:
            break
        commit()


def asks_in_while(commit: Commit) -> None:
    step = 0
    while step < TURNS and step >= 0:
        step = commit()
        if step % 2:
            continue
        len("logged")


def asks_in_two_lines(commit: Commit) -> None:
    step = 0
    while (
        step < TURNS
        and step >= 0
    ):  # fmt: skip
        step = commit()


def ends_with_a_loop_around(commit: Commit) -> None:
    for epoch in range(TURNS):
        for _batch in range(TURNS):
            commit()
        if epoch == 1:
            break


def is_sure(commit: Commit) -> None:
    for _batch in range(TURNS):
        step = commit()
        assert step > 0, "it is"
        if step > 100:
            raise ValueError(step)


def evaluates(commit: Commit) -> None:
    for _batch in range(TURNS):
        commit()
        for other in range(TURNS):
            if other == 1:
                break


def has_no_loop(commit: Commit) -> int:
    return commit()


def catches(commit: Commit) -> None:
    for _batch in range(TURNS):
        try:
            commit()
        except ValueError:
            break


NOT_LATE = (
    asks_first,
    asks_in_while,
    asks_in_two_lines,
    ends_with_a_loop_around,
    is_sure,
    evaluates,
    has_no_loop,
    catches,
)


def found(loop: Callable[[Commit], object]) -> set[str]:
    """Return the source of what stands below the lines that are named while it runs."""
    lines = set()
    steps = 0

    def commit() -> int:
        nonlocal steps
        steps += 1
        frame = sys._getframe(1)
        assert is_in_loop(frame.f_code, frame.f_lasti) == (loop is not has_no_loop)
        lines.add(left_behind(frame.f_code, frame.f_lasti))
        return steps

    loop(commit)
    source = Path(__file__).read_text().splitlines()
    return {source[line] for line in lines if line is not None}


@pytest.mark.parametrize("loop", LATE, ids=lambda loop: loop.__name__)
def test_a_loop_that_ends_behind_its_commit(loop: Callable[[Commit], object]) -> None:
    (line,) = found(loop)
    assert line.endswith("# late")


@pytest.mark.parametrize("loop", NOT_LATE, ids=lambda loop: loop.__name__)
def test_a_loop_that_asks_before(loop: Callable[[Commit], object]) -> None:
    assert found(loop) == set()
