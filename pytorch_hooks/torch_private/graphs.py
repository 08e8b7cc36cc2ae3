"""CUDA graphs: one that has captured collectives ends with their generation.

Its nodes hold the communicators that it was captured with. Those of a generation that is over are aborted,
and a replay would wait in the device for ever.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

# Where a graph keeps the generation whose collectives it has captured.
_CAPTURED = "_ckptless_generation"
_capturing: list[Any] = []


def note(generation: int) -> None:
    """A collective of this generation is queued: if a graph is being captured, it has it now."""
    for graph in _capturing:
        setattr(graph, _CAPTURED, generation)


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
        _capturing.remove(graph)
        end(graph)

    @functools.wraps(replay)
    def checked(graph: Any) -> None:
        generation = getattr(graph, _CAPTURED, None)
        if generation is not None:
            check(generation)
        replay(graph)

    kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, checked
