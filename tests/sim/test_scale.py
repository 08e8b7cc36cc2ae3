"""A job of some hundred nodes keeps what docs/membership.md says of those of thousands."""

import math

import pytest

from .scale import TIMES, measure

# Of virtual time, from the loss of a node until all train again.
BAR_S = 2.0


@pytest.mark.parametrize("nodes", [64, 256])
def test_a_recovery_takes_no_longer_and_says_no_more_in_a_larger_job(nodes: int) -> None:
    found = measure(nodes)
    assert found.agent_lost_s < 0.5
    assert TIMES.dark_s / 2 < found.dark_s < BAR_S
    few = 8 * math.log2(nodes)
    assert found.peace.median < few
    assert found.agent_lost.median < few
    # A bound for the busiest, too: nobody is the one whom everybody asks.
    assert found.agent_lost.leader < 200
    assert found.agent_lost.most < 200
