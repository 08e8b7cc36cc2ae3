"""A CUDA graph is asked about before each replay, if it has captured a collective. On a class of our own."""

from __future__ import annotations

import pytest
import torch

from ckptless.pytorch_hooks.torch_private import graphs


class Over(Exception):
    """No replay."""


class Guarded:
    """A class of graphs, and the generations that each of them was asked about; those above 1 are over."""

    def __init__(self) -> None:
        class Graph:
            """What torch.cuda.CUDAGraph has, as far as it counts here."""

            replayed = 0

            def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
                """Begin; not in a pool that is called bad."""
                if pool == "bad":
                    raise RuntimeError(capture_error_mode)

            def capture_end(self) -> None:
                """End."""

            def replay(self) -> None:
                """Do it."""
                self.replayed += 1

        self.new = Graph
        self.asked: list[int] = []
        graphs.guard(self._check, Graph)

    def _check(self, generation: int) -> None:
        self.asked.append(generation)
        if generation > 1:
            raise Over


@pytest.fixture
def guarded() -> Guarded:
    return Guarded()


def test_only_graphs_with_collectives_are_asked_about(guarded: Guarded) -> None:
    one, other = guarded.new(), guarded.new()
    graphs.note(7)
    one.capture_begin(capture_error_mode="thread_local")
    graphs.note(1)
    one.capture_end()
    other.capture_begin()
    other.capture_end()
    graphs.note(2)
    one.replay()
    other.replay()
    assert guarded.asked == [1]
    assert (one.replayed, other.replayed) == (1, 1)


def test_what_is_refused_is_not_replayed(guarded: Guarded) -> None:
    graph = guarded.new()
    graph.capture_begin()
    graphs.note(2)
    graph.capture_end()
    with pytest.raises(Over):
        graph.replay()
    assert guarded.asked == [2]
    assert graph.replayed == 0


def test_a_capture_that_does_not_begin_has_nothing(guarded: Guarded) -> None:
    graph = guarded.new()
    with pytest.raises(RuntimeError, match="global"):
        graph.capture_begin("bad")
    graphs.note(2)
    graph.replay()
    assert guarded.asked == []


def test_torch_has_what_is_guarded() -> None:
    for name in ("capture_begin", "capture_end", "replay"):
        assert callable(getattr(torch.cuda.CUDAGraph, name))
