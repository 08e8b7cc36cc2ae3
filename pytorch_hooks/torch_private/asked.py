"""What a script for torchrun asks of torch.distributed inside `ckptless.run`, where groups are there already.

It makes the default group, and groups over backends that it names, asks what they are made over, and
destroys the default one at its end. Groups of ours serve the CPU and the device alike, by whatever name, and
end with `ckptless.run`. What cannot be had so is refused in a sentence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ckptless.daemon.protocol.errors import UsageError


@dataclass
class Standing:
    """The groups that there are: this rank's place, and what they are made over (Gloo, then the device's)."""

    rank: int
    size: int
    # What torch knows as the backend of each.
    ours: str
    backends: dict[str, str]
    # Whether a script cannot end the default one.
    lasts: bool = True
    # The backend that a script has named for a group, by the group's name.
    named: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> str:
        """The backends by device, as torch writes them."""
        return ",".join(f"{device}:{backend}" for device, backend in self.backends.items())

    def known_as(self, group: str) -> str:
        """Return the backend that a script takes this group for."""
        return self.named.get(group, [*self.backends.values()][-1])

    def check(self, what: str, backend: str) -> str:
        """Return the one backend that is named, or "" for all. Raises UsageError where groups have it not."""
        wanted = [part.rpartition(":")[2] for part in backend.lower().split(",")]
        if not set(wanted) <= {*self.backends.values()}:
            raise UsageError(
                f"{what} asks for {backend}, and groups under ckptless.run are made over {self.config}: "
                "leave the backend out"
            )
        return wanted[0] if len(wanted) == 1 else ""

    def join(self, asked: inspect.BoundArguments) -> None:
        """Take an init_process_group for what is there. Raises UsageError where it asks for other things."""
        for name, here in (("rank", self.rank), ("world_size", self.size)):
            wanted = asked.arguments.get(name, -1)
            if wanted not in (-1, here):
                raise UsageError(
                    f"init_process_group asks for {name} {wanted}, which is {here} under ckptless.run: "
                    "leave it out"
                )
        backend = asked.arguments.get("backend")
        if backend:
            self._note(self.check("init_process_group", str(backend)), dist.group.WORLD)

    def make(self, stock: Callable[..., Any], asked: inspect.BoundArguments) -> Any:
        """Return a new group of ours, whichever backend is named for it. Raises UsageError.

        One whose collectives are to do nothing is torch's own: it connects nothing, and outlives all.
        """
        backend = asked.arguments.get("backend")
        if str(backend).lower() == dist.Backend.FAKE:
            return stock(*asked.args, **asked.kwargs)
        named = self.check("new_group", str(backend)) if backend and str(backend) != self.ours else ""
        asked.arguments["backend"] = None
        group = stock(*asked.args, **asked.kwargs)
        self._note(named, group)
        return group

    def _note(self, named: str, group: Any) -> None:
        """Keep what a group is taken for. Others may have had its name, in a generation before."""
        if isinstance(group, dist.ProcessGroup):
            self.named.pop(group.group_name, None)
            if named:
                self.named[group.group_name] = named


@functools.cache
def answer(standing: Callable[[], Standing | None], *, stock: bool = False) -> None:
    """Answer from now on wherever `standing()` says that there are groups that we have made; else torch does.

    `stock`: they are torch's own, which answer for themselves what they are.
    """
    # Before anything is replaced: it looks for what torch has.
    from ckptless.pytorch_hooks.torch_private import imported

    replaced: dict[int, Callable[..., Any]] = {}

    def instead(name: str, answers: Callable[..., Any]) -> None:
        assert name in imported.ANSWERED
        before = getattr(c10d, name)
        signature = inspect.signature(before)

        @functools.wraps(before)
        def call(*args: Any, **kwargs: Any) -> Any:
            here = standing() if dist.is_initialized() else None
            if here is None:
                return before(*args, **kwargs)
            return answers(here, before, signature.bind(*args, **kwargs))

        for module in (c10d, dist):
            if hasattr(module, name):
                setattr(module, name, call)
        replaced[id(before)] = call

    instead("init_process_group", lambda here, _stock, asked: here.join(asked))
    instead("destroy_process_group", _destroy)
    if not stock:
        instead("_new_group_with_tag", Standing.make)
        instead("get_backend", _backend)
        instead("get_backend_config", _config)
    imported.replace(replaced)


def _destroy(here: Standing, stock: Callable[..., None], asked: inspect.BoundArguments) -> None:
    if not here.lasts or asked.arguments.get("group") not in (None, dist.group.WORLD):
        stock(*asked.args, **asked.kwargs)


def _backend(here: Standing, stock: Callable[..., str], asked: inspect.BoundArguments) -> str:
    found = stock(*asked.args, **asked.kwargs)
    group = asked.arguments.get("group") or dist.group.WORLD
    if found != here.ours or group is None:
        return found
    return dist.Backend(here.known_as(group.group_name))


def _config(here: Standing, stock: Callable[..., str], asked: inspect.BoundArguments) -> str:
    found = stock(*asked.args, **asked.kwargs)
    return here.config if here.ours in found else found
