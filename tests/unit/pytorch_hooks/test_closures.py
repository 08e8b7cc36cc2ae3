"""An optimizer that computes its gradients in a closure makes no update of those that are not reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptless.pytorch_hooks.state.gradients import with_checked_closure

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}


class EndedError(Exception):
    """The generation is over."""


class Step:
    """A model of one parameter, whose generation is over after so many calls of the closure."""

    def __init__(self, kind: str, good: int) -> None:
        self.good, self.calls = good, 0
        self.parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        self.optimizer = OPTIMIZERS[kind]([self.parameter])
        self.optimizer.register_step_pre_hook(
            lambda _optimizer, args, kwargs: with_checked_closure(args, kwargs, self.check)
        )

    def check(self) -> None:
        if self.calls > self.good:
            raise EndedError

    def closure(self) -> torch.Tensor:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = (self.parameter**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def take(self, named: bool) -> Any:
        step: Any = self.optimizer.step
        return step(closure=self.closure) if named else step(self.closure)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("named", [False, True])
def test_what_is_not_reduced_is_no_update(kind: str, named: bool) -> None:
    step = Step(kind, good=0)
    with pytest.raises(EndedError):
        step.take(named)
    assert step.calls == 1
    assert step.parameter.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("named", [False, True])
def test_else_the_closure_is_as_it_was(kind: str, named: bool) -> None:
    step, plain = Step(kind, good=99), Step(kind, good=99)
    plain.optimizer = OPTIMIZERS[kind]([plain.parameter])
    for _ in range(3):
        assert step.take(named).item() == plain.take(named).item()
        assert torch.equal(step.parameter, plain.parameter)
    assert step.calls == plain.calls


@pytest.mark.parametrize(
    ("args", "kwargs"), [((0,), {}), ((0, None), {}), ((0,), {"closure": None}), ((0,), {"x": 1})]
)
def test_without_one_nothing_is_changed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert with_checked_closure(args, kwargs, lambda: None) is None


def test_other_arguments_stay() -> None:
    found = with_checked_closure((0, lambda: 3, 4), {"x": 5}, lambda: None)
    assert found is not None
    (first, closure, last), kwargs = found
    assert (first, closure(), last, kwargs) == (0, 3, 4, {"x": 5})
