"""Trains with DDP; once, in a step, rank 1 waits for what never comes: `stuck_script.py STEPS OUT HOW`.

HOW is "event" (a lock in user code), "spin" (a loop that does not let go of the interpreter for long) or
"backward" (a hook of a gradient). Each rank notes its process, and each step's loss.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import ckptless

STEPS, OUT, HOW = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
STUCK_AT, SLEEP_S = int(os.environ.get("STUCK_AT", "6")), float(os.environ.get("STUCK_SLEEP_S", "0"))


def waits_for_ever(run: Any) -> None:
    if run.rank != 1 or run.step != STUCK_AT:
        return
    try:
        (OUT / "stuck").touch(exist_ok=False)
    except FileExistsError:
        return
    if HOW == "spin":
        while True:
            pass
    threading.Event().wait()


def train(run: Any) -> None:
    def build() -> ckptless.State:
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    state = run.keep(build)
    (OUT / f"pids-{run.rank}.txt").open("a").write(f"{os.getpid()}\n")
    if HOW == "backward":
        state.model.module.bias.register_hook(lambda _grad: waits_for_ever(run))
    while run.step < STEPS:
        if HOW != "backward":
            waits_for_ever(run)
        time.sleep(SLEEP_S)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * run.step + run.rank))
        loss = state.model(x).pow(2).mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        (OUT / f"loss-{run.rank}.txt").open("a").write(f"{run.step} {loss.item()!r}\n")
        run.commit(loss=loss)


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
