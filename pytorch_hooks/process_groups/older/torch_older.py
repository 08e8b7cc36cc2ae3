"""What of torch is private and only the older way needs, each behind one function."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore

from ckptless.pytorch_hooks.torch_private.names import Name, refuse_moved

_C10D = "torch._C._distributed_c10d"
NEEDED = (
    Name(f"{_C10D}:ProcessGroup.BackendType.GLOO", "a stock group over Gloo, in each of ours"),
    Name(f"{_C10D}:ProcessGroup.BackendType.CUSTOM", "the same over a newcomer's fake"),
    Name(f"{_C10D}:ProcessGroup._register_backend", "the same", "device backend_type backend"),
    Name(f"{_C10D}:ProcessGroup._set_default_backend", "the same", "backend_type"),
    Name(f"{_C10D}:ProcessGroup._device_types", "asked of our groups, too"),
)


def check() -> None:
    """Raise `TorchMismatch` where groups of ours cannot stand in the place of torch's."""
    refuse_moved(NEEDED)


def untraced(kind: type[Any]) -> None:
    """Keep torch.compile out of a class's methods and of what they call.

    C++ calls them in the middle of a compiled model (DDP's buffers do), and Dynamo would try to compile each.
    Told to the interpreter's hook itself, since `torch.compiler.disable` imports all of Dynamo.
    """
    hook = getattr(torch._C, "_dynamo", None) and torch._C._dynamo.eval_frame
    if hook is None or not hasattr(hook, "set_code_exec_strategy"):
        return  # a torch that has it elsewhere: compiled DDP may then refuse to trace, and says so
    skip = hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.SKIP)
    for member in vars(kind).values():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            hook.set_code_exec_strategy(function.__code__, skip)


def plain_group(backend: Backend, rank: int, size: int) -> dist.ProcessGroup:
    """A stock ProcessGroup over one backend, known to nobody but its owner."""
    kinds = dist.ProcessGroup.BackendType
    kind = kinds.GLOO if isinstance(backend, dist.ProcessGroupGloo) else kinds.CUSTOM
    group = dist.ProcessGroup(HashStore(), rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """The devices that a group has a backend for."""
    return group._device_types
