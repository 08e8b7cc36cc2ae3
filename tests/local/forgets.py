"""Trains a little, and forgets to put a thing into the State: `forgets.py WHAT`; "nothing" is sound."""

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import ckptless

WHAT = sys.argv[1]
STEPS = 40
WORDS = Path(tempfile.gettempdir()) / "ckptless-forgets.txt"

counter = 0
cache: dict[str, float] = {}


def build() -> ckptless.State:
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    kind = Decaying if WHAT == "optimizer" else torch.optim.SGD
    return ckptless.State(model=model, optimizer=kind(model.parameters(), lr=0.1, momentum=0.9), seen=0)


class Decaying(torch.optim.SGD):
    """Its class has a dict, with what it has of its own."""

    shared: ClassVar[dict[str, float]] = {"scale": 1.0}

    def step(self, closure: Any = None) -> Any:
        self.shared["scale"] *= 0.9
        for group in self.param_groups:
            group["lr"] = 0.1 * self.shared["scale"]
        return super().step(closure)


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 64)


class Shuffled(torch.utils.data.Sampler[int]):
    """With a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Any:
        while True:
            yield int(torch.randint(0, 64, (1,), generator=self.generator))


# Each gives what is to be called before a step, for its scale, and after it, with its loss.
Made = tuple[Callable[[], float], Callable[[float], object]]


def count() -> float:
    global counter
    counter += 1
    return counter / 100


def count_in_a_dict() -> float:
    cache[str(len(cache))] = 1.0
    return len(cache) / 100


def smoothed() -> Made:
    losses = [0.0]
    return (lambda: 1.0 + sum(losses) / len(losses)), losses.append


def read_on() -> Made:
    words = WORDS.open()
    return (lambda: float(ord(words.read(1))) / 100), lambda _loss: None


def drawn_by(draw: Callable[[], float]) -> Made:
    return draw, lambda _loss: None


def make(model: Any) -> Made:
    match WHAT:
        case "counter":
            return drawn_by(count)
        case "dict":
            return drawn_by(count_in_a_dict)
        case "closure":
            return smoothed()
        case "file":
            return read_on()
        case "generator":
            own = torch.Generator().manual_seed(3)
            return drawn_by(lambda: float(torch.rand(1, generator=own)))
        case "numpy":
            return drawn_by(np.random.default_rng(3).random)
        case "random":
            return drawn_by(random.Random(3).random)
        case "sampler":
            loader: Any = torch.utils.data.DataLoader(Data(), batch_size=4, sampler=Shuffled())
            batches = iter(loader)
            return drawn_by(lambda: float(next(batches).sum()))
    return drawn_by(lambda: 1.0)


def train(run: Any) -> None:
    state = run.keep(build)
    torch.manual_seed(5 + run.rank)
    before, after = make(state.model)
    if WHAT == "ema":
        average = [p.detach().clone() for p in state.model.parameters()]
    elif WHAT == "local":
        total = 0.0
    while run.step < STEPS:
        batch = torch.full((4, 8), run.step / STEPS)
        loss = (state.model(batch) - batch).pow(2).mean() * before()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        after(loss.item())
        if WHAT == "ema":
            for mean, p in zip(average, state.model.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.1)
        elif WHAT == "local":
            total += loss.item()
        state.seen += len(batch)
        run.commit(loss=loss)


if not WORDS.exists():
    WORDS.write_text("the quick brown fox jumps over the lazy dog " * 50)
ckptless.run(train)
