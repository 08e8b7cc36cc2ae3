"""Jobs whose state is kept where nobody looks at first: `unseen.py KIND STEPS OUT [FAULTS as JSON]`.

A fault is [rank, step, place], a SIGKILL in the step after `step` commits; the places are those of `strike`.
"""

import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptless

KIND, STEPS, OUT = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
FAULTS = json.loads(sys.argv[4]) if len(sys.argv) > 4 else []


def strike(run: Any, place: str) -> None:
    for number, (rank, step, where) in enumerate(FAULTS):
        if (rank, step, where) == (run.rank, run.step, place):
            mark = OUT / f"struck-{number}"
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------- optimizers


class Handwritten:
    """No optimizer of torch's: its moments are in a list, and only state_dict tells."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        self.params, self.lr, self.t = list(params), lr, 0
        self.moments = [torch.zeros_like(p) for p in self.params]

    def step(self) -> None:
        self.t += 1
        with torch.no_grad():
            for p, m in zip(self.params, self.moments, strict=True):
                m.mul_(0.9).add_(p.grad)
                p -= self.lr * (1 + 1 / self.t) * m

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "moments": [m.clone() for m in self.moments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = state["t"]
        for m, saved in zip(self.moments, state["moments"], strict=True):
            m.copy_(saved)


class Opaque(Handwritten):
    """Nobody can tell what it has."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class Grouped(Handwritten):
    """As torch's, but none of them; its step is counted in an attribute."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.param_groups = [{"params": self.params, "lr": lr}]
        self.state = {p: {"m": m} for p, m in zip(self.params, self.moments, strict=True)}

    def step(self) -> None:
        self.moments = [self.state[p]["m"] for p in self.params]
        super().step()


class Listed(torch.optim.Optimizer):
    """Of torch's, and keeps to itself what belongs into `state`; made when it is first needed."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.t = 0
        self.moments: dict[Any, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    m = self.moments.setdefault(p, torch.zeros_like(p))
                    m.mul_(0.9).add_(p.grad)
                    p -= group["lr"] * (1 + 1 / self.t) * m


class Container(torch.optim.Optimizer):
    """As torchtitan's OptimizersContainer: groups of its own, all state in the optimizers inside."""

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in model_parts]
        super().__init__([p for part in model_parts for p in part.parameters()], {"lr": 0.01})

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self, closure: Any = None) -> Any:
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)


class Schedulers:
    """As torchtitan's LRSchedulersContainer: it tells of the first, and takes all for the same."""

    def __init__(self, optimizers: Container) -> None:
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(one, 0.99 - 0.01 * n) for n, one in enumerate(optimizers)
        ]

    def step(self) -> None:
        for one in self.schedulers:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one in self.schedulers:
            one.load_state_dict({**state, "gamma": one.gamma})


class ModelParts:
    """As torchtitan's ModelWrapper: a list, and no module."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts


class Ema:
    """A moving average in a list, of which no state_dict tells."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        with torch.no_grad():
            for s, p in zip(self.shadow, self.model.parameters(), strict=True):
                s.lerp_(p, 0.1)


# ------------------------------------------------------------------------------------------ models


class Scaled(nn.Linear):
    """As a layer of Transformer Engine: scales that only get_extra_state tells, in a file in memory."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.scale, self.tau = 1.0, 2.0
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = 0.9 * self.scale + 0.1 * float(x.detach().abs().max())
        self.tau *= 0.97
        self.steps: torch.Tensor = self.steps + 1
        return torch.add(super().forward(x) * self.scale / self.tau, self.steps)

    def get_extra_state(self) -> Any:
        return io.BytesIO(self.scale.hex().encode())

    def set_extra_state(self, state: Any) -> None:
        self.scale = float.fromhex(state.getvalue().decode())


class Net(nn.Module):
    """Two parts; `sizes` are those of its layers."""

    def __init__(self, layer: Callable[[int, int], nn.Module] = nn.Linear, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = layer(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


class Talking(torch.utils.data.DataLoader[Any]):
    """As Accelerate's: its generator is rank 0's when an epoch begins, and state_dict only raises."""

    def __init__(self, data: Any) -> None:
        self.drawn = torch.Generator().manual_seed(11)
        sampler = torch.utils.data.RandomSampler(data, generator=self.drawn)
        super().__init__(data, batch_size=2, sampler=sampler)

    def __iter__(self) -> Any:
        state = self.drawn.get_state()
        dist.broadcast(state, 0)
        self.drawn.set_state(state)
        # Accelerate's is a generator, too, that fetches one batch ahead.
        inner = super().__iter__()
        batch = next(inner)
        for following in inner:
            yield batch
            batch = following
        yield batch

    def state_dict(self) -> Any:
        raise AttributeError("only of a StatefulDataLoader")

    def load_state_dict(self, state: Any) -> None:
        raise AttributeError("only of a StatefulDataLoader")


def build(run: Any) -> ckptless.State:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(20, 8))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    torch.manual_seed(100)
    if KIND in ("container", "fsdp-container"):
        return parts(loader)
    match KIND:
        case "cut":
            return ckptless.State(model=Net(width=16 + run.rank), loader=loader)
        case "stages":
            torch.manual_seed(run.rank)
            return ckptless.State(model=Net(), loader=loader)
    net = Net(Scaled if KIND == "extra" else nn.Linear)
    model = DistributedDataParallel(net)
    makers: dict[str, Callable[[Any], Any]] = {
        "handwritten": Handwritten,
        "opaque": Opaque,
        "grouped": Grouped,
        "listed": Listed,
    }
    optimizer = makers.get(KIND, torch.optim.AdamW)(model.parameters())
    if KIND == "talking":
        loader = Talking(data)
    if KIND == "ema":
        return ckptless.State(model=model, optimizer=optimizer, loader=loader, ema=Ema(net))
    if KIND == "opaque":
        return ckptless.State(model=model, updates=optimizer, loader=loader)
    if KIND == "handwritten":
        return ckptless.State(model=model, updates=optimizer, loader=loader)
    return ckptless.State(model=model, optimizer=optimizer, loader=loader)


def parts(loader: Any) -> ckptless.State:
    net = Net()
    made = [net.a, net.b]
    if KIND == "fsdp-container":
        for part in made:
            fully_shard(part)
    else:
        made = [DistributedDataParallel(part) for part in made]
    optimizer = Container(made)
    return ckptless.State(
        model=ModelParts(made), optimizer=optimizer, scheduler=Schedulers(optimizer), loader=loader
    )


def train(run: Any) -> None:
    state = run.keep(lambda: build(run))
    log = (OUT / f"loss-{run.rank}.txt").open("a", buffering=1)
    optimizer = state.updates if KIND == "handwritten" else state.optimizer
    held = state.model.parts if isinstance(state.model, ModelParts) else [state.model]
    for (x,) in run.batches(state.loader, epochs=10_000):
        if run.step >= STEPS:
            break
        strike(run, "forward")
        noise = 0.1 * torch.randn_like(x)

        def gradients(x: torch.Tensor = x, noise: torch.Tensor = noise) -> torch.Tensor:
            y = x + noise
            for number, part in enumerate(held):
                y = torch.relu(part(y)) if len(held) > 1 and not number else part(y)
            loss = (y - x).square().mean()
            if KIND == "ema":
                loss = loss + state.ema.shadow[0].square().mean()
            strike(run, "backward")
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        if KIND == "closure":
            # What is told tells of the update, too.
            loss = optimizer.step(gradients) + sum(p.detach().sum() for p in state.model.parameters())
        else:
            loss = gradients()
            optimizer.step()
        if KIND in ("diverges", "compared") and run.step >= 5 and run.rank:
            # As where each rank clips by what it has itself.
            with torch.no_grad():
                next(iter(state.model.parameters())).mul_(1.001)
        if KIND == "compared":
            run.compare("after the update")
        strike(run, "update")
        optimizer.zero_grad()
        if state.scheduler is not None:
            state.scheduler.step()
        if KIND == "ema":
            state.ema.update()
        strike(run, "commit")
        log.write(
            f"{run.step + 1} {loss.item().hex()} {x.sum().item().hex()} {time.time()} {run.generation}\n"
        )
        run.commit(loss=loss)
    (OUT / f"final-{run.rank}.txt").write_text("done")


OUT.mkdir(parents=True, exist_ok=True)
random.seed(0)
ckptless.run(train)
