"""What a training function has beside its State and trains with is told of, once it has changed."""

from __future__ import annotations

import functools
import gc
import random
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from ckptless.pytorch_hooks.state import State, TensorSet
from ckptless.pytorch_hooks.state.reach import Outside
from ckptless.pytorch_hooks.state.second_look import SecondLook

STEPS = 3
HOWS = ("scheduler", "plateau", "average", "optimizer", "scaler")


class Watched:
    """A State, and who looks at what is beside it at each commit."""

    def __init__(self, train: Callable[..., Any] | None) -> None:
        model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.model = model
        self.state = State(model=model, optimizer=self.optimizer, scheduler=self.schedule)
        self.tensors = TensorSet(self.state)
        self.look = SecondLook(self.state, self.tensors.names)
        self.told: list[str] = []
        self.outside = Outside(train, self.told.append)

    def commit(self, *others: object) -> None:
        """`others` are looked at by somebody else, and so is this."""
        self.look.look(self.tensors)
        self.outside.look(self.look, lambda: {id(one): one for one in (self, *others)})


def forgets(run: Watched, how: str) -> None:
    """Train with something that the State does not have."""
    makes: dict[str, Callable[[], Any]] = {
        "scheduler": lambda: torch.optim.lr_scheduler.StepLR(run.optimizer, 1),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer),
        "average": lambda: AveragedModel(run.model),
        "optimizer": lambda: torch.optim.SGD(run.model.parameters(), 0.1, momentum=0.9),
        "scaler": lambda: torch.amp.GradScaler("cpu", growth_interval=1),
    }
    one = makes[how]()
    for step in range(STEPS):
        loss = run.model(torch.ones(1, 2)).sum()
        (one.scale(loss) if how == "scaler" else loss).backward()
        if how == "scaler":
            one.step(run.optimizer)
            one.update()
        else:
            run.optimizer.step()
        if how == "plateau":
            one.step(float(step))
        elif how in ("scheduler", "optimizer"):
            one.step()
        elif how == "average":
            one.update_parameters(run.model)
        run.optimizer.zero_grad()
        run.commit()


@pytest.mark.parametrize("how", HOWS)
def test_what_trains_beside_the_state_is_told_once(how: str) -> None:
    for train in (forgets, functools.partial(forgets, how=how)):
        run = Watched(train)
        forgets(run, how)
        (text,) = run.told
        assert text.startswith("the local one"), text


class Counts:
    """A hook's state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient / self.calls


@pytest.mark.parametrize("how", ["object", "closure", "accumulated", "nothing kept"])
def test_what_hooks_of_parameters_keep_is_told_of(how: str) -> None:
    run = Watched(None)
    kept = {"scale": 1.0}

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        kept["scale"] *= 0.5
        return gradient * kept["scale"]

    def accumulated(parameter: torch.Tensor) -> None:
        kept["scale"] += float(parameter.numel())

    if how == "accumulated":
        run.model.weight.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
    else:
        hooks = {"object": Counts(), "closure": scaled, "nothing kept": torch.neg}
        run.model.weight.register_hook(hooks[how])  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        run.model(torch.ones(1, 2)).sum().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.commit()
    kinds = {
        "object": "backward_hooks[0].calls",
        "closure": "backward_hooks[0]",
        "accumulated": "grad_hooks[0]",
    }
    assert len(run.told) == (how in kinds)
    assert all(kinds[how] in text for text in run.told), run.told


class Rows:
    """A dataset."""

    def __init__(self) -> None:
        self.x, self.reads = torch.ones(2), 0


@pytest.mark.parametrize(("changes", "told"), [(9, []), (1, ["reads"]), (2, ["reads"]), (4, [])])
def test_a_dataset_whose_loader_begins_later_does_not_change(changes: int, told: list[str]) -> None:
    held = Rows()
    run = Watched(lambda: held)
    for step in range(5):
        held.reads += step == changes
        run.commit(*([held] if step >= 2 else []))
    assert [text.partition(" changes")[0].rpartition(".")[2] for text in run.told] == told


def draws(run: Watched, how: str) -> None:
    """Draw from a generator that is the function's own."""
    torchs, pythons, numpys = torch.Generator(), random.Random(1), np.random.default_rng(1)
    makes: dict[str, Callable[[], float]] = {
        "torchs": lambda: torch.rand(1, generator=torchs).item(),
        "pythons": lambda: pythons.random(),
        "numpys": lambda: numpys.random(),
    }
    for _ in range(STEPS):
        drawn = makes[how]()
        (run.model(torch.ones(1, 2)).sum() * drawn).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.commit()


@pytest.mark.parametrize("how", ["torchs", "pythons", "numpys"])
def test_a_generator_of_its_own_is_told_of(how: str) -> None:
    run = Watched(functools.partial(draws, how=how))
    draws(run, how)
    (text,) = run.told
    assert text.startswith(f"the local {how} changes in training"), text


class Trainer:
    """As many scripts have one, with numbers of its own."""

    def __init__(self, run: Watched, sampler: object) -> None:
        self.run, self.sampler = run, sampler
        self.step = 0

    def fit(self) -> None:
        for _ in range(STEPS):
            self.run.model(torch.ones(1, 2)).sum().backward()
            self.run.optimizer.step()
            self.run.optimizer.zero_grad()
            vars(self.sampler)["place"] = self.step
            self.step += 1
            self.run.commit(self.sampler)


class Sampler:
    """It changes, and is somebody else's to look at."""


def has_a_trainer(run: Watched) -> None:
    trainer = Trainer(run, Sampler())
    trainer.fit()


def test_an_object_of_the_scripts_own_is_told_of_by_one_name() -> None:
    run = Watched(has_a_trainer)
    has_a_trainer(run)
    (text,) = run.told
    assert text.startswith("the local self.step changes in training"), text


def keeps(run: Watched) -> None:
    """Train with what the State has, by other names, and with what does not change."""
    model, optimizer, schedule, criterion = run.model, run.optimizer, run.schedule, torch.nn.MSELoss()
    teacher = torch.nn.Linear(2, 1)
    for _ in range(STEPS):
        loss = criterion(model(torch.ones(1, 2)), teacher(torch.ones(1, 2)).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.commit()


def test_what_the_state_has_and_what_stays_is_not_told_of() -> None:
    run = Watched(keeps)
    keeps(run)
    assert run.told == []


def test_of_a_script_that_is_no_function_globals_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(None)
    script = """
import torch
average = torch.optim.swa_utils.AveragedModel(run.model)
model, optimizer, steps = run.model, run.optimizer, 0
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    steps += 1
    run.commit()
"""
    main = ModuleType("__main__")
    vars(main)["run"] = run
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(script, vars(main))
    (text,) = run.told
    assert text.startswith("the global average.module."), text
    assert vars(main)["steps"] == 3


def test_variables_do_not_live_longer_by_a_look() -> None:
    def train(run: Watched) -> None:
        batch = torch.ones(1, 2)
        lives = weakref.ref(batch)
        run.commit()
        assert batch is not None
        del batch
        gc.collect()
        assert lives() is None

    train(Watched(train))
