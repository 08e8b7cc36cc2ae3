"""A job of which a rank's node is lost, twice: `train_batches.py KIND FOLDER`; notes when its batches come.

KIND: "list", batches that are in memory; "quick", the ring, with a transform that takes nothing; "slow", the
ring, with one of 50 ms a sample, 8 samples to a batch, in steps of 0.4 s, so that they are made ahead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NODES, KILLS, SAMPLES, BATCH = 3, 2, 4000, 24
STEPS_BETWEEN = 8
SLOW_S = 0.05
STEP_S = {"slow": 0.4}


def batches_of(kind: str, out: Path) -> Any:
    import torch

    from ckptless.data import Cache, JsonLines, MappedLoader

    def transform(row: dict[str, Any]) -> torch.Tensor:
        if kind in STEP_S:
            time.sleep(SLOW_S)
        return torch.full((4096,), float(row["id"]))

    if kind == "list":
        return [torch.full((BATCH // NODES, 4096), float(n)) for n in range(SAMPLES // BATCH)]
    source = JsonLines(out / "data.jsonl.gz", cache=Cache(out / "cache"))
    return MappedLoader(source, batch_size=BATCH, seed=1, shuffle=True, transform=transform, workers=2)


def job(kind: str, out: Path) -> None:
    import torch
    from torch import nn

    import ckptless

    def build() -> ckptless.State:
        torch.manual_seed(1)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4096, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        return ckptless.State(model=model, optimizer=optimizer, loader=batches_of(kind, out))

    def train(run: Any) -> None:
        state = run.keep(build)
        log = (out / f"steps-{run.rank}.txt").open("a", buffering=1)
        batches: Iterable[Any] = iter(run.batches(state.loader, epochs=1000))
        while run.step < STEPS_BETWEEN * (KILLS + 1):
            begun = time.monotonic()
            batch = next(batches)  # type: ignore[call-overload]
            there = time.monotonic()
            log.write(json.dumps([run.generation, there - begun, there]) + "\n")
            time.sleep(STEP_S.get(kind, 0.1))
            mark = out / f"killed-{run.step}"
            if run.rank == 1 and run.step and run.step % STEPS_BETWEEN == 0 and not mark.exists():
                mark.write_text(json.dumps([run.generation, time.monotonic()]))
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            # The others wait for this rank, and hear at once that it is gone.
            state.model(batch).mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            run.commit()
        if hasattr(state.loader, "close"):
            state.loader.close()

    ckptless.run(train)


if __name__ == "__main__":
    job(sys.argv[1], Path(sys.argv[2]))
