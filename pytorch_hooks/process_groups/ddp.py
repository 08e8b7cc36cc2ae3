"""Renewing DDP's C++ Reducer under a living DDP object, with the same buckets on old ranks and new."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ckptless.pytorch_hooks.process_groups.work import FinishedWork
from ckptless.pytorch_hooks.torch_private import calls as torch_private


def bucket_layout(ddp: DistributedDataParallel) -> list[list[int]]:
    """The parameters (by index among those that DDP reduces) of each bucket, in the order of reduction."""
    if not torch_private.ddp_reduces(ddp):
        return []
    # The Reducer hands out the very tensors it was given; addresses would confuse empty parameters.
    index = {id(parameter): i for i, parameter in enumerate(torch_private.ddp_parameters(ddp))}
    return [[index[id(parameter)] for parameter in bucket] for bucket in torch_private.ddp_buckets(ddp)]


def settled_layout(ddp: DistributedDataParallel) -> list[list[int]] | None:
    """The layout if it is the final one, which is what a committed record carries; else None."""
    final = torch_private.ddp_has_rebuilt(ddp) or not torch_private.ddp_rebuilds(ddp)
    return bucket_layout(ddp) if final else None


def settle_buckets(ddp: DistributedDataParallel) -> bool:
    """Fix the final bucket layout now, after the first backward, rather than in the next forward.

    A collective where something is to be done: all ranks call it at the same point. Whether it was done: no
    where torch would not (unused parameters are looked for), has already, or has seen no full backward
    (under no_sync()). Gradients stay as they are.
    """
    if not torch_private.ddp_rebuilds(ddp) or torch_private.ddp_has_rebuilt(ddp):
        return False
    return torch_private.ddp_rebuild(ddp)


def renew(ddp: DistributedDataParallel, layout: list[list[int]] | None) -> None:
    """A new Reducer in the same DDP object, wherever the old one was stopped; gradients are cleared.

    The sum of a gradient depends, in its last bits, on where in which bucket it stands. `layout` is that
    of `settled_layout` on any rank; None where there was none yet. Makes no collective.
    """
    for parameter in ddp.module.parameters():
        parameter.grad = None
    if not torch_private.ddp_reduces(ddp):
        return
    torch_private.ddp_new_reducer(ddp)
    if layout is None:
        return
    if torch_private.ddp_rebuilds(ddp):
        _impose(ddp, layout)
    found = bucket_layout(ddp)
    if found != layout:
        raise RuntimeError(f"DDP laid its buckets out as {found}, and not as recorded: {layout}")


class _Dictation(torch_private.GroupBase):
    """A group in which "rank 0" broadcasts a layout: what the Reducer takes over when it rebuilds.

    The Reducer proposes a layout and lets rank 0's overrule it, in two broadcasts: all indices in a row with
    the number of buckets at the end, then the sizes of the buckets.
    """

    def __init__(self, layout: list[list[int]]) -> None:
        super().__init__(0, 1)
        flat = [index for bucket in layout for index in bucket]
        self._messages = [[*flat, len(layout)], [len(bucket) for bucket in layout]]

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """The next message."""
        message = self._messages.pop(0)
        target: torch.Tensor = tensors[0]
        if target.numel() != len(message):
            raise RuntimeError(
                f"the recorded layout has {len(message) - 1} parameters, DDP {target.numel() - 1}"
            )
        target.copy_(torch.tensor(message, dtype=target.dtype))
        return FinishedWork([target])


def _impose(ddp: DistributedDataParallel, layout: list[list[int]]) -> None:
    """Make the rebuild happen now, with this outcome, so that no later backward can choose another."""
    if not torch_private.ddp_rebuild_under(ddp, _Dictation(layout)):
        raise RuntimeError("DDP did not rebuild its buckets")
