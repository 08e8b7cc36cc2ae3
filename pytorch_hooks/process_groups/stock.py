"""Stock groups, with a backend of ours in each: torch 2.14 and later, where one can be written in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckptless.pytorch_hooks.process_groups.exchange import Exchange, device_of, forward
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private.works import behind

# What scripts, and dist.recv, ask of a work besides wait() and get_future().
_ASKED = ("is_completed", "is_success", "exception", "result", "synchronize", "source_rank", "_source_rank")


class Within(Exchange, torch_private.Backend):
    """The backend that a group is made with. Gloo's own, which comes and goes, is in it.

    DDP, FSDP2, DeviceMesh and user code keep references to the group, which is torch's in every respect.
    """

    @classmethod
    def prepare(cls) -> None:
        """See Exchange."""
        answer_for_works()

    @staticmethod
    def wrap(backends: dict[str, torch_private.Backend], rank: int, size: int) -> Any:
        """Give what chooses among them; where there is one, that."""
        return backends["cpu"] if len(backends) == 1 else _Each(backends)

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Whether it is in the group."""
        backend: object = torch_private.backend_of(group, torch.device("cpu"))
        return backend is self

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Gloo's own blocking barrier."""
        self._blocking(lambda gloo: gloo.monitored_barrier(opts.timeout, wait_all_ranks))


class _Each:
    """The collectives of a group's backends, each by the type of device that its tensors are on."""

    def __init__(self, backends: dict[str, torch_private.Backend]) -> None:
        self._backends = backends

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            device = device_of(args)
            backend = self._backends["cpu" if device is None else device.type]
            return getattr(backend, name)(*args, **kwargs)

        return call


forward(Within, torch_private.Backend)
for _name in dir(torch_private.Backend):
    # A question that is not answered here goes from Python to C++ and back, until a RecursionError (2.15).
    if "supports_" in _name and isinstance(getattr(torch_private.Backend, _name), property):
        setattr(Within, _name, False)


@functools.cache
def answer_for_works() -> None:
    """Have works of ours answer what is asked of those that torch hands out for them.

    Torch asks ours for wait() and get_future() alone: is_completed() of a collective was False for ever,
    is_success() always True, and nobody knew the source of a message.
    """
    for name in _ASKED:
        setattr(torch_private.Work, name, _answer(name, getattr(torch_private.Work, name)))


def _answer(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    def answer(work: torch_private.Work) -> Any:
        ours = behind(work)
        return stock(work) if ours in (None, work) else getattr(ours, name)()

    answer.__name__ = name
    return answer
