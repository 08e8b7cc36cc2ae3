"""Renews DDP's C++ Reducer under a living DDP object, with the same buckets on old ranks and new."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptless.pytorch_hooks.torch_private.calls import GroupBase
from ckptless.pytorch_hooks.torch_private.works import FinishedWork

Layout = list[list[int]]
"""Of each bucket, in the order of reduction, the parameters by index among those that DDP reduces."""


def of(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DDP that a module is, or that `replicate` of torch.distributed._composable has for it.

    That is made here if the module has not run yet, since it would be made in its first forward pass, among
    processes of which some have done so before.
    """
    if isinstance(module, DistributedDataParallel):
        return module
    composed: Any = sys.modules.get("torch.distributed._composable.replicate")
    if composed is None or not isinstance(module, composed.DDP):
        return None
    state = composed.replicate.state(module)
    if getattr(state, "_ddp", None) is None:
        state.lazy_init()
    made: DistributedDataParallel = state._ddp
    return made


def _reducer(ddp: DistributedDataParallel) -> Any:
    """The C++ Reducer; None in a DDP with every reduction delayed."""
    return getattr(ddp, "reducer", None)


def _rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether DDP lays its buckets out anew after the first backward."""
    return _reducer(ddp) is not None and bool(ddp.static_graph or not ddp.find_unused_parameters)


def bucket_layout(ddp: DistributedDataParallel) -> Layout:
    """The layout as it is now."""
    reducer = _reducer(ddp)
    if reducer is None:
        return []
    # The Reducer hands out the very tensors it was given; addresses would confuse empty parameters.
    buckets = [[id(parameter) for parameter in bucket] for bucket in _buckets(reducer)]
    there = {parameter for bucket in buckets for parameter in bucket}
    index = {parameter: number for number, parameter in enumerate(p for p in _in_order(ddp) if p in there)}
    return [[index[parameter] for parameter in bucket] for bucket in buckets]


def frozen_since(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """The parameters that need no gradient, and that the Reducer has: it was made before they were frozen."""
    reducer = _reducer(ddp)
    if reducer is None or all(parameter.requires_grad for parameter in ddp.module.parameters()):
        return []
    there = (parameter for bucket in _buckets(reducer) for parameter in bucket)
    return [parameter for parameter in there if not parameter.requires_grad]


def _buckets(reducer: Any) -> list[list[torch.Tensor]]:
    return [list(bucket.parameters()) for bucket in reducer._get_zeros_like_grad_buckets()]


def _in_order(ddp: DistributedDataParallel) -> dict[int, None]:
    """The ids of all parameters in the order in which `_build_params_for_reducer` has those it finds trained.

    That itself would leave out what was frozen after the Reducer was made.
    """
    return dict.fromkeys(
        id(parameter)
        for prefix, module in ddp.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{prefix}.{name}" not in ddp.parameters_to_ignore
    )


def settled_layout(ddp: DistributedDataParallel) -> Layout | None:
    """The layout if it is the final one, which is what a committed record carries; else None."""
    final = ddp._has_rebuilt_buckets or not _rebuilds(ddp)
    return bucket_layout(ddp) if final else None


def settle_buckets(ddp: DistributedDataParallel) -> bool:
    """Fix the final bucket layout now, after the first backward, rather than in the next forward.

    A collective where something is to be done (two broadcasts from rank 0): all ranks call it at the same
    point. Whether it was done: no where torch would not (unused parameters are looked for), has already, or
    has seen no full backward (under no_sync()). Gradients stay as they are.
    """
    if not _rebuilds(ddp) or ddp._has_rebuilt_buckets:
        return False
    rebuilt = bool(_reducer(ddp)._rebuild_buckets())
    if rebuilt:
        ddp._has_rebuilt_buckets = True
    return rebuilt


def renew(ddp: DistributedDataParallel, layout: Layout | None) -> None:
    """Put a new Reducer into the same DDP object, wherever the old one was stopped; gradients are cleared.

    The sum of a gradient depends, in its last bits, on where in which bucket it stands. `layout` is that
    of `settled_layout` on any rank; None where there was none yet. Makes no collective.
    """
    for parameter in ddp.module.parameters():
        parameter.grad = None
    if _reducer(ddp) is None:
        return
    _new_reducer(ddp)
    if layout is None:
        return
    if _rebuilds(ddp):
        _impose(ddp, layout)
    found = bucket_layout(ddp)
    if found != layout:
        raise RuntimeError(f"DDP laid its buckets out as {found}, and not as recorded: {layout}")


def _new_reducer(ddp: Any) -> None:
    """Put a Reducer as of construction into a DDP object, whatever state the old one was left in."""
    # At once, not in a destructor that waits for the last reference: two Reducers' hooks would both fire.
    ddp.reducer._remove_autograd_hooks()
    ddp.logger = None
    ddp.reducer = None
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    static, hooks = ddp.static_graph, ddp._comm_hooks
    ddp._ddp_init_helper(parameters, sparse, names, static)
    if static:
        ddp.static_graph = False  # else it does nothing
        ddp._set_static_graph()
    ddp._comm_hooks = []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    ddp._has_rebuilt_buckets = False
    # An abort may have fallen between a forward under no_sync() and the next one.
    ddp.require_backward_grad_sync = True
    ddp.require_forward_param_sync = True


class _Dictation(GroupBase):
    """A group in which "rank 0" broadcasts a layout: what the Reducer takes over when it rebuilds.

    The Reducer proposes a layout and lets rank 0's overrule it, in two broadcasts: all indices in a row with
    the number of buckets at the end, then the sizes of the buckets.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(0, 1)
        flat = [index for bucket in layout for index in bucket]
        self._messages = [[*flat, len(layout)], [len(bucket) for bucket in layout]]

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Give the next message."""
        message = self._messages.pop(0)
        target: torch.Tensor = tensors[0]
        if target.numel() != len(message):
            raise RuntimeError(
                f"the recorded layout has {len(message) - 1} parameters, DDP {target.numel() - 1}"
            )
        target.copy_(torch.tensor(message, dtype=target.dtype))
        return FinishedWork([target])


def _impose(ddp: DistributedDataParallel, layout: Layout) -> None:
    """Make the rebuild happen before any backward, with this outcome, so that none can choose another."""
    reducer = _reducer(ddp)
    reducer._push_all_rebuilt_params()  # without it the Reducer has seen no gradient and rebuilds nothing
    dictation: dist.ProcessGroup = _Dictation(layout)
    reducer._update_process_group(dictation)
    try:
        rebuilt = settle_buckets(ddp)
    finally:
        reducer._update_process_group(ddp.process_group)
    if not rebuilt:
        raise RuntimeError("DDP did not rebuild its buckets")
