"""The model, the data and the step that every system trains in a bench, and what a rank notes of it.

A batch follows from the step and the rank alone, and nothing in the model is random, so that a system which
starts anew has nothing to restore but parameters, moments and the step. A script gets its case by the
environment: BENCH_OUT, BENCH_LAYOUT (ddp, fsdp), BENCH_SIZE (toy, 20m), BENCH_EVERY (steps to a save).
"""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

OUT = Path(os.environ["BENCH_OUT"])
LAYOUT = os.environ["BENCH_LAYOUT"]
EVERY = int(os.environ["BENCH_EVERY"])


@dataclass(frozen=True)
class Size:
    """Blocks of two linear layers; samples a rank; seconds that a step sleeps, as for a device's work."""

    width: int
    hidden: int
    blocks: int
    batch: int
    sleep_s: float


# 0.03 and 21 million parameters.
SIZES = {"toy": Size(32, 128, 4, 8, 0.02), "20m": Size(1024, 2048, 5, 8, 0.0)}
SIZE = SIZES[os.environ["BENCH_SIZE"]]
# Of the same state more computation.
SIZE = replace(SIZE, batch=SIZE.batch * int(os.environ.get("BENCH_TIMES", "1")))


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE.width)
        self.up = nn.Linear(SIZE.width, SIZE.hidden)
        self.down = nn.Linear(SIZE.hidden, SIZE.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, width) both."""
        inner: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + inner


def body() -> nn.Module:
    """The model, before it is wrapped; the same on each rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(SIZE.blocks)))


def model(world: int) -> nn.Module:
    """The model as BENCH_LAYOUT says, over the default group."""
    made = body()
    if LAYOUT == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for block in made.children():
            fully_shard(block, mesh=mesh)
        fully_shard(made, mesh=mesh)
    elif LAYOUT == "ddp":
        made = nn.parallel.DistributedDataParallel(made)
    return made


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    """Fused, as the cheapest on CPUs."""
    return torch.optim.AdamW(of.parameters(), lr=1e-3, fused=True)


def batch(step: int, rank: int) -> torch.Tensor:
    """The samples of a rank in a step: float32 (batch, width)."""
    draw = torch.Generator().manual_seed(step * 1009 + rank)
    return torch.randn(SIZE.batch, SIZE.width, generator=draw)


def loss_of(of: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Forward and backward of a step."""
    x = batch(step, rank)
    loss: torch.Tensor = (of(x) - x.roll(1, 1)).pow(2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def train_step(of: nn.Module, by: torch.optim.Optimizer, step: int, rank: int) -> float:
    """Make a step, and return its loss."""
    by.zero_grad()
    loss = loss_of(of, step, rank)
    by.step()
    time.sleep(SIZE.sleep_s)
    return loss.item()


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Notes:
    """The notes of a rank: its process when it begins, and each step with its loss and CLOCK_MONOTONIC."""

    def __init__(self, rank: int) -> None:
        # Whoever reads finds it whole.
        fresh = OUT / f"pid-{rank}.{os.getpid()}"
        fresh.write_text(str(os.getpid()))
        fresh.rename(OUT / f"pid-{rank}")
        self._file = (OUT / f"steps-{rank}").open("a", buffering=1)

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        self._file.write(f"{step} {loss.hex()} {time.monotonic()} {time.process_time()}\n")
