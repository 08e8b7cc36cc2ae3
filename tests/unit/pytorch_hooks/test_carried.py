"""Which variables a loop carries from one step to the next, by its code, and of which of them it is told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptless.pytorch_hooks.cursor.carried import LOOKS, MANY, CarriedData
from ckptless.pytorch_hooks.cursor.turns import carried
from ckptless.pytorch_hooks.state import State, TensorSet
from ckptless.pytorch_hooks.state.reach import script_frames
from ckptless.pytorch_hooks.state.second_look import SecondLook

Commit = Callable[..., None]
STEPS = LOOKS + 2


def losses() -> list[float]:
    return [8.0 / (n + 1) for n in range(STEPS)]


def all_kinds(commit: Commit) -> None:
    best, mean, again, total = 1e9, 0.0, 0.0, 0.0
    ahead = torch.zeros(1)
    for loss in losses():
        _now = ahead + loss
        if loss < best:
            best = loss
        mean = 0.9 * mean + loss
        try:
            root = loss**0.5
        except ValueError:
            root = 0.0
        again = root + 1.0
        ahead = torch.full((1,), loss)
        total += again
        commit()


def nothing(commit: Commit) -> None:
    """Has variables that each turn sets anew, that never change, or that are read behind the loop alone."""
    rate, last = 0.1, 0.0
    for loss in losses():
        scaled = loss * rate
        if scaled > 1.0:
            part = scaled
            assert part
        else:
            part = 1.0
        with torch.no_grad():
            last = part + sum(scaled for scaled in (1.0, 2.0))
        for _ in range(2):
            inner = 0.0
            inner += loss
        commit()
    assert last


def in_a_loop_of_loops(commit: Commit) -> None:
    best, values = 1e9, iter(losses())
    for _epoch in range(2):
        total = 0.0
        for _ in range(STEPS // 2):
            total += next(values)
            commit()
        best = min(best, total)


def by_a_helper(commit: Commit) -> None:
    def step(loss: float) -> None:
        scaled = loss * 2
        commit()
        assert scaled

    total = 0.0
    for loss in losses():
        total += loss
        step(loss)


def counts(commit: Commit) -> None:
    done = 0
    for _number, _ in enumerate(losses()):
        commit()
        done = done + 1


def counts_samples(commit: Commit) -> None:
    samples = 0
    while samples < 32 * STEPS:
        samples += 32
        commit()


def clocks(commit: Commit) -> None:
    began = time.time()
    for _ in losses():
        took_s = time.time() - began
        began = time.time()
        commit()
        assert took_s >= 0


def in_place(commit: Commit) -> None:
    """Changes what is in its variables, and sets some anew."""
    curve: list[float] = []
    window: deque[torch.Tensor] = deque(maxlen=3)
    sums = {"loss": 0.0, "means": {"now": 1.0}}
    center, counts, hidden = torch.zeros(2), np.zeros(3), (torch.zeros(1), torch.zeros(1))
    weight = torch.ones(1, requires_grad=True)
    for loss in losses():
        curve.append(loss)
        window.append(torch.full((2,), loss))
        sums["means"]["now"] *= 0.5  # type: ignore[index]
        center.mul_(0.9).add_(loss)
        counts += loss
        hidden = (weight * hidden[0].detach() + loss, hidden[1])
        commit()


def changes_nothing(commit: Commit) -> None:
    rates, table, names, frozen = [0.1, 0.2], {"a": (1, 2)}, deque(["x"]), np.arange(3)
    images = [torch.ones(2)]
    for number, loss in enumerate(losses()):
        batch = [image * loss for image in images]
        metrics = {"loss": loss, "rate": rates[number % 2], "more": table["a"], "frozen": frozen}
        commit()
        assert len(batch) == len(names) < len(metrics)


def several_steps_of_one(commit: Commit) -> None:
    """The inner loop reads what the outer one sets anew."""
    for loss in losses():
        batch, rates = torch.full((2,), loss), [loss]
        for _ in range(2):
            assert (batch * rates[0]).numel()
            commit()


def large(commit: Commit) -> None:
    """Containers of which only the length is looked at, and data that would take long to look through."""
    samples = list(range(2 * MANY))
    table = [[[0.0] * 30 for _ in range(30)] for _ in range(MANY)]
    for loss in losses():
        samples.append(int(loss))
        table[0][0][0] += loss
        commit()


def has_it_in_the_state(commit: Commit) -> None:
    state: dict[str, Any] = {"replay": deque(maxlen=9), "inner": {"curve": []}}
    replay, curve = state["replay"], state["inner"]["curve"]
    for loss in losses():
        replay.append(loss)
        curve.append(loss)
        commit(state)


def goes_on(commit: Commit) -> None:
    """As the docs have it."""
    state: dict[str, Any] = {"best": 1e9, "numbers": {"mean": 0.0}}
    best, mean = state["best"], state["numbers"]["mean"]
    for loss in losses():
        best, mean = min(best, loss), 0.9 * mean + loss
        state["best"], state["numbers"]["mean"] = best, mean
        commit(state)


@pytest.mark.parametrize(
    ("train", "asks", "names"),
    [
        (all_kinds, True, "ahead and best and mean and total"),
        (nothing, True, ""),
        (in_a_loop_of_loops, True, "best and total"),
        (by_a_helper, True, "total"),
        (counts, False, "_number and done"),
        (counts, True, ""),
        (counts_samples, False, "samples"),
        (counts_samples, True, "samples"),
        (clocks, True, ""),
        (goes_on, True, ""),
        (in_place, True, "center and counts and curve and hidden and sums and window"),
        (changes_nothing, True, ""),
        (several_steps_of_one, True, ""),
        (large, True, "samples"),
        (has_it_in_the_state, True, ""),
    ],
)
def test_what_is_told(train: Callable[[Commit], None], asks: bool, names: str) -> None:
    told: list[str] = []
    numbers = CarriedData(told.append)

    def commit(state: dict[str, Any] | None = None) -> None:
        if not numbers.done:
            numbers.look(script_frames(train), state or {}, asks=asks)

    train(commit)
    assert [text.partition(":")[0] for text in told] == [names] * bool(names)


def test_only_of_loops_that_are_under_way() -> None:
    def before(commit: Commit) -> None:
        total = 0.0
        for loss in losses():
            total += loss
        commit()

    code = before.__code__
    assert carried(code, 0) == carried(code, len(code.co_code) - 2) == frozenset()


def test_what_a_state_has_is_nobodys_own() -> None:
    """Aliases of its tensors, views of these, and the groups of its optimizer."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer)
    tensors = TensorSet(state)
    look = SecondLook(state, tensors.names)
    told: list[str] = []
    numbers = CarriedData(told.append)

    def train() -> None:
        parameters, groups, live = list(model.parameters()), optimizer.param_groups, model.state_dict()
        average = {name: tensor.clone() for name, tensor in live.items()}
        for loss in losses():
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, loss)
            for group in groups:
                group["lr"] *= 0.9
            optimizer.step()
            for name, tensor in average.items():
                tensor.lerp_(live[name], 0.1)
            if not numbers.done:
                numbers.look(script_frames(train), {}, asks=True, has=look.has(tensors))

    train()
    assert [text.partition(":")[0] for text in told] == ["average"]
