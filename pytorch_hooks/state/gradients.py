"""Gradients that the next step may depend on: those that no optimizer has used.

A version has no gradients. Of one that an optimizer has used only its presence is recorded: after a fault it
is zero, as after `zero_grad(set_to_none=False)`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.errors import CarriedError
from ckptless.pytorch_hooks.state import private, raw
from ckptless.pytorch_hooks.state.objects import State, every_parameter, parts_of, tree_of
from ckptless.pytorch_hooks.state.walk import shown
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp

# On the gradient itself: goes with it, and another one at its address has none.
_USED = "_ckptless_used"
# On it as well: as a commit has seen it, used.
_COMMITTED = "_ckptless_committed"
# On a parameter that is looked at: whether a backward pass has added to a gradient that a commit has seen.
_WATCHED = "_ckptless_carried"

StepArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Those of an optimizer's step, the optimizer first, as torch gives them to hooks."""


def mark_used(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    """Note that an optimizer's step has used its gradients as they are (some 0.3 µs for each)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                grad.__dict__[_USED] = _counts(grad)


def with_checked_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], None]
) -> StepArguments | None:
    """Return the arguments of an optimizer's step, with `check` after each call of a closure among them.

    That computes the gradients within the step (Lightning's do, and LBFGS's), after what was checked before
    it. None: there is no closure.
    """
    named = "closure" in kwargs
    given = kwargs["closure"] if named else args[1] if len(args) > 1 else None
    if not callable(given):
        return None

    def closure() -> Any:
        loss = given()
        check()
        return loss

    return (args, {**kwargs, "closure": closure}) if named else ((args[0], closure, *args[2:]), kwargs)


def watch_steps(state: State) -> None:
    """Have gradients marked where torch's hook is not called: by what is no optimizer of torch, and where a
    GradScaler leaves the update out. And look whether gradients are carried over from step to step.
    """
    parts = parts_of(state)
    for scaler in parts.scalers.values():
        private.after_step(scaler, lambda _scaler, optimizer: mark_used(optimizer))
    _watch_some(state)
    optimizers: Iterable[Any] = parts.optimizers.values()
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            private.after_step(one, mark_used)


def _watch_some(state: State) -> None:
    """Look at a parameter of each group, and of each module of FSDP2, before each backward pass adds to its
    gradient: was zero_grad called at all? No hook of its own is called for a parameter of FSDP2.
    """
    watched = [
        (one.register_hook, [one])
        for optimizer in parts_of(state).optimizers.values()
        for group in optimizer.param_groups
        for one in [p for p in group["params"] if p.requires_grad and p.is_leaf][:1]
    ]
    for sharded, _module in torch_fsdp.states(module for _prefix, module in tree_of(state).modules()):
        trained = [p for p in torch_fsdp.parameters(sharded) if p.requires_grad]
        watched.append((partial(torch_fsdp.before_backward, sharded), trained[:1]))
    for hook, some in watched:
        for one in some:
            one.__dict__[_WATCHED] = False
        hook(partial(_look, some))


def _look(parameters: Iterable[torch.Tensor], _new: object = None) -> None:
    """Before a backward pass: is a gradient still the one that the last commit has seen used?"""
    for one in parameters:
        grad = one.grad
        if grad is None or grad.__dict__.get(_COMMITTED) != _counts(grad):
            continue
        if bool(raw.flat(private.local(grad)).any()):
            one.__dict__[_WATCHED] = True


def look(parameters: Iterable[torch.Tensor]) -> None:
    """Do what is done before a backward pass, for one that begins without the gradients that are there."""
    for parameter in parameters:
        if _WATCHED in parameter.__dict__:
            _look([parameter])


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
            "step is left out, where the update is made by hand, and where a loss has left gradients in what "
            "it does not train (a GAN's discriminator, when its generator is updated)"
        )


def _unused(state: State) -> str | None:
    for name, parameter in every_parameter(state):
        if parameter.__dict__.get(_WATCHED):
            raise CarriedError(
                f"{shown(name)} carries its gradient over from one step to the next, and gradients are not "
                "saved: call zero_grad in every step"
            )
        grad = parameter.grad
        if grad is None:
            continue
        if grad.__dict__.get(_USED) == _counts(grad):
            if _WATCHED in parameter.__dict__:
                grad.__dict__[_COMMITTED] = _counts(grad)
            continue
        part = private.local(grad)
        if part.layout != torch.strided or raw.flat(part).any():
            return shown(name)
    return None


def _counts(grad: torch.Tensor) -> object:
    if type(grad) is torch.Tensor:
        return private.version(grad)
    # A DTensor and its part are counted apart.
    return private.version(grad), private.version(private.local(grad))
