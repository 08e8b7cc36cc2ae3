"""Trains with DDP; ranks are slower than others: `slow_script.py STEPS OUT RANKS FROM TO PERCENT HOW`.

RANKS are some ("0,1", -1 is none), FROM one step TO another. HOW is "compute" (their own work takes longer),
"data" (their batches come later), or "network" (no rank is slow: there is little work, and much to reduce).
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ckptless

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
RANKS = [*map(int, sys.argv[3].split(","))]
FROM, TO, PERCENT = map(int, sys.argv[4:7])
HOW = sys.argv[7]
WORK_S, DATA_S = (0.001, 0.001) if HOW == "network" else (0.08, 0.02)


def train(run: Any) -> None:
    def is_slow(how: str) -> bool:
        return run.rank in RANKS and FROM <= run.step < TO and how == HOW

    def build() -> ckptless.State:
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    class Batches:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number in range(STEPS):
                time.sleep(DATA_S + (WORK_S + DATA_S) * PERCENT / 100 * is_slow("data"))
                yield torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + run.rank))

    state = run.keep(build)
    much = torch.zeros(8_000_000 if HOW == "network" else 0)
    for x in run.batches(Batches()):
        loss = state.model(x).pow(2).mean()
        time.sleep(WORK_S + (WORK_S + DATA_S) * PERCENT / 100 * is_slow("compute"))
        if HOW == "network":
            torch.distributed.all_reduce(much)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        run.commit(loss=loss)
        if run.rank == 0:
            with (OUT / "steps.txt").open("a") as file:
                file.write(f"{run.step} {time.time()!r}\n")


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
