"""Batches in page-locked memory, with a stand-in for what locks it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckptless.pytorch_hooks.data import MappedLoader
from ckptless.pytorch_hooks.data.pinning import Pinning


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def batch() -> dict[str, Any]:
    return {
        "x": torch.arange(4),
        "nested": [torch.ones(2), ("word", Pair(torch.zeros(1), "n")), None, 3],
        "array": np.arange(3),
    }


class Locks:
    """Gives copies, as torch does, and says which they are."""

    def __init__(self, upto: int = 1 << 30) -> None:
        self.upto = upto
        self.given: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.given) == self.upto:
            raise RuntimeError("CUDA error: out of memory")
        self.given.append(tensor.clone())
        return self.given[-1]


def test_all_tensors_of_a_batch_are_locked_and_nothing_else_changes() -> None:
    locks = Locks()
    before = batch()
    found = Pinning(lambda *_: pytest.fail("nothing failed"), locks).batch(before)
    assert len(locks.given) == 3
    assert found["x"] is locks.given[0]
    assert torch.equal(found["x"], before["x"])
    assert found["nested"][0] is locks.given[1]
    pair = found["nested"][1][1]
    assert type(pair) is Pair
    assert (pair.x, pair.name) == (locks.given[2], "n")
    assert found["nested"][1][0] == "word"
    assert found["nested"][2:] == [None, 3]
    assert found["array"] is before["array"]


def test_without_memory_to_lock_batches_come_as_they_are() -> None:
    told: list[tuple[str, str]] = []
    locks = Locks(upto=1)
    pinning = Pinning(lambda *event: told.append(event), locks)
    first, second = batch(), batch()
    assert pinning.batch(first) is first
    assert pinning.batch(second) is second
    assert len(locks.given) == 1
    ((kind, text),) = told
    assert kind == "pin-memory-off"
    assert text.endswith("CUDA error: out of memory")


@pytest.mark.parametrize("pins", [True, False])
def test_a_loader_gives_the_same_batches(monkeypatch: pytest.MonkeyPatch, pins: bool) -> None:
    locks = Locks()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("ckptless.pytorch_hooks.data.pinning._by_torch", locks)
    loader = MappedLoader(list(range(8)), batch_size=4, workers=0, pin_memory=pins)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(locks.given) == (2 if pins else 0)


def test_where_there_is_no_device_nothing_is_copied() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one: tests/gpu")
    before = batch()
    assert Pinning(lambda *_: pytest.fail("nothing failed")).batch(before) is before
