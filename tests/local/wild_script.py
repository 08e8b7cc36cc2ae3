"""Trains with DDP in steps that take now this long, now that: `wild_script.py SECONDS OUT SEED HOW`.

Each rank sleeps or computes in each step for a time of its own, log-normal, and one step in a hundred for
ten times that; now and then one of them computes, saves a file, or waits for a child for seconds. Nothing of
it is said to anybody. The first steps take long, as where something is compiled. Each `EVALUATES` steps rank
0 evaluates for longer than any step may take, and says so. HOW is "wild"; "even" is nothing of it.
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

SECONDS, OUT, SEED, HOW = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
FIRST, EVALUATES = 3, 150


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


def wild(run: Any, draw: random.Random) -> None:
    if run.step < FIRST:
        compute(draw.uniform(2.0, 6.0))
    if run.rank == 0 and run.step % EVALUATES == EVALUATES - 1:
        with run.phase("evaluation", up_to=120.0):
            compute(draw.uniform(5.0, 9.0))
    took_s = draw.lognormvariate(-2.5, 1.0) * (10 if draw.random() < 0.01 else 1)
    (time.sleep if draw.random() < 0.7 else compute)(took_s)
    if draw.random() < 0.005:
        draw.choice((compute, save, child, time.sleep))(draw.uniform(0.5, 3.0))


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
        if HOW == "even":
            time.sleep(0.1)
        else:
            wild(run, draw)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        run.commit(loss=loss)
        if run.rank == 0:
            (OUT / "steps").write_text(str(run.step))
        over = torch.tensor(float(time.time() > state.ends))
        dist.broadcast(over, 0)
        if over:
            return


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
