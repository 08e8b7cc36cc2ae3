"""A small job that moves its parameters in ways that torch's optimizers do not tell of.

`moved_script.py STEPS OUT [FAULTS as JSON]`; a fault is {"rank", "step", "where"}: SIGKILL at a place of
WHERE in the step after `step` commits, once over all processes.
MOVED_KIND: by-hand, by-data (the same by `p.data`),
ema-first (a target network moves before the optimizer steps), accumulated (two micro-batches to a step),
swapped (the target's weights are put in by `p.data` for a look, before the update), unfrozen (a layer is
trained from LATE_AT on), or one of LATE or HELD,
which `run.commit` refuses. MOVED_PARALLEL: ddp or fsdp.
"""

import copy
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptless

WHERE = ("forward", "backward", "half", "updated", "committed")
LATE = ("late-group", "late-buffer", "late-parameter", "late-module", "other-group")
HELD = ("held-by-hand", "held-before-step", "held-micro-batch")

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
FAULTS: list[dict[str, Any]] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else []
KIND = os.environ["MOVED_KIND"]
PARALLEL = os.environ["MOVED_PARALLEL"]
LATE_AT = 3


def strike(where: str, run: Any) -> None:
    for number, fault in enumerate(FAULTS):
        if (fault["rank"], fault["step"], fault["where"]) != (run.rank, run.step, where):
            continue
        try:
            (OUT / f"struck-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)


def body() -> nn.Sequential:
    norm = nn.BatchNorm1d(64) if PARALLEL == "ddp" else nn.LayerNorm(64)
    return nn.Sequential(nn.Linear(32, 64), norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build(run: Any) -> ckptless.State:
    torch.manual_seed(1)
    model: nn.Module = body()
    if KIND == "late-group":
        list(model.parameters())[-1].requires_grad_(False)
    if KIND == "unfrozen":
        next(model.children()).requires_grad_(False)
    target = copy.deepcopy(model).requires_grad_(False)
    if PARALLEL == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (run.world_size,))
        model, target = sharded(model, mesh), sharded(target, mesh)
    trained = list(model.parameters())
    optimizer = torch.optim.AdamW(trained[:-1] if KIND == "late-group" else trained, lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 32))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    torch.manual_seed(100 + run.rank)
    # One that is never stepped would be as good; without any there is nothing that has hooks.
    by_hand = {} if KIND in ("by-hand", "by-data", "held-by-hand") else {"optimizer": optimizer}
    return ckptless.State(model=model, target=target, loader=loader, **by_hand)


# ------------------------------------------------------------------------------------------ moves


def update_by_hand(state: Any, run: Any) -> None:
    parameters = list(state.model.parameters())
    for number, p in enumerate(parameters):
        if number == len(parameters) // 2:
            strike("half", run)
        if KIND == "by-data":
            p.data.add_(p.grad, alpha=-0.05)
        else:
            with torch.no_grad():
                p -= 0.05 * p.grad


def pairs_of(state: Any) -> list[tuple[Any, Any]]:
    """The target's parameters with the model's, but for one that has come late."""
    own = [p for name, p in state.target.named_parameters() if name != "scale"]
    return list(zip(own, state.model.parameters(), strict=True))


def move_target(state: Any, run: Any) -> None:
    pairs = pairs_of(state)
    with torch.no_grad():
        for number, (slow, p) in enumerate(pairs):
            if number == len(pairs) // 2:
                strike("half", run)
            slow.mul_(0.9).add_(p, alpha=0.1)


@contextmanager
def swapped(state: Any) -> Iterator[None]:
    """The model with its target's weights; not taken out again by an end that is not foreseen."""
    pairs = pairs_of(state)
    own = [p.data for _slow, p in pairs]
    for slow, p in pairs:
        p.data = slow.data
    yield
    for (_slow, p), data in zip(pairs, own, strict=True):
        p.data = data


def loss_of(state: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        hint = state.target(x)
    if PARALLEL == "fsdp":
        state.target.reshard()
    noisy = x + torch.randn_like(x)
    return (state.model(noisy) - x).pow(2).mean() + 0.1 * (state.model(x) - hint).pow(2).mean()


def backward(state: Any, x: torch.Tensor, run: Any) -> Any:
    if KIND not in ("accumulated", "held-micro-batch"):
        loss = loss_of(state, x)
        strike("backward", run)
        loss.backward()
        return loss
    is_last = KIND == "accumulated" or run.step % 2
    with (
        nullcontext() if PARALLEL == "fsdp" or (KIND != "accumulated" and is_last) else state.model.no_sync()
    ):
        if PARALLEL == "fsdp":
            state.model.set_requires_gradient_sync(False)
        first = loss_of(state, x[:2])
        first.backward()
    if KIND == "held-micro-batch":
        return first
    strike("backward", run)
    if PARALLEL == "fsdp":
        state.model.set_requires_gradient_sync(True)
    second = loss_of(state, x[2:])
    second.backward()
    return first + second


def late(state: Any, run: Any) -> None:
    if run.step != LATE_AT:
        return
    own = dict(state.model.named_parameters())
    last = own[list(own)[-1]]
    if KIND == "unfrozen":
        state.model.requires_grad_()
    elif KIND == "late-group":
        state.optimizer.add_param_group({"params": [last.requires_grad_()], "lr": 1e-3})
    elif KIND == "other-group":
        group = state.optimizer.param_groups[0]["params"]
        group[0], group[1] = group[1], group[0]
    elif KIND == "late-buffer":
        state.target.register_buffer("seen", torch.zeros(3))
    elif KIND == "late-parameter":
        state.target.register_parameter("scale", nn.Parameter(torch.ones(3)))
    elif KIND == "late-module":
        state.target.add_module("more", nn.Dropout(0.5))


def step(state: Any, x: torch.Tensor, run: Any) -> Any:
    strike("forward", run)
    late(state, run)
    optimizer: Any = getattr(state, "optimizer", None)
    if optimizer is not None and KIND != "held-micro-batch":
        optimizer.zero_grad()
    elif optimizer is None:
        state.model.zero_grad()
    if KIND == "swapped":
        with swapped(state), torch.no_grad():
            state.model(x)
            strike("half", run)
    if KIND == "held-before-step":
        if run.step:
            optimizer.step()
            optimizer.zero_grad()
        return backward(state, x, run)
    loss = backward(state, x, run)
    if optimizer is None:
        update_by_hand(state, run)
        move_target(state, run)
        if KIND != "held-by-hand":
            state.model.zero_grad()
        return loss
    move_target(state, run)
    if KIND != "held-micro-batch":
        optimizer.step()
    return loss


def train(run: Any) -> None:
    state = run.keep(lambda: build(run))
    log = (OUT / f"loss-{run.rank}.txt").open("a", buffering=1)
    for (x,) in run.batches(state.loader, epochs=10_000):
        if run.step >= STEPS:
            break
        loss = float(step(state, x, run).detach())
        strike("updated", run)
        log.write(f"{run.step + 1} {loss.hex()} 0 {time.time()} {run.generation}\n")
        run.commit(loss=loss)
        strike("committed", run)
    (OUT / f"final-{run.rank}.txt").write_text(digest(state))


def digest(state: Any) -> str:
    found = hashlib.sha256()
    optimizer = getattr(state, "optimizer", None)
    state_of = optimizer.state_dict()["state"] if optimizer is not None else {}
    moments = [state_of[index] for index in sorted(state_of)]  # not as they came
    tensors = [*state.model.state_dict().values(), *state.target.state_dict().values()]
    for tensor in [*tensors, *(value for entry in moments for value in entry.values())]:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(own.detach().numpy().tobytes())
    return found.hexdigest()


OUT.mkdir(parents=True, exist_ok=True)
OVERLAP: Any = os.environ.get("MOVED_OVERLAP", "off")
ckptless.run(train, overlap=OVERLAP)
