"""Trains on the same global batches with any number of ranks: `recut_script.py STEPS OUT KIND`.

Each rank notes, of each step, which samples it had, the global loss, a digest of the whole state, and of
which generation and process it is. KIND is "ddp", "fsdp" (a dimension that no number of ranks divides) or
"hsdp". It ends after STEPS steps, or once there is a file OUT/end. Steps are slow (RECUT_SLEEP_S), where
RECUT_SLEEP_WHILE names a file as long as that is there.

RECUT_STRIKES is a list of faults, as JSON, which strike once each, and not before there is a file
OUT/arm-NUMBER: {"where", "rank", "kind"}, and where it matters "world" (the number of ranks). `where` is
"build", "parts" (some of the state of another number of ranks has come), "resized" (all of it, and nothing
is committed yet) or "commit"; `kind` is "kill", or "node" (daemon and agent, too).
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from held import held  # type: ignore[import-not-found]  # run as a script, beside it
from own_node import lose_node  # type: ignore[import-not-found]  # run as a script, beside it
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptless
from ckptless.data import MappedLoader
from ckptless.pytorch_hooks.elastic.memory import FormerStep
from ckptless.pytorch_hooks.running import main as running

STEPS, OUT, KIND = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
SLEEP_S = float(os.environ.get("RECUT_SLEEP_S", "0"))
SLOW = Path(os.environ.get("RECUT_SLEEP_WHILE", "/"))
STRIKES: list[dict[str, Any]] = json.loads(os.environ.get("RECUT_STRIKES", "[]"))
WATCH = "RECUT_WATCH" in os.environ
if WATCH:
    # A Gloo thread that has missed the end of its sockets keeps its group for so long.
    running.COLLECTIVE_TIMEOUT = timedelta(seconds=30)  # type: ignore[attr-defined]
BATCH, WIDTH = 12, int(os.environ.get("RECUT_WIDTH", "37"))
# Odd, and otherwise any.
MIX = (-0x61C8864680B583EB, -0x3B314601E57A13AD)
FETCH = FormerStep._fetch
# The State, for as long as there is the same number of ranks.
LIVING: list[ckptless.State] = []


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


def build(run: Any) -> ckptless.State:
    torch.manual_seed(1)
    model = make_model(run.world_size)
    strike("build", run)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    loader = MappedLoader(Data(), batch_size=BATCH, seed=3, shuffle=True, workers=0)
    torch.manual_seed(100 + run.rank)
    return ckptless.State(model=model, optimizer=optimizer, loader=loader)


# ----------------------------------------------------------------------------------------- digests


def digest(state: Any, run: Any) -> str:
    """Return a digest of parameters and moments, whole: the same for the same bits, however they are cut.

    Each rank sums up the words of its part, times what their places in the whole give; sums go around at
    2^64, where an odd factor loses no bit.
    """
    tensors = [
        tensor
        for parameter in state.model.parameters()
        for tensor in (parameter, *state.optimizer.state.get(parameter, {}).values())
    ]
    shards = {"ddp": 1, "fsdp": run.world_size, "hsdp": 2}[KIND]
    sums = [weighed(tensor, number, run.rank % shards) for number, tensor in enumerate(tensors)]
    mine = torch.stack(sums).sum().reshape(1)
    found = [torch.zeros_like(mine) for _ in range(run.world_size)]
    dist.all_gather(found, mine)
    parts = [int(one) for one in found]
    if parts != parts[:shards] * (run.world_size // shards):
        return f"replicas differ: {parts}"
    return hex(sum(parts[:shards]) % 2**64)


def weighed(tensor: torch.Tensor, number: int, shard: int) -> torch.Tensor:
    """The sum of one tensor's part; of what is no DTensor the first shard has it all."""
    here, first = tensor.detach(), 0
    if isinstance(here, DTensor):
        rows = -(-len(here) // here.device_mesh.size(here.device_mesh.ndim - 1))
        first = min(len(here), shard * rows) * (here.numel() // len(here))
        here = here.to_local()
    elif shard:
        return torch.zeros((), dtype=torch.int64)
    words = here.contiguous().view(torch.int32).reshape(-1).long() & 0xFFFFFFFF
    place = torch.arange(first, first + len(words)) + (number << 32)
    place = place * MIX[0]
    place = (place ^ (place >> 29)) * MIX[1]
    return (words * (place | 1)).sum()


# ------------------------------------------------------------------------------------------ faults


def strike(where: str, run: Any) -> None:
    here = {"where": where, "rank": run.rank, "world": run.world_size}
    for number, fault in enumerate(STRIKES):
        if any(fault[word] != here[word] for word in here.keys() & fault.keys()):
            continue
        if not (OUT / f"arm-{number}").exists():
            continue
        try:
            (OUT / f"struck-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if fault["kind"] == "node":
            lose_node()
        os.kill(os.getpid(), signal.SIGKILL)


def strike_at_parts(run: Any) -> None:
    """Have the fetch of parts come by here."""

    def fetch(self: FormerStep, *args: Any) -> torch.Tensor:
        found = FETCH(self, *args)
        strike("parts", run)
        return found

    FormerStep._fetch = fetch  # type: ignore[assignment, method-assign]


# ---------------------------------------------------------------------------------------- training


def note(name: str, run: Any, *words: object) -> None:
    with (OUT / f"{name}-{run.rank}.txt").open("a") as log:
        log.write(json.dumps(words) + "\n")


def train(run: Any) -> None:
    def make() -> ckptless.State:
        LIVING.clear()
        LIVING.append(build(run))
        return LIVING[0]

    def resumed(run: Any) -> None:
        note("resumed", run, run.step, run.world_size, digest(LIVING[0], run), torch.rand(1).item())

    def resized(run: Any, old: int, new: int) -> None:
        strike("resized", run)
        note("resized", run, run.generation, run.step, old, new, digest(LIVING[0], run))

    note("pid", run, os.getpid(), run.generation)
    run.on_recovery(resumed)
    run.on_resize(resized)
    strike_at_parts(run)
    state = run.keep(make)
    log = (OUT / f"seen-{run.rank}.txt").open("a", buffering=1)
    ends = False
    for numbers, x in run.batches(state.loader, epochs=100_000):
        if run.step >= STEPS or ends:
            break
        # The mean over the global batch, whatever a rank's part of it: gradients are averaged over ranks.
        loss = (state.model(x) - x).pow(2).mean(1).sum() / BATCH
        (loss * run.world_size).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        # All end after the same step, whoever of them sees the file first.
        total = torch.stack([loss.detach(), torch.tensor(float((OUT / "end").exists()))])
        dist.all_reduce(total)
        ends = total[1].item() > 0
        now = (digest(state, run), run.generation, os.getpid(), time.time())
        log.write(json.dumps([run.step + 1, numbers.tolist(), total[0].item(), *now]) + "\n")
        strike("commit", run)
        run.commit(loss=total[0])
        if WATCH:
            note("watch", run, run.generation, *held())
        if SLOW.exists():
            time.sleep(SLEEP_S)
    state.loader.close()


OUT.mkdir(parents=True, exist_ok=True)
ckptless.run(train)
