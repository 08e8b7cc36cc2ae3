"""An agent that has missed an assignment, while its daemon was away, is told of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec import structs

from ckptless.daemon.api import messages as m
from ckptless.daemon.control import edges as e

sys.path.insert(0, str(Path(__file__).parent))

from lease_nodes import Heard, Node, first_generation, trains

NODES = 3


def given(found: Heard) -> list[int]:
    """Generations that the agent was handed."""
    orders = [output.order for output in found.outputs if isinstance(output, e.ToAgent)]
    return [order.assignment.generation for order in orders if isinstance(order, m.Assign)]


@pytest.mark.parametrize(("assigned", "missed"), [(None, [1]), (0, [1]), (1, [])])
def test_it_is_told_what_it_has_missed(assigned: int | None, missed: list[int]) -> None:
    node = Node(me=1, nodes=NODES)
    state = structs.replace(trains(1, first_generation(NODES), seq=5), assigned=assigned)
    assert given(node.feed(e.Report(1, state))) == missed


def test_again_where_that_was_lost_too() -> None:
    node = Node(me=1, nodes=NODES)
    state = structs.replace(trains(1, first_generation(NODES), seq=5), assigned=None)
    node.feed(e.Report(1, state))
    assert set(given(node.wait(3.0))) == {1}
