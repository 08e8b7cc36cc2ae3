"""Two ranks on one node, each with something of its own: `own_script.py KIND STEPS OUT [FAULTS as JSON]`.

A fault is [rank, step, place], a SIGKILL in the step after `step` commits. KIND: buffers, or apart (each rank
trains by itself from a step on, and they are averaged at each fourth).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptless

KIND, STEPS, OUT = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
FAULTS = json.loads(sys.argv[4]) if len(sys.argv) > 4 else []
APART_FROM = 9


def strike(run: Any, place: str) -> None:
    for number, fault in enumerate(FAULTS):
        if fault == [run.rank, run.step, place]:
            try:
                (OUT / f"struck-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


class Own(nn.Module):
    """Batch norm's statistics, a buffer that only rank 0 changes, one in no state_dict, and a counter."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.rank, self.count = rank, 0
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1 + self.rank
        self.first: torch.Tensor
        self.hidden: torch.Tensor
        if self.rank == 0:
            self.first += 0.5
        self.hidden = 0.9 * self.hidden + x.detach().mean(0)
        return torch.add(self.body(x), 0.01 * (self.count + self.first + self.hidden))


def build(run: Any) -> ckptless.State:
    torch.manual_seed(1)
    model = Own(run.rank) if KIND == "buffers" else nn.Linear(8, 8)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if KIND == "buffers" else model
    data = torch.utils.data.TensorDataset(torch.randn(40, 8))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9 if KIND == "buffers" else 0.0)
    torch.manual_seed(100 + run.rank)
    return ckptless.State(model=wrapped, optimizer=optimizer, loader=loader)


def average(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


def train(run: Any) -> None:
    state = run.keep(lambda: build(run))
    log = (OUT / f"loss-{run.rank}.txt").open("a", buffering=1)
    parameters = list(state.model.parameters())
    for (x,) in run.batches(state.loader, epochs=10_000):
        if run.step >= STEPS:
            break
        strike(run, "forward")
        loss = (state.model(x + 0.1 * torch.randn_like(x)) - x).square().mean()
        strike(run, "backward")
        loss.backward()
        if KIND == "apart" and run.step < APART_FROM:
            average([p.grad for p in parameters])
        state.optimizer.step()
        state.optimizer.zero_grad()
        if KIND == "apart" and run.step % 4 == 3:
            with torch.no_grad():
                average(parameters)
        strike(run, "update")
        log.write(
            f"{run.step + 1} {loss.item().hex()} {x.sum().item().hex()} {time.time()} {run.generation}\n"
        )
        run.commit(loss=loss)
        strike(run, "committed")
    (OUT / f"final-{run.rank}.txt").write_text("done")


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
