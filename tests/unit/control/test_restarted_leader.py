"""A leader whose daemon was started again knows of no reign: what it says of the job's stage is not news."""

from __future__ import annotations

import pytest

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY
from ckptless.daemon.protocol import messages as m

from .lease_nodes import Node

NODES = 4


@pytest.mark.parametrize("me", [1, 2, 3])
def test_its_stage_of_term_0_is_not_believed(me: int) -> None:
    """It has read the generation from its disk and takes the job for joining; the job trains."""
    node = Node(me=me, nodes=NODES)
    for standing in (e.Standing(0, NOBODY, "joining", index=1), e.Standing(0, NOBODY, "stopping", index=1)):
        node.feed(e.PeerDown(0), e.Connected(0), e.PeerUp(0, standing))
        assert node.control.job.stage == "running"


def test_who_leads_next_does_not_stop_a_job_that_trains() -> None:
    """It would take it for half a recovery."""
    node = Node(me=1, nodes=NODES)
    node.feed(e.PeerDown(0), e.Connected(0), e.PeerUp(0, e.Standing(0, NOBODY, "joining", index=1)))
    orders = [*node.silent([0]).orders, *node.wait(5.0).orders]
    assert node.control.job.leads
    assert not [order for order in orders if isinstance(order, m.Stop) and "recovery" in order.reason]


def test_what_it_says_of_its_own_reign_is_believed() -> None:
    node = Node(me=1, nodes=NODES)
    node.feed(e.PeerUp(0, e.Standing(1, 0, "releasing", index=1)))
    assert node.control.job.stage == "releasing"


def test_a_user_who_ends_the_job_is_heard_by_the_next_leader() -> None:
    """The word came where nobody led: it is not lost with that."""
    node = Node(me=2, nodes=NODES)
    node.feed(e.PeerDown(0))
    cancel = m.Cancel(exit_code=143, reason="signal 15", restarts=None)
    node.feed(e.Report(2, cancel))
    out = node.feed(e.PeerUp(1, e.Standing(2, 1, "running", index=1))).outputs
    assert e.Forward(1, e.Report(2, cancel)) in out
