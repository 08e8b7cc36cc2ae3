"""The device that these tests are about: a GPU where there is one, else the simulated one.

So the same tests run wherever the project is worked on, and on the day that a GPU is at hand. To be imported
before a process's first tensor is on a device, and before its first backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from tests.simdev import device as simulated

BUSY_S = 0.3
# No GPU's clock is faster.
CLOCK_HZ = 2.5e9


def name() -> str:
    """Return "cuda" or "simdev"."""
    return "cuda" if torch.cuda.is_available() else "simdev"


def missing() -> str | None:
    """Return why this machine has neither, if it has."""
    return None if torch.cuda.is_available() else simulated.missing()


def install() -> Any:
    """Have the device in this process; return torch's module for it."""
    if name() == "simdev":
        from tests.simdev import hooked

        hooked.install()
    return torch.get_device_module(name())


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Have the current stream go no further until the end of the block (of a GPU: for BUSY_S at least)."""
    module = torch.get_device_module(name())
    if name() == "simdev":
        with module._held():
            yield
        return
    module._sleep(int(CLOCK_HZ * BUSY_S))
    yield


def busy(seconds: float = BUSY_S) -> None:
    """Keep the current stream busy for so long (of a GPU: at least, as its clock goes)."""
    module = torch.get_device_module(name())
    if name() == "simdev":
        module._spin(seconds)
    else:
        module._sleep(int(CLOCK_HZ * seconds))


class Recorded:
    """In the place of a CUDA graph, where there is no CUDA: it does again what it has captured."""

    # Those that were replayed, and have not been taken apart.
    alive: ClassVar[set[int]] = set()

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def capture_begin(self) -> None:
        """Begin."""

    def capture_end(self) -> None:
        """End."""

    def replay(self) -> None:
        """Do it again."""
        self.alive.add(id(self))
        self._work()

    def reset(self) -> None:
        """Take it apart."""
        self.alive.discard(id(self))


def captured(work: Callable[[], object]) -> Any:
    """Return a graph of what is queued by `work`."""
    if name() == "simdev":
        recorded = Recorded(work)
        recorded.capture_begin()
        work()
        recorded.capture_end()
        return recorded
    graph: Any = torch.cuda.CUDAGraph()
    # Not "global": the watchdog of NCCL's groups asks after events in a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Have whoever waits for the device fail."""
    module = torch.get_device_module(name())
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")


def waits() -> int:
    """Return how often this process has waited for the device so far; 0 where nobody counts."""
    module = torch.get_device_module(name())
    return int(module.synchronizations()) if name() == "simdev" else 0
