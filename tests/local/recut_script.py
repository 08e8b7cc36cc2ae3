"""Trains on the same global batches with any number of ranks: `recut_script.py STEPS OUT KIND`.

The steps are slow (RECUT_SLEEP_S) as long as the file RECUT_SLEEP_WHILE is there.
Each rank notes, of each step, which samples it had; rank 0 the global loss, and a digest of the whole state.
KIND is "ddp", "fsdp" (a dimension that no number of ranks divides) or "hsdp".
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptless
from ckptless.data import MappedLoader

STEPS, OUT, KIND = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
SLEEP_S = float(os.environ.get("RECUT_SLEEP_S", "0"))
SLOW = Path(os.environ.get("RECUT_SLEEP_WHILE", "/"))
BATCH, WIDTH = 12, 37


class Data(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Numbers, and what follows from them."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(16, generator=torch.Generator().manual_seed(index))


def make_model(world_size: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16))
    model[2].bias.requires_grad_(False)
    if KIND == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if KIND == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
    else:
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build(world_size: int) -> ckptless.State:
    torch.manual_seed(1)
    model = make_model(world_size)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    loader = MappedLoader(Data(), batch_size=BATCH, seed=3, shuffle=True, workers=0)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    return ckptless.State(model=model, optimizer=optimizer, loader=loader)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(state: Any) -> str:
    """Of parameters and moments, whole."""
    found = hashlib.sha256()
    for parameter in state.model.parameters():
        for tensor in (parameter, *state.optimizer.state.get(parameter, {}).values()):
            found.update(full(tensor).detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(run: Any) -> None:
    def resumed(run: Any) -> None:
        text = json.dumps([run.step, run.world_size, digest(state_here[0]), torch.rand(1).item()])
        (OUT / f"resumed-{run.rank}.txt").write_text(text)

    state_here: list[ckptless.State] = []

    def make() -> ckptless.State:
        state_here[:] = [build(run.world_size)]
        return state_here[0]

    run.on_recovery(resumed)
    state = run.keep(make)
    log = (OUT / f"seen-{run.rank}.txt").open("a", buffering=1)
    for numbers, x in run.batches(state.loader, epochs=1000):
        if run.step >= STEPS:
            break
        # The mean over the global batch, whatever a rank's part of it: gradients are averaged over ranks.
        loss = (state.model(x) - x).pow(2).mean(1).sum() / BATCH
        (loss * run.world_size).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        log.write(json.dumps([run.step + 1, numbers.tolist(), total.item(), digest(state)]) + "\n")
        run.commit(loss=total)
        if SLOW.exists():
            time.sleep(SLEEP_S)
    state.loader.close()


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
