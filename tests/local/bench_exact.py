"""Measures what exact steps cost against DDP's: `bench_exact.py [--ranks 4] [--virtual 4] [--width 512]`.

The same model and batch by both, in turns of some steps in a row, without an agent: forward, backward, the
sum over ranks. The first step of each turn does not count. Told are the medians over all turns of rank 0,
also of a step without any sum, and the quartiles of the ratio of neighbours.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

IN_A_ROW, TURNS = 6, 20
LAYERS, BATCH = 6, 32
CHILD = "BENCH_EXACT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--virtual", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}", __file__]
    env = {"OMP_NUM_THREADS": "1", CHILD: f"{given.virtual} {given.width}"}
    subprocess.run([sys.executable, *words], check=True, env={**os.environ, **env})


def measure(virtual: int, width: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from ckptless.pytorch_hooks.elastic.exact import Exact, ExactSteps, begin
    from ckptless.pytorch_hooks.elastic.sums import Share
    from ckptless.pytorch_hooks.state import State

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))]
    net: Any = nn.Sequential(*layers)
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    how = Exact(virtual)
    steps = ExactSteps(how, State(model=net), Share(rank, ranks, virtual), lambda: 0)
    begin(how)
    x = torch.randn(BATCH * virtual // ranks, width)
    parts = list(torch.split(x, BATCH))

    def by_ddp() -> None:
        parallel(x).square().mean().backward()
        parallel.zero_grad()

    def exactly() -> None:
        steps.step(parts, lambda part: net(part).square().mean())
        net.zero_grad()

    def alone() -> None:
        for part in parts:
            net(part).square().mean().backward()
        net.zero_grad()

    found = [[turn(call) for call in (by_ddp, exactly, alone)] for _ in range(TURNS)]
    if rank == 0:
        nbytes = sum(p.numel() * 4 for p in net.parameters())
        told = [statistics.median(column) * 1000 for column in zip(*found, strict=True)]
        ratios = statistics.quantiles([row[1] / row[0] for row in found], n=4)
        print(f"{ranks} ranks, {virtual} virtual, {nbytes / 1e6:.1f} MB of gradients, {os.cpu_count()} cores")
        print("DDP {:.1f} ms, exact {:.1f} ms, no sum at all {:.1f} ms".format(*told))
        print("exact / DDP: {1:.2f} ({0:.2f} to {2:.2f})".format(*ratios))
        print(f"load {os.getloadavg()[0]:.1f}")


def turn(call: Callable[[], None]) -> float:
    took = []
    for _ in range(IN_A_ROW):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


if __name__ == "__main__":
    if CHILD in os.environ:
        measure(*map(int, os.environ[CHILD].split()))
    else:
        main()
