"""Trains with DDP; a rank is slower than others: `slow_script.py STEPS OUT RANK FROM TO PERCENT HOW`.

FROM one step TO another. HOW is "compute" (its own work takes longer) or "data" (its batches come later).
RANK -1 is none.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ckptless

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
RANK, FROM, TO, PERCENT = map(int, sys.argv[3:7])
HOW = sys.argv[7]
WORK_S, DATA_S = 0.08, 0.02


def train(run: Any) -> None:
    def is_slow(how: str) -> bool:
        return run.rank == RANK and FROM <= run.step < TO and how == HOW

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
    for x in run.batches(Batches()):
        loss = state.model(x).pow(2).mean()
        time.sleep(WORK_S + (WORK_S + DATA_S) * PERCENT / 100 * is_slow("compute"))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        run.commit(loss=loss)
        if run.rank == 0:
            with (OUT / "steps.txt").open("a") as file:
                file.write(f"{run.step} {time.time()!r}\n")


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
