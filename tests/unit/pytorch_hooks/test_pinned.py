"""The memory of versions is pinned once, and let go of when it is mapped anew; CUDA may refuse it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ckptless.pytorch_hooks.commit import pinned
from ckptless.pytorch_hooks.commit import versions as subject
from ckptless.pytorch_hooks.commit.pinned import Pinned
from ckptless.pytorch_hooks.commit.versions import Versions
from ckptless.pytorch_hooks.state import State, TensorSet


class Pins:
    """In the place of torch.cuda.cudart(): knows what is registered, and refuses what is so already."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.refused = 0

    def cudaHostRegister(self, pointer: int, _nbytes: int, _flags: int) -> int:
        """712 where it is registered."""
        if pointer in self.registered:
            self.refused += 1
            return 712
        self.registered.add(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        """713 where it is not."""
        if pointer not in self.registered:
            self.refused += 1
            return 713
        self.registered.remove(pointer)
        return 0


def test_memory_is_pinned_once_and_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a larger state has it mapped anew."""
    pins, region = Pins(), 0

    def allocate(_generation: int, slot_nbytes: int, slots: int) -> tuple[Any, int]:
        nonlocal region
        region += 1
        memory = os.memfd_create("ckptless-test")
        os.ftruncate(memory, slot_nbytes * slots)
        return SimpleNamespace(region=region), memory

    session = SimpleNamespace(welcome=SimpleNamespace(job="job", run="0" * 32), allocate=allocate)
    monkeypatch.setattr(pinned, "_driver", lambda _kind: pins)
    versions = Versions(cast("Any", session))
    monkeypatch.setattr(subject, "_kind", lambda _tensors: "cuda")
    small, large = (TensorSet(State(model=torch.nn.Linear(size, size))) for size in (2, 200))
    for tensors in (small, large):
        for step in range(3):
            versions.write(tensors, step, 1, 0, 0)
            versions.wait()
        assert len(pins.registered) == 3
    assert region == 2
    versions.close()
    assert not pins.registered
    assert not pins.refused


def test_memory_that_is_not_taken_is_not_let_go_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pins, memory = Pins(), torch.zeros(64, dtype=torch.uint8)
    pins.registered.add(memory.data_ptr())
    monkeypatch.setattr(pinned, "_driver", lambda _kind: pins)
    Pinned(memory, "cuda").close()
    assert pins.registered == {memory.data_ptr()}
    assert "error 712" in caplog.text
