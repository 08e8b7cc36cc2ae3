"""Gradients that the next step may depend on: those that no optimizer has used.

A version has no gradients. Of one that an optimizer has used only its presence is recorded: after a fault it
is zero, as after `zero_grad(set_to_none=False)`.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks.state import optim, private, raw
from ckptless.pytorch_hooks.state.objects import State, every_parameter, parts_of

# On the gradient itself: goes with it, and another one at its address has none.
_USED = "_ckptless_used"


def mark_used(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    """Note that an optimizer's step has used its gradients as they are (some 0.3 µs for each)."""
    for _place, parameter in optim.parameters(optimizer):
        grad = parameter.grad
        if grad is not None:
            grad.__dict__[_USED] = _counts(grad)


def watch_steps(state: State) -> None:
    """Have gradients marked where torch's hook is not called: by what is no optimizer of torch, and where a
    GradScaler leaves the update out.
    """
    parts = parts_of(state)
    for scaler in parts.scalers.values():
        private.after_step(scaler, lambda _scaler, optimizer: mark_used(optimizer))
    optimizers: Iterable[Any] = parts.optimizers.values()
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            private.after_step(one, mark_used)


def check_used(state: State, *, pending: bool = False) -> None:
    """Raise UsageError where the next step may depend on a gradient: one written since an optimizer used it.

    One that is zero in every bit does not count: it comes back as that. `pending`: there are some that stand
    in no parameter's `grad` yet.
    """
    name = "state" if pending else _unused(state)
    if name is not None:
        raise UsageError(
            f"{name} has a gradient that no optimizer has used, and gradients are not saved: call run.commit "
            "after the optimizer's step, and set gradients to None (zero_grad) before run.commit where that "
            "step is left out, where the update is made by hand, and of what is not trained"
        )


def _unused(state: State) -> str | None:
    for name, parameter in every_parameter(state):
        grad = parameter.grad
        if grad is None or grad.__dict__.get(_USED) == _counts(grad):
            continue
        part = private.local(grad)
        if part.layout != torch.strided or raw.flat(part).any():
            return "state." + name[2:].replace(":", ".")
    return None


def _counts(grad: torch.Tensor) -> object:
    if type(grad) is torch.Tensor:
        return private.version(grad)
    # A DTensor and its part are counted apart.
    return private.version(grad), private.version(private.local(grad))
