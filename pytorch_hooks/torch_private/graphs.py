"""CUDA graphs: one that has captured collectives ends with their generation.

Its nodes hold the communicators that it was captured with. Those of a generation that is over are aborted,
and a replay would wait in the device for ever. NCCL's abort, in turn, does not return as long as there is a
graph that holds its communicator (commDestroySync in NCCL's src/init.cc).
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Lasting(Protocol):
    """A generation, and whether it is over."""

    generation: int
    ended: bool


# Where a graph keeps the generation whose collectives it has captured.
_CAPTURED = "_ckptless_generation"
_capturing: list[Any] = []
_holding: "weakref.WeakSet[Any]" = weakref.WeakSet()
# No graph is taken apart while it is launched.
_lock = threading.Lock()


def note(generation: Lasting) -> None:
    """A collective of this generation is queued: if a graph is being captured, it has it now."""
    if _capturing:
        with _lock:
            for graph in _capturing:
                setattr(graph, _CAPTURED, generation)
                _holding.add(graph)


def release() -> None:
    """Take apart the graphs with collectives of generations that are over: they hold up an abort.

    To be called beside that, which frees whoever is stuck in a replay. Any thread.
    """
    with _lock:
        for graph in [*_holding]:
            _take_apart(graph)


def _take_apart(graph: Any) -> None:
    """Do so where its collectives are over. One that is still being captured comes here at its end."""
    if getattr(graph, _CAPTURED).ended and graph not in _capturing:
        graph.reset()
        _holding.discard(graph)


@functools.cache
def guard(check: Callable[[int], None], kind: Any = None) -> None:
    """Have `check(generation)` called before each replay of a graph that has collectives of that generation.

    `kind` is the class of graphs, by default torch.cuda's.
    """
    kind = kind or torch.cuda.CUDAGraph
    begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        _capturing.append(graph)

    @functools.wraps(end)
    def capture_end(graph: Any) -> None:
        try:
            end(graph)
        finally:
            with _lock:
                _capturing.remove(graph)
                if graph in _holding:
                    _take_apart(graph)

    @functools.wraps(replay)
    def checked(graph: Any) -> None:
        generation = getattr(graph, _CAPTURED, None)
        if generation is None:
            replay(graph)
            return
        with _lock:
            check(generation.generation)
            replay(graph)

    kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, checked
