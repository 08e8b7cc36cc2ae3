"""While the ranks are stopped from outside, no deadline of the job goes on."""

from __future__ import annotations

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.protocol import messages as m

from .lease_nodes import LIMITS, Node, lost_by

TICK_S = 1.0
SEEN_EVERY_S = 4.0


def stops(node: Node, seconds: float) -> list[m.Order]:
    return [order for order in node.wait(seconds, TICK_S).orders if isinstance(order, m.Stop)]


def test_a_job_that_is_suspended_does_not_stall() -> None:
    leader = Node(me=0, nodes=3)
    for _ in range(round(3 * LIMITS.stall_s / SEEN_EVERY_S)):
        assert not stops(leader, SEEN_EVERY_S)
        leader.feed(e.Suspended(SEEN_EVERY_S))
    assert not stops(leader, LIMITS.stall_s - SEEN_EVERY_S)
    assert stops(leader, 2 * SEEN_EVERY_S), "it goes on, and makes no step"


def test_a_lease_ends_all_the_same() -> None:
    """By then others may have given this node's ranks to another."""
    follower = Node(me=1, nodes=3)
    follower.silent([0, 2])
    follower.feed(e.Suspended(600.0))
    follower.wait(LIMITS.lease_s + 1.0)
    assert follower.outcome is not None or follower.told.ends


def test_a_node_that_is_stopped_alone_is_no_suspended_job() -> None:
    """Most others have to be known to go on: connected, not lost, and not stopped by their own word."""
    node = Node(me=1, nodes=5)

    def goes_on() -> bool:
        return node.control.job.goes_on_elsewhere

    def says(other: int, *, stopped: bool) -> None:
        node.feed(e.PeerUp(other, e.Standing(1, 0, "running", index=1, stopped=stopped)))

    assert node.feed(e.Stopped(True)).meetings[-1].stopped
    assert goes_on()
    says(2, stopped=True)
    assert goes_on()
    says(3, stopped=True)
    assert not goes_on(), "Slurm stops one node after the other"
    says(2, stopped=False)
    assert goes_on()
    node.silent([4])
    assert not goes_on(), "of one that is away nobody knows"
    node.feed(lost_by(4, "it is dark"))
    assert not goes_on(), "two of four are no more than half"
    node.feed(lost_by(3, "so is it"))
    assert goes_on()
    assert not node.feed(e.Stopped(False)).meetings[-1].stopped


def test_the_wait_for_a_rank_to_join_does_not_go_on() -> None:
    """A generation has just begun, and is suspended for longer than its ranks may take to join."""
    leader = Node(me=0, nodes=3)
    job = leader.control.job
    before = job.since, job.moved, job.led
    leader.now += 50.0
    leader.feed(e.Suspended(20.0))
    assert (job.since, job.moved) == (before[0] + 20.0, before[1] + 20.0)
    leader.feed(e.Suspended(1000.0))
    assert (job.since, job.moved, job.led) == (leader.now, leader.now, leader.now)
