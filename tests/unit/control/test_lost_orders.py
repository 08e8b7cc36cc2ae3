"""An order that was lost on its way is said again before whoever has not heard of it is given up."""

from __future__ import annotations

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.protocol import messages as m

from .lease_nodes import Node, first_generation, trains

NODES = 4


def raised(node: int) -> m.AgentState:
    """A rank that has left its training function with an error."""
    state = trains(node, first_generation(NODES), seq=9)
    cause = m.Cause(kind="raised", text="ValueError: x")
    slot = structs.replace(state.slots[0], phase="left", cause=cause)
    return structs.replace(state, slots=(slot,))


@pytest.mark.parametrize(("leave_s", "times"), [(1.0, 3), (2.0, 3), (3.0, 3), (9.0, 9)])
def test_a_stop_is_repeated_within_the_time_that_agents_have(leave_s: float, times: int) -> None:
    """The shortest `max_stall` gives agents 1 s: one lost message must not cost a sound node."""
    node = Node(me=0, nodes=NODES)
    spec = node.control.job.spec
    assert spec is not None
    node.control.job.spec = structs.replace(spec, limits=structs.replace(spec.limits, leave_s=leave_s))
    stops = [order for order in node.feed(e.Report(1, raised(1))).orders if isinstance(order, m.Stop)]
    stops += [order for order in node.wait(leave_s - 0.1).orders if isinstance(order, m.Stop)]
    assert {stop.generation for stop in stops} == {1}
    assert len(stops) >= times
    assert not node.control.job.losses
