"""A job that writes down how long each of its steps took: `spent_script.py STEPS OUT KILLS as JSON`.

A kill is [rank, step]: that rank ends by SIGKILL in the step after it, once. OUT/RANK.jsonl has a line for
each step: its number, seconds since the one before (None for the first of a generation), `run.redone` before.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptless

STEPS, OUT, KILLS = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
SLEEP_S, CHECKPOINT_S = 0.02, 0.05


def build() -> ckptless.State:
    """Make a small model."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    return ckptless.State(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01))


def train(run: ckptless.Run) -> None:
    """Train, and now and then write what somebody calls a checkpoint."""
    state = run.keep(build)
    before = None
    with (OUT / f"{run.rank}.jsonl").open("a") as log:
        while run.step < STEPS:
            redone = run.redone
            time.sleep(SLEEP_S)
            for kill in KILLS:
                struck = OUT / f"struck-{kill[0]}-{kill[1]}"
                if kill == [run.rank, run.step] and not struck.exists():
                    struck.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            state.model(torch.ones(4, 8)).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            if run.step % 25 == 24:
                with run.phase("checkpoint", up_to=60):
                    time.sleep(CHECKPOINT_S)
            run.commit()
            now = time.monotonic()
            log.write(json.dumps([run.step, None if before is None else now - before, redone]) + "\n")
            log.flush()
            before = now


ckptless.run(train, commit_every=10)
