"""Stock groups, with a backend of ours in each: torch 2.14 and later, where one can be written in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckptless.pytorch_hooks.process_groups.exchange import Exchange, device_of, forward
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private.works import NO_TIMEOUT, behind, shows

# What scripts, and dist.recv, ask of a work besides wait() and get_future().
_ASKED = (
    *("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank"),
    *("synchronize", "block_current_stream", "get_future_result"),
)


class Within(Exchange, torch_private.Backend):
    """The backend that a group is made with. Gloo's own, which comes and goes, is in it.

    DDP, FSDP2, DeviceMesh and user code keep references to the group, which is torch's in every respect.
    """

    # The works on the CPU since `start_coalescing`, and whether the device was told of that; None outside.
    _batch: list[Any] | None = None
    _batch_on_device = False

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

    def detach(self) -> Any:
        """See Exchange."""
        self._batch, self._batch_on_device = None, False
        return super().detach()

    @property
    def supports_coalescing(self) -> bool:
        """Whether torch has messages of a batch queued as one. On a device they must be."""
        return self._devices is not None

    def start_coalescing(self) -> None:
        """Have the device queue what follows, until `end_coalescing`, as one.

        Torch does not say for which device, and one has to be connected first: so it is told of this with the
        first that is for it.
        """
        self._ready()
        if self._devices is None and not self._fake:
            raise RuntimeError("this process group serves no device that could queue what follows as one")
        self._batch, self._batch_on_device = [], False

    def end_coalescing(self) -> torch_private.Work:
        """Give the work of all that was begun since."""
        self._ready()
        works, self._batch = self._batch or [], None
        if self._batch_on_device:
            work = self._end_batch()
            works += [] if work is None else [_OnDevice(work)]
        return works[0] if len(works) == 1 else _Batch(works)

    def _connect(self, device: torch.device) -> None:
        super()._connect(device)
        if self._batch is not None and not self._batch_on_device and self._devices is not None:
            self._devices.begin_batch()
            self._batch_on_device = True

    def _hand_out(self, work: Any, device: torch.device | None) -> Any:
        if device is not None:
            return None if work is None else _OnDevice(work)
        if self._batch is not None:
            self._batch.append(work)
        return work


class _Each:
    """The collectives of a group's backends, each by the type of device that its tensors are on."""

    def __init__(self, backends: dict[str, torch_private.Backend]) -> None:
        self._backends = backends

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            device = device_of((*args, *kwargs.values()))
            backend = self._backends["cpu" if device is None else device.type]
            return getattr(backend, name)(*args, **kwargs)

        return call


class _OnDevice(torch_private.Work):
    """A work on a device, which is torch's: that one answers whatever is asked.

    Torch puts a work of its own around what a backend in Python gives, and only one in Python is found there.
    """

    def __init__(self, work: torch_private.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Order the current stream behind it; with a timeout the device is waited for, that long."""
        return self._work.wait(timeout)

    def get_future(self) -> Any:
        """Its future, which is complete, and knows the streams."""
        shows(self._work)
        return self._work.get_future()


class _Batch(torch_private.Work):
    """Works that were begun as one: done when all are."""

    def __init__(self, works: list[torch_private.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for each, at most `timeout`; raises what the first of them raises."""
        return all([work.wait(timeout) for work in self._works])

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        # no deadline: each work's own
        self.wait()

    def get_future(self) -> Any:
        """A future that completes with those of all."""
        shows(self)
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def is_completed(self) -> bool:
        """Whether wait() returns or raises at once."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether wait() returns at once."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """Return what wait() raises, if it does at once."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        # no deadline: it waits for nothing
        return [tensor for work in self._works for tensor in work.result()]


forward(Within, torch_private.Backend)
for _name in dir(torch_private.Backend):
    # A question that is not answered here goes from Python to C++ and back, until a RecursionError (2.15).
    if "supports_" in _name and isinstance(getattr(torch_private.Backend, _name), property):
        setattr(Within, _name, vars(Within).get(_name, False))


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
