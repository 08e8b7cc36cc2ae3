"""What was changed between `keep` and the loop is found, and all but tensors is put back."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch

from ckptless.pytorch_hooks.errors import CarriedError
from ckptless.pytorch_hooks.running.entry import Entry
from ckptless.pytorch_hooks.state import State, TensorSet


def state() -> State:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return State(model=model, optimizer=optimizer, scheduler=scheduler, best=3.0, seen=[1, 2])


def numbers(of: State) -> list[object]:
    return [
        of.optimizer.param_groups[0]["lr"],
        of.scheduler.last_epoch,
        of.best,
        of.seen,
        torch.rand(1).item(),
    ]


def rate(of: State) -> None:
    of.optimizer.param_groups[0]["lr"] = 0.5


def draws(_of: State) -> None:
    torch.rand(3)
    random.random()


def best(of: State) -> None:
    of.best = 1.0
    of.seen.append(3)


CHANGES: dict[Callable[[State], object], list[str]] = {
    rate: ["state.optimizer"],
    draws: [],
    best: ["state.best", "state.seen"],
    lambda of: of.scheduler.step(): ["state.scheduler"],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_put_back(change: Callable[[State], object]) -> None:
    torch.manual_seed(3)
    one = state()
    torch.manual_seed(4)
    entry = Entry(one, TensorSet(one), goes_on=True)
    change(one)
    assert entry.put_back() == CHANGES[change]
    found = numbers(one)
    torch.manual_seed(3)
    other = state()
    torch.manual_seed(4)
    assert found == numbers(other)


WRITES: dict[str, Callable[[State], object]] = {
    "a parameter": lambda of: torch.nn.init.zeros_(of.model[0].weight),
    "all": lambda of: of.model.load_state_dict(of.model.state_dict()),
}


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_tensor_that_was_written_to_is_refused(name: str, *, goes_on: bool) -> None:
    one = state()
    entry = Entry(one, TensorSet(one), goes_on=goes_on)
    assert entry.written() is None
    with torch.no_grad():
        WRITES[name](one)
    assert entry.written() is not None
    with pytest.raises(CarriedError, match=r"has written to state\.model\..* between run\.keep and its loop"):
        entry.put_back()


def test_statistics_of_a_forward_pass_are_put_back() -> None:
    one = state()
    mean = one.model[1].running_mean.clone()
    entry = Entry(one, TensorSet(one), goes_on=True)
    one.model(torch.randn(4, 2))
    assert not torch.equal(one.model[1].running_mean, mean)
    assert entry.written() is None
    assert entry.put_back() == ["buffers"]
    assert torch.equal(one.model[1].running_mean, mean)


def test_an_optimizers_state_that_is_another_one_is_found() -> None:
    one = state()
    entry = Entry(one, TensorSet(one), goes_on=True)
    one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    assert "optimizer" in str(entry.written())
