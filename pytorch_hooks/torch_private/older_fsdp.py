"""What FSDP2 and DTensor of older torches need: to give up an iteration by hand, before 2.15; and a word."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from ckptless.pytorch_hooks.torch_private.names import refuse

_STATE_HOLDS = ("_comm_ctx", "_modules_to_run_forward", "_training_state")
_GROUP_HOLDS = ("_post_forward_indices", "_training_state")
_PARAM_HOLDS = ("sharded_param", "unsharded_accumulated_grad", "grad_offload_event")


def check(state: Any, groups: list[Any]) -> None:
    """Raise `TorchMismatch` where its objects do not hold what is reset."""
    params = [param for group in groups for param in group.fsdp_params]
    for things, names in (([state], _STATE_HOLDS), (groups, _GROUP_HOLDS), (params, _PARAM_HOLDS)):
        for thing in things[:1]:
            kind = type(thing).__name__
            refuse([f"{kind}.{name} is gone" for name in names if not hasattr(thing, name)])


def reset(root: Any, groups_of: Callable[[Any], list[Any]]) -> None:
    """Do what `FSDPModule.reset_iter_state` does, but for gradients."""
    idle = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common").TrainingState.IDLE
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
        for group in groups_of(state):
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group.reshard()


def drop_gradients(groups: Iterable[Any]) -> None:
    """Forget gradients: of the shards, and those of whole parameters that are not yet reduced."""
    for param in (param for group in groups for param in group.fsdp_params):
        param.unsharded_accumulated_grad = None
        param.grad_offload_event = None
        param.sharded_param.grad = None
        whole = getattr(param, "_unsharded_param", None)  # there is none before the first gathering
        if whole is not None:
            whole.grad = None


def sums(groups: Iterable[Any]) -> bool:
    """Whether gradients are summed that are to be averaged, as 2.8 does (pytorch/pytorch issue 162338).

    Its Gloo takes the mean that is to be scattered for a sum, of float32 and bfloat16.
    """
    return any(
        group.device.type == "cpu"
        and group.mesh_info.shard_mesh_size > 1
        and not group.force_sum_reduction_for_comms
        for group in groups
    )


def forget_meshes() -> None:
    """Empty the cache of DTensor that holds meshes."""
    dispatcher = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
