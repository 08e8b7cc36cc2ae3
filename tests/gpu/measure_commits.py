"""What commits of a large shard cost a training on a device."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, cast

import torch

from ckptless.daemon.protocol import messages as m
from ckptless.pytorch_hooks.commit.copying import Copying, Wanted
from ckptless.pytorch_hooks.commit.versions import Versions
from ckptless.pytorch_hooks.state import State, TensorSet
from tests.gpu import kind

STEPS = 12
# The first commits make memory, are compared with what lives, and show which tensors nobody writes to.
WARM = 8
PIECES = 64
# What sums are made of.
ROW_NBYTES = 4096


class Memory:
    """An agent's memory, and nobody who reads it."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(job="job", run="0" * 32)

    def allocate(self, _generation: int, slot_nbytes: int, slots: int) -> tuple[m.Allocated, int]:
        """Give memory."""
        memory = os.memfd_create("ckptless-report")
        os.ftruncate(memory, slot_nbytes * slots)
        return m.Allocated(region=1), memory

    def send(self, _commit: m.Commit) -> None:
        """Take it."""


class Shard(torch.nn.Module):
    """A module with float32 parameters of so many bytes."""

    def __init__(self, nbytes: int, device: str, *, trained: bool) -> None:
        super().__init__()
        count = max(1, nbytes // PIECES // ROW_NBYTES) * (ROW_NBYTES // 4)
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(count, device=device), requires_grad=trained) for _ in range(PIECES)
        )


def bare_copy_s(module: Any, nbytes: int) -> float:
    """Return how long a copy of so many bytes into page-locked memory takes, with nothing of ours."""
    source = torch.ones(nbytes // 4, device=kind.name())
    target = torch.empty(nbytes // 4).pin_memory()
    took: list[float] = []
    for _ in range(5):
        module.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        module.synchronize()
        took.append(time.perf_counter() - began)
    return min(took)


class Training:
    """Steps of a length, which keep the device busy, with a shard that is committed after each of them."""

    def __init__(self, shard: Shard, step_s: float, overlap: Wanted) -> None:
        self.step_s = step_s
        optimizer = torch.optim.SGD(shard.parameters(), lr=0.1)
        self.tensors = TensorSet(State(model=shard, optimizer=optimizer))
        self.versions = Versions(cast("Any", Memory()))
        self.copying = Copying(self.versions, overlap, print)
        self.step = 0

    def run(self, steps: int, *, commits: bool) -> None:
        """Make steps."""
        for _ in range(steps):
            self.step += 1
            kind.busy(self.step_s)
            self.copying.before_update()
            if commits:
                self.copying.wait()
                told = m.Commit(generation=1, step=self.step, record=b"", digest="", tensors=None, loss=None)
                self.versions.send(told, self.copying.write(self.tensors, self.step, 1, 0, 0))

    def close(self) -> None:
        """End threads."""
        self.versions.close()
        self.tensors.release()


def step_s(module: Any, training: Training, *, commits: bool) -> float:
    """Return how long a step takes, on average: the main thread is at most one ahead of the device."""
    training.run(WARM, commits=commits)
    module.synchronize()
    began = time.perf_counter()
    training.run(STEPS, commits=commits)
    # Not all streams: copies beside the training may go on.
    torch.accelerator.current_stream().synchronize()
    took_s = (time.perf_counter() - began) / STEPS
    training.close()
    return took_s


def measure(nbytes: int, of_step_s: float) -> dict[str, float]:
    """Return the figures of one size: a step without commits, and what commits made in each way add."""
    module = kind.install()
    trained = Shard(nbytes, kind.name(), trained=True)
    bare_s = bare_copy_s(module, nbytes)
    without_s = step_s(module, Training(trained, of_step_s, "off"), commits=False)
    frozen = Shard(nbytes, kind.name(), trained=False)
    ways: list[tuple[str, Shard, Wanted]] = [
        ("in_order", trained, "off"),
        ("beside", trained, "on"),
        ("frozen", frozen, "off"),
    ]
    overheads = {
        name: step_s(module, Training(shard, of_step_s, overlap), commits=True) / without_s - 1
        for name, shard, overlap in ways
    }
    return {
        "nbytes": nbytes,
        "bare_copy_s": bare_s,
        "bare_copy_gb_per_s": nbytes / bare_s / 1e9,
        "step_s": without_s,
        **overheads,
    }
