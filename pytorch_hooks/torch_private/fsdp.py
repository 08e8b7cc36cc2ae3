"""The private calls of FSDP2 and DTensor that recovery needs, each behind one function.

Apart from `torch_private`, since it is looked at only where a model uses it: importing it takes a second.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ckptless.pytorch_hooks.torch_private import older_fsdp as older
from ckptless.pytorch_hooks.torch_private.names import (
    FSDP,
    MESHES,
    refuse,
    refuse_missing,
    refuse_moved,
    version,
)

# Groups of parameters, and roots, can be given up by a public call; before, by hand.
_HAS_RESET = version() >= (2, 15)
# What a script turns between micro-batches. The second of a root is new in 2.15.
_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
_ROOT_SWITCHES = ("is_last_backward", "manual_backward_finalization")[: 2 if _HAS_RESET else 1]

# ------------------------------------------------------------------------------------- FSDP2


def check() -> None:
    """Raise `TorchMismatch` where this torch's FSDP2 is not one that recovery can stand on."""
    refuse_moved(FSDP)


def states(modules: Iterable[torch.nn.Module]) -> list[tuple[Any, Any]]:
    """Return what `fully_shard` has attached to modules, each once, with the (first) module that has it.

    Raises `TorchMismatch` if it is not what we know.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    refuse_moved(FSDP)
    state_of = importlib.import_module("torch.distributed._composable_state")._get_module_state
    kind = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState
    found: dict[int, tuple[Any, Any]] = {}
    for module in modules:
        if isinstance(state := state_of(module), kind):
            found.setdefault(id(state), (state, module))
    pairs = list(found.values())
    for state, _module in pairs[:1]:
        _check_held(state)
    return pairs


def _check_held(state: Any) -> None:
    for thing in (state, state._state_ctx, *_groups(state)):
        refuse_missing(thing, FSDP)
    for param in (param for group in _groups(state) for param in group.fsdp_params):
        refuse_missing(param, FSDP)
    if not _HAS_RESET:
        older.check(state, _groups(state))


def _groups(state: Any) -> list[Any]:
    # Older torches have one group of parameters in a state, or none.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def switches(state: Any) -> tuple[dict[str, bool], list[dict[str, bool]]]:
    """Return what a script turns between micro-batches: of the root, and of each group of parameters."""
    root = {name: getattr(state._state_ctx, name) for name in _ROOT_SWITCHES}
    groups = [{name: getattr(group, name) for name in _SWITCHES} for group in _groups(state)]
    refuse(
        [
            f"{name} is no switch"
            for one in (root, *groups)
            for name, on in one.items()
            if type(on) is not bool
        ]
    )
    return root, groups


def switch(state: Any, values: tuple[dict[str, bool], list[dict[str, bool]]]) -> None:
    """Turn them to what `switches` gave."""
    root, per_group = values
    if state._is_root is not False:  # all states under a root share the root's context
        for name, value in root.items():
            setattr(state._state_ctx, name, value)
    for group, own in zip(_groups(state), per_group, strict=True):
        for name, value in own.items():
            setattr(group, name, value)


def sums(state: Any) -> bool:
    """Whether this torch sums gradients that are to be averaged (`older_fsdp.sums`)."""
    return version() < (2, 9) and older.sums(_groups(state))


def reshards(state: Any) -> list[Any]:
    """Return what a script sets by `set_reshard_after_forward`: of each group, over what it is cut up."""
    return [group.post_forward_mesh_info for group in _groups(state)]


def reshard(state: Any, values: list[Any]) -> None:
    """Set it to what `reshards` gave. A root's is torch's own, from the first forward pass on."""
    if state._is_root:
        return
    for group, own in zip(_groups(state), values, strict=True):
        group.post_forward_mesh_info = own


def reset(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Give up a half-done iteration: nothing gathered, nothing pending, no hook's state left over.

    Nothing is waited for: works of an ended generation would raise. Gradients are gone.
    """
    known = list(pairs)
    for group in (group for state, _module in known for group in _groups(state)):
        if group._all_gather_result is not None:
            group._all_gather_result = group._all_gather_result._replace(all_gather_work=None)
    for state, module in known:
        if state._is_root is None:  # it has run no forward, but unshard() may have been called
            for group in _groups(state):
                group._all_gather_result = None
            module.reshard()
    roots = [(state, module) for state, module in known if state._is_root]
    if _HAS_RESET:
        _reset([module for _state, module in roots])
    else:
        for state, _module in roots:
            older.reset(state, _groups)
        older.drop_gradients(group for state, _module in known for group in _groups(state))
    for parameter in (parameter for _state, module in known for parameter in module.parameters()):
        parameter.grad = None


def _reset(roots: list[Any]) -> None:
    later = []
    for module in roots:
        try:
            module.reset_iter_state()
        except RuntimeError:  # it shares streams with one that has begun a reduction by hand: that one first
            later.append(module)
    for module in later:
        module.reset_iter_state()


def parameters(state: Any) -> list[torch.Tensor]:
    """The parameters that `fully_shard` has cut up for this module: DTensors, each with its `grad`."""
    return [param.sharded_param for group in _groups(state) for param in group.fsdp_params]


def before_backward(state: Any, call: Callable[[], object]) -> None:
    """Have `call()` made before a backward pass adds to gradients of these parameters."""
    inner = state._pre_backward

    def looked(grad: torch.Tensor) -> Any:
        call()
        return inner(grad)

    state._pre_backward = looked


def holds_gradients(state: Any) -> bool:
    """Whether gradients have not yet been reduced over all ranks (`set_requires_gradient_sync(False)`)."""
    for group in _groups(state):
        if getattr(group, "_partial_reduce_output", None) is not None:
            return True
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)  # there is none before the first gathering
            if whole is not None and whole.grad is not None:
                return True
            if not _HAS_RESET and param.unsharded_accumulated_grad is not None:
                return True
    return False


# ------------------------------------------------------------------------------------- DTensor


def forget_meshes() -> None:
    """Empty the cache in which DTensor remembers the meshes of groups that are gone.

    It is keyed by what a mesh looks like: an equal mesh, made anew, would get results that hold the old one,
    and through it groups that no longer exist. (Others keep such a mesh alive, which does no harm.)
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    refuse_moved(MESHES)
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    else:
        older.forget_meshes()
