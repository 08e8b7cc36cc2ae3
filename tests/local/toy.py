"""A small DDP job that injects faults into itself: `toy.py STEPS OUT [FAULTS as JSON]`.

A fault is {"rank", "step", "where", "kind"}; `where` is a place of WHERE in the step after `step` commits (or a
phase of a recovery), `kind` is kill, stop (SIGSTOP), raise, exit, or node (agent, daemon and ranks of its node).
Every fault strikes once, over all processes and generations, unless it is "often".
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptless

WHERE = ("import", "build", "forward", "backward", "update", "commit", "committed", "recovered", "finish")

STEPS = int(sys.argv[1])
OUT = Path(sys.argv[2])
FAULTS: list[dict[str, Any]] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else []
SLEEP_S = float(os.environ.get("TOY_SLEEP_S", "0"))


def strike(where: str, rank: int, step: int, generation: int) -> None:
    for number, fault in enumerate(FAULTS):
        if fault["where"] != where or fault["rank"] != rank or fault.get("step", step) != step:
            continue
        if fault.get("generation", generation) != generation:
            continue
        if fault.get("often") or first_time(number):
            inject(fault["kind"])


def first_time(number: int) -> bool:
    try:
        (OUT / f"fault-{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    (OUT / f"fault-{number}").write_text(f"{time.time()}\n")
    return True


def inject(kind: str) -> None:
    if kind == "raise":
        raise ValueError("the toy raises, as told")
    if kind == "exit":
        os._exit(7)
    if kind == "node":
        kill_node()
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def kill_node() -> None:
    """The daemon first, so that nobody can say goodbye; the agent's death takes its ranks."""
    agent = os.getppid()
    config = Path(f"/proc/{agent}/cmdline").read_bytes().split(b"\0")
    home = Path(os.fsdecode(config[config.index(b"--config") + 1])).parent
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes()
        except OSError:
            continue
        if os.fsencode(home / "daemon.json") in line:
            os.kill(int(process.parent.name), signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)


class Step(torch.optim.AdamW):
    """An optimizer that can be struck in the middle of its update."""

    rank = step_number = generation = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        strike("update", self.rank, self.step_number, self.generation)
        return loss


def build(run: Any) -> ckptless.State:
    torch.manual_seed(1)
    random.seed(run.rank)
    body = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))
    model = nn.parallel.DistributedDataParallel(body)
    strike("build", run.rank, run.step, run.generation)
    optimizer = Step(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    data = torch.utils.data.TensorDataset(torch.randn(64, 32))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    torch.manual_seed(100 + run.rank)
    return ckptless.State(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, seen=0)


def train(run: Any) -> None:
    run.on_recovery(lambda run: strike("recovered", run.rank, run.step, run.generation))
    state = run.keep(lambda: build(run))
    log = (OUT / f"loss-{run.rank}.txt").open("a", buffering=1)
    state.optimizer.rank, state.optimizer.generation = run.rank, run.generation
    for (x,) in run.batches(state.loader, epochs=10_000):
        if run.step >= STEPS:
            break
        state.optimizer.step_number = run.step
        strike("forward", run.rank, run.step, run.generation)
        noise = torch.randn_like(x) + random.random()
        loss = (state.model(x + noise) - x).pow(2).mean()
        strike("backward", run.rank, run.step, run.generation)
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()
        time.sleep(SLEEP_S)
        state.seen += len(x)
        strike("commit", run.rank, run.step, run.generation)
        value = loss.item()
        log.write(f"{run.step + 1} {value.hex()} {state.seen} {time.time()} {run.generation}\n")
        run.commit(loss=value)
        strike("committed", run.rank, run.step, run.generation)
    strike("finish", run.rank, run.step, run.generation)
    if run.rank == 0:
        total = sum(p.double().sum().item() for p in state.model.parameters())
        (OUT / "final.txt").write_text(total.hex())


OUT.mkdir(parents=True, exist_ok=True)
strike("import", int(os.environ.get("RANK", "0")), 0, 0)
ckptless.run(train)
