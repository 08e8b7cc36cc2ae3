"""Groups that are ours: before 2.14 torch calls a backend that is written in Python nowhere but there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ckptless.pytorch_hooks.process_groups.exchange import Exchange, Way, forward
from ckptless.pytorch_hooks.process_groups.older import torch_older
from ckptless.pytorch_hooks.process_groups.work import AbortableWork, FinishedWork
from ckptless.pytorch_hooks.torch_private import calls as torch_private


class Group(Exchange, torch_private.GroupBase):
    """A group in the place of the one that torch would make.

    Gloo itself is in an inner, stock group: that has all the overloads and checks of the real thing.
    """

    # A group without a registered backend has no name of its own in C++.
    _group_name = ""
    _group_desc = ""

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Gloo's own blocking barrier."""
        self._blocking(lambda group: group.monitored_barrier(*args, **kwargs))

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
        """What it is for, if its maker said."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] if self._inner is None else torch_older.device_types(self._inner)

    def _get_backend(self, device: torch.device) -> Any:
        inner, _ = self._ready()
        return torch_private.backend_of(inner, device)


forward(Group, dist.ProcessGroup)


class Older(Way):
    """See the module."""

    def __init__(self) -> None:
        torch_older.check()
        for kind in (Exchange, Group, AbortableWork, FinishedWork):
            torch_older.untraced(kind)

    def make(self, rank: int, size: int) -> Exchange:
        """The group."""
        return Group(rank, size)

    def inner(self, backend: torch_private.Backend, rank: int, size: int) -> Any:
        """A stock group over it."""
        return torch_older.plain_group(backend, rank, size)

    def serves(self, exchange: Exchange, group: dist.ProcessGroup) -> bool:
        """Whether it is that."""
        known: object = group
        return known is exchange
