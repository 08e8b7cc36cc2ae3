"""The process group that models hold on to while the backend under it comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckptless.pytorch_hooks import torch_private
from ckptless.pytorch_hooks.comm.work import AbortableWork, FinishedWork, Scope
from ckptless.pytorch_hooks.errors import CollectiveFailed

NAME = "ckptless"


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that a collective writes: its first argument, a list of them or a list of lists."""
    if not arguments:
        return []
    first = arguments[0]
    if isinstance(first, torch.Tensor):
        return [first]
    if not isinstance(first, (list, tuple)):
        return []
    flat: list[torch.Tensor] = []
    for item in first:
        flat.extend([item] if isinstance(item, torch.Tensor) else _tensors((item,)))
    return flat


class Group(torch_private.GroupBase):
    """One ProcessGroup for the life of the process; `attach` puts each generation's backend into it.

    DDP, FSDP2, DeviceMesh and user code keep references to it. Gloo itself is in an inner, stock group: that
    has all the overloads and checks of the real thing.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner: dist.ProcessGroup | None = None
        self._scope: Scope | None = None
        self._fake = False
        # A group without a registered backend has no name of its own in C++.
        self._group_name = ""
        self._group_desc = ""

    def attach(self, inner: dist.ProcessGroup, scope: Scope, *, fake: bool) -> dist.ProcessGroup | None:
        """Work through `inner`, in `scope`, from now on; gives back what was there before."""
        before, self._inner = self._inner, inner
        self._scope = scope
        self._fake = fake
        return before

    def detach(self) -> dist.ProcessGroup | None:
        """Give the backend up; the scope stays, to say why nothing works any more."""
        before, self._inner = self._inner, None
        return before

    def _ready(self) -> tuple[dist.ProcessGroup, Scope]:
        scope = self._scope
        if scope is None:
            raise CollectiveFailed("this process group was never opened")
        scope.check()
        if self._inner is None:
            raise CollectiveFailed("this process group has been closed")
        return self._inner, scope

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Gloo's own blocking barrier, made in another thread so that it can be left."""
        inner, scope = self._ready()
        blocking: Any = inner
        scope.calls += 1
        if not self._fake:
            scope.run(lambda: blocking.monitored_barrier(*args, **kwargs))

    # -- what torch asks of a group

    def getBackendName(self) -> str:
        """Asked for by C++."""
        return NAME

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
        """What it is for, if its maker said."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] if self._inner is None else torch_private.device_types(self._inner)

    def _get_backend(self, device: torch.device) -> Any:
        inner, _ = self._ready()
        return torch_private.backend_of(inner, device)

    def _set_sequence_number_for_group(self) -> None:
        """Done for each backend when it is made."""

    def abort(self) -> None:
        """End the generation: Gloo cannot leave one group alone."""
        if self._scope is not None:
            self._scope.end()

    def shutdown(self) -> None:
        """Nothing: the fabric takes backends down, when it is safe to."""


_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})

# Those that a torch does not have (the *_single names are new in 2.13) are left out below.
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    *_POINT_TO_POINT,
)


def _forward(name: str) -> Callable[..., Any]:
    def call(self: Group, *args: Any, **kwargs: Any) -> Any:
        inner, scope = self._ready()
        scope.calls += 1
        try:
            work = getattr(inner, name)(*args, **kwargs)
        except RuntimeError as error:
            scope.check()  # the verdict may have come in the middle
            if name in _POINT_TO_POINT:
                # These talk to the socket at once; the others only check their arguments here.
                scope.breaks(str(error))
                scope.check()
            raise
        if self._fake:
            return FinishedWork(_tensors(args))
        return AbortableWork(scope, work, _tensors(args))

    call.__name__ = name
    call.__doc__ = f"`{name}` through this generation's backend, abortable."
    return call


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(Group, _name, _forward(_name))
torch_private.untraced(Group)
