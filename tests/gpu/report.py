"""What commits cost on a device: `python -m tests.gpu.report [--gb 1 4 8] [--step-s 0.5] [--json FILE]`.

Prints a table for docs/design/measurements.md. The device is a GPU where there is one, else the simulated
one, of which the figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from ckptless.daemon.protocol import messages as m
from ckptless.pytorch_hooks.commit.versions import Versions
from ckptless.pytorch_hooks.state import State, TensorSet
from tests.gpu import kind

STEPS = 12
# The first commits make memory and zero it.
WARM = 4
PIECES = 64


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

    def __init__(self, nbytes: int, device: str) -> None:
        super().__init__()
        count = max(1, nbytes // 4 // PIECES)
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(count, device=device), requires_grad=False) for _ in range(PIECES)
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


def steps_s(module: Any, shard: Shard, step_s: float, *, commits: bool) -> tuple[float, float]:
    """Return the median time of a step, and of `commit` in it as the main thread sees it (seconds)."""
    versions = Versions(cast("Any", Memory()))
    tensors = TensorSet(State(model=shard))
    steps: list[float] = []
    calls: list[float] = []
    for step in range(1, STEPS + 1):
        module.synchronize()
        began = time.perf_counter()
        kind.busy(step_s)
        call = time.perf_counter()
        if commits:
            versions.wait()
            told = m.Commit(generation=1, step=step, record=b"", digest="", tensors=None, loss=None)
            versions.send(told, versions.write(tensors, step, 1, 0, 0))
        calls.append(time.perf_counter() - call)
        module.synchronize()
        steps.append(time.perf_counter() - began)
    versions.close()
    tensors.release()
    return statistics.median(steps[WARM:]), statistics.median(calls[WARM:])


def measure(nbytes: int, step_s: float) -> dict[str, float]:
    """Return the figures of one size."""
    module = kind.install()
    shard = Shard(nbytes, kind.name())
    bare_s = bare_copy_s(module, nbytes)
    without_s, _ = steps_s(module, shard, step_s, commits=False)
    with_s, call_s = steps_s(module, shard, step_s, commits=True)
    return {
        "nbytes": nbytes,
        "bare_copy_s": bare_s,
        "bare_copy_gb_per_s": nbytes / bare_s / 1e9,
        "step_s": without_s,
        "step_with_commit_s": with_s,
        "overhead": with_s / without_s - 1,
        "commit_call_s": call_s,
    }


def main(words: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = [1.0, 4.0, 8.0] if kind.name() == "cuda" else [0.001]
    parser.add_argument("--gb", type=float, nargs="+", default=sizes)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    found = [measure(int(gb * 1e9), options.step_s) for gb in options.gb]
    print("| shard | bare copy | step | with a commit in order | | `run.commit` returns after |")
    print("| --- | --- | --- | --- | --- | --- |")
    for one in found:
        cells = (
            f"{one['nbytes'] / 1e9:g} GB",
            f"{one['bare_copy_gb_per_s']:.1f} GB/s",
            f"{one['step_s']:.3f} s",
            f"{one['step_with_commit_s']:.3f} s",
            f"{one['overhead']:+.1%}",
            f"{one['commit_call_s'] * 1e3:.1f} ms",
        )
        print(f"| {' | '.join(cells)} |")
    if options.json is not None:
        told = {"device": kind.name(), "torch": torch.__version__, "sizes": found}
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
