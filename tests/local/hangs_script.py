"""Trains with DDP; in some steps a rank hangs, each time in another way: `hangs_script.py STEPS OUT HANGS`.

HANGS is "STEP:RANK:KIND,...". Each hang comes once: a rank that does the step again goes on. Each rank notes
its process, and each step's loss; OUT/hang-STEP-RANK has the time at which a hang began. A KIND may have a
place: "lock@backward", "@optimizer" or "@commit".
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ckptless

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
HANGS = {
    (int(step), int(rank)): kind for step, rank, kind in (one.split(":") for one in sys.argv[3].split(","))
}
SLEEP_S = float(os.environ.get("STEP_S", "0.05"))
DEVICE = os.environ.get("TOY_DEVICE", "cpu")
if DEVICE != "cpu":
    from tests.gpu import kind as device_kind

    # On a GPU that all ranks share NCCL takes them only where each seems to be a machine of its own.
    os.environ.setdefault("NCCL_HOSTID", str(os.getpid()))
    device_kind.install()


class Never(Dataset[int]):
    """A data set whose samples never come."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        threading.Event().wait()
        return index


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interpreter() -> None:
    """A call that holds the interpreter, and computes."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def interpreter_asleep() -> None:
    while True:
        ctypes.PyDLL(None).pause()


def lock() -> None:
    one = threading.Lock()
    for _ in range(2):
        one.acquire()  # never let go of: that is the point


def loader() -> None:
    next(iter(DataLoader(Never(), num_workers=1)))


def file() -> None:
    os.mkfifo(name := str(OUT / f"pipe-{os.getpid()}"))
    with open(name):  # noqa: PTH123  # nobody ever writes
        pass


def native() -> None:
    while True:
        ctypes.CDLL(None).pause()


def child() -> None:
    subprocess.run(["sleep", "1000"], check=True)


def other_collective() -> None:
    dist.barrier()


def spin() -> None:
    """A loop that lets go of the interpreter, and gets nowhere."""
    while True:
        pass


def evaluation(run: Any) -> None:
    """One rank evaluates, and its next step is slow."""
    with run.phase("evaluation", up_to=60.0):
        time.sleep(12.0)
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        pass


def together(run: Any) -> None:
    """All ranks evaluate, in one collective after the other."""
    with run.phase("evaluation of all", up_to=60.0):
        for _ in range(100):
            dist.all_reduce(torch.ones(1, device=DEVICE))
            time.sleep(0.12)


def too_long(run: Any) -> None:
    with run.phase("too long", up_to=1.0):
        while True:
            pass


KINDS = (stopped, interpreter, interpreter_asleep, lock, loader, file, native, child, other_collective, spin)
PHASES = {phase.__name__: phase for phase in (evaluation, too_long)}
BY_NAME = {kind.__name__: kind for kind in KINDS}


def maybe_hang(run: Any, where: str) -> None:
    name = HANGS.get((run.step, run.rank), "")
    kind, _, at = name.partition("@")
    if not name or (at or "forward") != where:
        return
    if kind == "together":
        together(run)
        return
    try:
        with (OUT / f"hang-{run.step}-{run.rank}").open("x") as file:
            file.write(f"{time.time()!r}\n")
    except FileExistsError:
        return
    if kind in PHASES:
        PHASES[kind](run)
    else:
        BY_NAME[kind]()


class Saved:
    """An object that each commit asks for its state."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def state_dict(self) -> dict[str, int]:
        maybe_hang(self._run, "commit")
        return {"step": self._run.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def train(run: Any) -> None:
    def build() -> ckptless.State:
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(DEVICE))
        optimizer = torch.optim.AdamW(model.parameters())
        return ckptless.State(model=model, optimizer=optimizer, saved=Saved(run))

    state = run.keep(build)
    with (OUT / f"pids-{run.rank}.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")
    state.model.module.bias.register_hook(lambda _grad: maybe_hang(run, "backward"))
    state.optimizer.register_step_pre_hook(lambda *_: maybe_hang(run, "optimizer"))
    while run.step < STEPS:
        maybe_hang(run, "forward")
        time.sleep(SLEEP_S)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * run.step + run.rank))
        loss = state.model(x.to(DEVICE)).pow(2).mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        with (OUT / f"loss-{run.rank}.txt").open("a") as file:
            file.write(f"{run.step} {loss.item()!r}\n")
        run.commit(loss=loss)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    ckptless.run(train)
