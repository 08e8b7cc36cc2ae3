"""Trains with DDP in steps that take now this long, now that: `wild_script.py SECONDS OUT SEED`.

Each rank sleeps or computes in each step for a time of its own, log-normal; now and then one of them
evaluates, saves a file, or waits for a child. Nothing of it is said to anybody.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptless

SECONDS, OUT, SEED = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.randn(64, 64) @ torch.randn(64, 64)


def save(seconds: float) -> None:
    with (OUT / f"saved-{os.getpid()}").open("wb") as file:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)


def child(seconds: float) -> None:
    subprocess.run(["sleep", str(seconds)], check=True)


def train(run: Any) -> None:
    def build() -> ckptless.State:
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        return ckptless.State(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), ends=time.time() + SECONDS
        )

    state = run.keep(build)
    while True:
        draw = random.Random(f"{SEED} {run.step} {run.rank}")
        x = torch.randn(4, 8)
        loss = state.model(x).pow(2).mean()
        took_s = draw.lognormvariate(-2.5, 1.0)
        (time.sleep if draw.random() < 0.7 else compute)(took_s)
        if draw.random() < 0.005:
            draw.choice((compute, save, child, time.sleep))(draw.uniform(0.5, 3.0))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        run.commit(loss=loss)
        over = torch.tensor(float(time.time() > state.ends))
        dist.broadcast(over, 0)
        if over:
            return


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
