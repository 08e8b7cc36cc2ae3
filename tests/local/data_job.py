"""A small job on `ckptless.data`, `data_job.py STEPS OUT SOURCE [faulty]`: each rank notes what it trains on.

With "faulty" the cache is encrypted, where that can be, rank 1 is killed after step 7, rank 0 raises after
step 13, and after step 19 the agent of rank 2, and with it all of its node, is killed.
"""

import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptless
from ckptless.data import Cache, JsonLines, MappedLoader

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
SOURCE, FAULTY = Path(sys.argv[3]), "faulty" in sys.argv[4:]
BATCH = 13
ENCRYPTED = FAULTY and find_spec("cryptography") is not None


def noisy(row: dict[str, Any]) -> tuple[int, torch.Tensor]:
    return row["id"], torch.full((8,), float(row["id"])) + torch.randn(8)


def collate(rows: list[tuple[int, torch.Tensor]]) -> dict[str, Any]:
    return {"id": [number for number, _ in rows], "x": torch.stack([x for _, x in rows])}


def build() -> ckptless.State:
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    loader = MappedLoader(
        JsonLines(SOURCE, cache=Cache(OUT / "cache", encrypt=ENCRYPTED)),
        batch_size=BATCH,
        seed=11,
        shuffle=True,
        transform=noisy,
        collate=collate,
        workers=2,
    )
    return ckptless.State(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), loader=loader
    )


def strike(run: Any) -> None:
    kind = {(1, 7): "process", (0, 13): "raise", (2, 19): "node"}.get((run.rank, run.step))
    if not FAULTY or kind is None or (OUT / f"struck-{kind}").exists():
        return
    (OUT / f"struck-{kind}").touch()
    if kind == "raise":
        raise ValueError("as told")
    if kind == "node":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def train(run: Any) -> None:
    state = run.keep(build)
    log = (OUT / f"seen-{run.rank}.txt").open("a", buffering=1)
    for batch in run.batches(state.loader, epochs=1000):
        if run.step >= STEPS:
            break
        loss = state.model(batch["x"]).pow(2).mean()
        loss.backward()
        strike(run)
        state.optimizer.step()
        state.optimizer.zero_grad()
        log.write(json.dumps([run.step, batch["id"], loss.item().hex()]) + "\n")
        run.commit(loss=loss)
    state.loader.close()


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
