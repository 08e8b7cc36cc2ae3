"""Trains a compiled model: `compiled_script.py OUT STEPS KILL_STEP`; rank 1's first process dies once.

Each process writes what its compiler took from the cache and what it compiled anew: after its first step in a
generation, and at the end.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import ckptless

OUT, STEPS, KILL_STEP = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
DEVICE = os.environ.get("TOY_DEVICE", "cpu")
if DEVICE != "cpu":
    from tests.gpu import kind

    # On a GPU that all ranks share NCCL takes them only where each seems to be a machine of its own.
    os.environ.setdefault("NCCL_HOSTID", str(os.getpid()))
    kind.install()


class Body(nn.Module):
    """Of a class of its own: a torch.nn.Sequential's `compile` compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def build() -> ckptless.State:
    torch.manual_seed(1)
    body = Body()
    body.compile()
    model = nn.parallel.DistributedDataParallel(body.to(DEVICE))
    return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def tell(rank: int, generation: int, step: int) -> None:
    inductor = counters["inductor"]
    found = {name: inductor[f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    told = {"pid": os.getpid(), "generation": generation, "step": step, **found}
    with (OUT / f"compiled-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")


def train(run: Any) -> None:
    state = run.keep(build)
    log = (OUT / f"loss-{run.rank}.txt").open("a", buffering=1)
    first = True
    while run.step < STEPS:
        x = torch.full((4, 16), float(run.step % 7) / 7, device=DEVICE)
        loss = (state.model(x) - x).pow(2).mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if first or run.step == STEPS - 1:
            tell(run.rank, run.generation, run.step)
            first = False
        if run.rank == 1 and run.step == KILL_STEP and run.generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        log.write(f"{run.step + 1} {loss.item().hex()}\n")
        run.commit(loss=loss.item())


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
