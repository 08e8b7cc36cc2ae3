"""A CUDA graph is asked about before each replay, if it has captured a collective. On a class of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ckptless.pytorch_hooks.torch_private import graphs


@dataclass(eq=False)
class Generation:
    """One that groups stand in."""

    generation: int
    ended: bool = False


class Over(Exception):
    """No replay."""


class Guarded:
    """A class of graphs, and the generations that each of them was asked about; those above 1 are over."""

    def __init__(self) -> None:
        class Graph:
            """What torch.cuda.CUDAGraph has, as far as it counts here."""

            replayed = 0
            apart = False

            def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
                """Begin; not in a pool that is called bad."""
                if pool == "bad":
                    raise RuntimeError(capture_error_mode)

            def capture_end(self) -> None:
                """End."""

            def replay(self) -> None:
                """Do it."""
                self.replayed += 1

            def reset(self) -> None:
                """Take it apart."""
                self.apart = True

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
    graphs.note(Generation(7))
    one.capture_begin(capture_error_mode="thread_local")
    graphs.note(Generation(1))
    one.capture_end()
    other.capture_begin()
    other.capture_end()
    graphs.note(Generation(2))
    one.replay()
    other.replay()
    assert guarded.asked == [1]
    assert (one.replayed, other.replayed) == (1, 1)


def test_what_is_refused_is_not_replayed(guarded: Guarded) -> None:
    graph = guarded.new()
    graph.capture_begin()
    graphs.note(Generation(2))
    graph.capture_end()
    with pytest.raises(Over):
        graph.replay()
    assert guarded.asked == [2]
    assert graph.replayed == 0


def test_a_capture_that_does_not_begin_has_nothing(guarded: Guarded) -> None:
    graph = guarded.new()
    with pytest.raises(RuntimeError, match="global"):
        graph.capture_begin("bad")
    graphs.note(Generation(2))
    graph.replay()
    assert guarded.asked == []


def captured(guarded: Guarded, generation: Generation) -> Any:
    graph = guarded.new()
    graph.capture_begin()
    graphs.note(generation)
    graph.capture_end()
    return graph


def test_graphs_of_what_is_over_are_taken_apart_and_no_others(guarded: Guarded) -> None:
    """An abort of NCCL's does not return before."""
    one, two = Generation(1), Generation(2)
    old, new, plain = captured(guarded, one), captured(guarded, two), guarded.new()
    plain.capture_begin()
    plain.capture_end()
    graphs.release()
    assert (old.apart, new.apart, plain.apart) == (False, False, False)
    one.ended = True
    graphs.release()
    assert (old.apart, new.apart, plain.apart) == (True, False, False)


def test_a_graph_whose_generation_ends_while_it_is_captured_is_taken_apart_then(guarded: Guarded) -> None:
    one = Generation(1)
    graph = guarded.new()
    graph.capture_begin()
    graphs.note(one)
    one.ended = True
    graphs.release()
    assert not graph.apart
    graph.capture_end()
    assert graph.apart


def test_torch_has_what_is_guarded() -> None:
    for name in ("capture_begin", "capture_end", "replay", "reset"):
        assert callable(getattr(torch.cuda.CUDAGraph, name))
