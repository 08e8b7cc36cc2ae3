"""A line of a logger is written once, wherever its step is cut off, and however often."""

from __future__ import annotations

import random

import pytest

from ckptless.pytorch_hooks.adapters.written import Line, Written


def lines_of(step: int) -> list[Line]:
    """Return what a step logs, the same each time; now and then the same line twice."""
    found: list[Line] = [(step, frozenset({"loss"}))]
    if step % 3 == 0:
        found += [(step, frozenset({"eval"})), (step, frozenset({"eval"}))]
    return found


@pytest.mark.parametrize("seed", range(200))
def test_each_line_once_and_in_order(seed: int) -> None:
    draw, written = random.Random(seed), Written()
    file: list[Line] = []
    committed = 0
    while committed < 12:
        cut = draw.random() < 0.5
        lines = lines_of(committed + 1)
        for line in lines[: draw.randint(0, len(lines)) if cut else len(lines)]:
            if written.is_new(line, committed):
                file.append(line)
        if not cut:
            committed += 1
            continue
        # A commit that not all ranks have may be taken back, too.
        committed = max(0, committed - draw.choice((0, 0, 1)))
        written.go_back(committed)
    assert file == [line for step in range(1, 13) for line in lines_of(step)]


def test_a_new_process_leaves_out_what_one_before_it_has_written() -> None:
    written = Written()
    line = (3, frozenset({"loss"}))
    written.go_back(2, [line])
    written.go_back(2)
    assert not written.is_new(line, 2)
    assert written.is_new(line, 2)
