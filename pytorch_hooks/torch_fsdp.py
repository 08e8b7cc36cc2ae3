"""Every private part of FSDP2 and DTensor that recovery stands on, each behind one function.

Apart from `torch_private`, since it is looked at only where a model uses it: importing it takes a second.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

import torch

from ckptless.pytorch_hooks.torch_private import refuse, refuse_moved

_FSDP = "torch.distributed.fsdp._fully_shard"
_NEEDED_FSDP: tuple[tuple[str, str], ...] = (
    ("torch.distributed._composable_state:_get_module_state", "module"),
    (f"{_FSDP}._fsdp_collectives:AllGatherResult.all_gather_work", ""),
    (f"{_FSDP}._fsdp_common:TrainingState.IDLE", ""),
    (f"{_FSDP}._fsdp_param_group:FSDPParamGroup.reshard", "self"),
    (f"{_FSDP}._fsdp_state:FSDPState", ""),
)
# What its objects must hold. A param group's switches are what a script turns between micro-batches.
_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
_STATE_HOLDS = (
    "_is_root",
    "_modules",
    "_state_ctx",
    "_comm_ctx",
    "_modules_to_run_forward",
    "_training_state",
)
_GROUP_HOLDS = ("_all_gather_result", "fsdp_params", "_post_forward_indices", *_SWITCHES)
_PARAM_HOLDS = ("sharded_param", "unsharded_accumulated_grad", "grad_offload_event")

# ------------------------------------------------------------------------------------- FSDP2


def check() -> None:
    """Raise `TorchMismatch` where this torch's FSDP2 is not one that recovery can stand on."""
    refuse_moved(_NEEDED_FSDP)


def states(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """What `fully_shard` has attached to modules, each once; TorchMismatch if it is not what we know."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    refuse_moved(_NEEDED_FSDP)
    state_of = importlib.import_module("torch.distributed._composable_state")._get_module_state
    kind = importlib.import_module(f"{_FSDP}._fsdp_state").FSDPState
    found = {id(state): state for module in modules if isinstance(state := state_of(module), kind)}
    all_states = list(found.values())
    groups = [group for state in all_states for group in _groups(state)]
    params = [param for group in groups for param in group.fsdp_params]
    for things, names in ((all_states, _STATE_HOLDS), (groups, _GROUP_HOLDS), (params, _PARAM_HOLDS)):
        for thing in things[:1]:
            kind_name = type(thing).__name__
            refuse([f"{kind_name}.{name} is gone" for name in names if not hasattr(thing, name)])
    return all_states


def _groups(state: Any) -> list[Any]:
    # Older torches have one group of parameters in a state, or none.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def switches(state: Any) -> tuple[bool, list[dict[str, bool]]]:
    """What a script turns between micro-batches: whether to reduce, to reshard, and if this is the last."""
    groups = [{name: getattr(group, name) for name in _SWITCHES} for group in _groups(state)]
    return state._state_ctx.is_last_backward, groups


def switch(state: Any, values: tuple[bool, list[dict[str, bool]]]) -> None:
    """Turn them to what `switches` gave."""
    last, per_group = values
    if state._is_root is not False:  # all states under a root share the root's context
        state._state_ctx.is_last_backward = last
    for group, own in zip(_groups(state), per_group, strict=True):
        for name, value in own.items():
            setattr(group, name, value)


def reset(state: Any) -> None:
    """Give up a half-done iteration: nothing gathered, nothing pending, no hook's state left over.

    Nothing is waited for: works of an ended generation would raise. A state that is no root does nothing.
    """
    if state._is_root is False:
        return
    for each in state._state_ctx.all_states or [state]:
        for group in _groups(each):
            if group._all_gather_result is not None:
                group._all_gather_result = group._all_gather_result._replace(all_gather_work=None)
    if state._is_root is None:
        for group in _groups(state):  # it has run no forward, but unshard() may have been called
            group._all_gather_result = None
            group.reshard()
    elif hasattr(state._modules[0], "reset_iter_state"):
        state._modules[0].reset_iter_state()
    else:
        _reset_by_hand(state)


def _reset_by_hand(root: Any) -> None:
    """What `reset_iter_state` does, for torches before it."""
    idle = importlib.import_module(f"{_FSDP}._fsdp_common").TrainingState.IDLE
    shared, comm = root._state_ctx, root._comm_ctx
    stream = comm.device_handle.current_stream()
    for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
        stream.wait_stream(getattr(comm, f"{name}_stream"))
    comm.all_gather_state = comm.reduce_scatter_state = None
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        getattr(comm, name, []).clear()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
    for state in shared.all_states:
        state._training_state = idle
        state._modules_to_run_forward.clear()
        for group in _groups(state):
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group.reshard()


def holds_gradients(state: Any) -> bool:
    """Whether gradients have not yet been reduced over all ranks (`set_requires_gradient_sync(False)`)."""
    for group in _groups(state):
        if getattr(group, "_partial_reduce_output", None) is not None:
            return True
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            if param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                return True
    return False


def drop_gradients(state: Any) -> None:
    """Forget gradients: of the shards, and those of whole parameters that are not yet reduced."""
    for group in _groups(state):
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = param.grad_offload_event = None
            param.sharded_param.grad = None
            whole = getattr(param, "_unsharded_param", None)  # there is none before the first gathering
            if whole is not None:
                whole.grad = None


# ------------------------------------------------------------------------------------- DTensor


def forget_meshes() -> None:
    """Empty the caches in which DTensor remembers the meshes of groups that are gone.

    They are keyed by what a mesh looks like: an equal mesh, made anew, would get results that hold the old
    one, and through it groups that no longer exist.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    dispatcher = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    # The others are of newer torches only, or have moved about.
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    base = "torch.distributed.tensor"
    for module, name, method in (
        (f"{base}._redistribute", "_gen_transform_infos", "cache_clear"),
        (f"{base}._redistribute", "_planner_cache", "clear"),
        (f"{base}._collective_utils", "MeshTopoInfo.build_from_mesh", "cache_clear"),
        (f"{base}._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached", "cache_clear"),
    ):
        cache: Any = sys.modules.get(module)
        for part in name.split("."):
            cache = getattr(cache, part, None)
        empty = getattr(cache, method, None)
        if empty is not None:
            empty()
