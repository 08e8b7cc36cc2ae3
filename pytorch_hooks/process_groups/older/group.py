"""Groups that are ours: before 2.14 torch calls a backend that is written in Python nowhere but there."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore
from torch.distributed import distributed_c10d as c10d

from ckptless.pytorch_hooks.process_groups.exchange import Exchange, forward
from ckptless.pytorch_hooks.process_groups.work import AbortableWork
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private.names import Name, refuse_moved
from ckptless.pytorch_hooks.torch_private.works import FinishedWork


class Group(Exchange, torch_private.GroupBase):
    """A group in the place of the one that torch would make.

    Gloo itself is in an inner, stock group: that has all the overloads and checks of the real thing.
    """

    # A group without a registered backend has no name of its own in C++.
    _group_name = ""
    _group_desc = ""

    @classmethod
    def prepare(cls) -> None:
        """See Exchange."""
        refuse_moved(NEEDED)
        _batch_messages()
        for kind in (Exchange, cls, AbortableWork, FinishedWork):
            _untraced(kind)

    @staticmethod
    def wrap(backends: dict[str, torch_private.Backend], rank: int, size: int) -> Any:
        """Give a stock group over them."""
        return _stock_group(backends, rank, size)

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Whether it is the group."""
        known: object = group
        return known is self

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Gloo's own blocking barrier."""
        self._blocking(lambda group: group.monitored_barrier(*args, **kwargs))

    def _start_coalescing(self, device: torch.device) -> None:
        """Queue what follows, until `_end_coalescing`, on a device as one."""
        self._ready()
        if not self._fake:
            self._connect(device)
            if self._devices is not None:
                self._devices.begin_batch()

    def _end_coalescing(self, device: torch.device) -> Any:
        self._ready()
        return FinishedWork([]) if self._fake else self._end_batch()

    # -- what torch asks of a group

    def getGroupName(self) -> str:
        """Asked for by C++."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Told by C++."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """Asked for by C++."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        """Told by C++."""
        self._group_desc = desc

    def _set_group_name(self, name: Any) -> None:
        self._group_name = str(name)

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    @property
    def group_name(self) -> Any:
        """The name by which torch finds it."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """The purpose of the group, if its maker said."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] if self._inner is None else self._inner._device_types

    def _get_backend(self, device: torch.device) -> Any:
        inner, _ = self._ready()
        return torch_private.backend_of(inner, device)


forward(Group, dist.ProcessGroup)


@functools.cache
def _batch_messages() -> None:
    """Have `batch_isend_irecv` queue its messages on a device as one, in groups of ours, too.

    Torch does so where the type of the group is exactly its own. One by one, two ranks that send to each
    other first would wait for each other on the device.
    """
    stock = dist.batch_isend_irecv

    @functools.wraps(stock)
    def batch(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        first = p2p_op_list[0] if p2p_op_list and isinstance(p2p_op_list[0], dist.P2POp) else None
        group: Any = first and (first.group or dist.group.WORLD)
        device = first.tensor.device if first is not None else torch.device("cpu")
        if not isinstance(group, Group) or device.type == "cpu" or group._fake:
            return stock(p2p_op_list)
        group._start_coalescing(device)
        try:
            stock(p2p_op_list)
        finally:
            work = group._end_coalescing(device)
        return [work]

    dist.batch_isend_irecv = batch
    c10d.batch_isend_irecv = batch


# ---- what of torch is private and only this way needs

_C10D = "torch._C._distributed_c10d"
NEEDED = (
    Name(f"{_C10D}:ProcessGroup.BackendType.GLOO", "a stock group over Gloo, in each of ours"),
    Name(f"{_C10D}:ProcessGroup.BackendType.CUSTOM", "the same over a newcomer's fake"),
    Name(f"{_C10D}:ProcessGroup._register_backend", "the same", "device backend_type backend"),
    Name(f"{_C10D}:ProcessGroup._set_default_backend", "the same", "backend_type"),
    Name(f"{_C10D}:ProcessGroup._device_types", "asked of our groups, too"),
)


def _untraced(kind: type[Any]) -> None:
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


def _stock_group(backends: dict[str, Backend], rank: int, size: int) -> dist.ProcessGroup:
    """A stock ProcessGroup over a backend for each type of device, known to nobody but its owner."""
    group = dist.ProcessGroup(HashStore(), rank, size)
    group._set_default_backend(_kind_of(backends["cpu"]))
    for device, backend in backends.items():
        group._register_backend(torch.device(device), _kind_of(backend), backend)
    return group


def _kind_of(backend: Backend) -> dist.ProcessGroup.BackendType:
    kinds = dist.ProcessGroup.BackendType
    if isinstance(backend, dist.ProcessGroupGloo):
        return kinds.GLOO
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    return kinds.NCCL if nccl is not None and isinstance(backend, nccl) else kinds.CUSTOM
