"""A script runs without an agent around it: all that it may call is there, and takes the same."""

from __future__ import annotations

import inspect

import pytest

from ckptless.pytorch_hooks.running.standalone import StandaloneRun
from ckptless.pytorch_hooks.running.training import Run

CALLS = ("keep", "batches", "commit", "compare", "on_recovery", "on_resize")
PARTS = ("local_batch", "batch_weight", "accumulate")


@pytest.mark.parametrize("name", [*CALLS, *PARTS])
def test_it_takes_the_same(name: str) -> None:
    here, there = getattr(StandaloneRun, name), getattr(Run, name)
    assert list(inspect.signature(here).parameters) == list(inspect.signature(there).parameters)


def test_a_ranks_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    run = StandaloneRun()
    assert (run.local_batch(10), run.accumulate(10, 3)) == (4, 2)
    assert run.batch_weight(10) == pytest.approx(1.2)
