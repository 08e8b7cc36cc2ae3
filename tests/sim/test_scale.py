"""A job of some hundred nodes of 8 ranks keeps what docs/membership.md says of those of thousands."""

import math
from collections.abc import Iterable

import pytest

from ckptless.daemon.ckptlessd.planning import plan
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery import following, snapshots
from ckptless.daemon.protocol.messages import NodeInfo
from ckptless.daemon.replication.re_replication import Holders, remakes

from . import scale_memory
from . import scale_parts as parts
from .scale import TIMES, Cluster, measure

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
    # Decrees as what differs, reports put together.
    assert found.agent_lost.leader_nbytes < 100_000
    assert found.agent_lost.most_nbytes < 60_000
    assert found.agent_lost.median_nbytes < 16_000


def test_the_leader_hears_of_steps_by_so_many_reports_a_second_and_writes_so_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (following, snapshots):
        monkeypatch.setattr(module, "NODES_A_SECOND", 64)
    nodes, seconds = 256, 4
    cluster = Cluster(nodes)
    cluster.start()
    cluster.count(lambda: False, 2.0)
    session = next(node.session for node in cluster.nodes if node.session.control.leads)
    leader, controller = session.control, session._controller
    before = [leader.nodes[node].state for node in range(nodes)]
    heard, rows = [0], [0]
    handle_all = controller.handle_all

    def count(events: Iterable[e.Input], now: float) -> list[e.Output]:
        events = tuple(events)
        heard[0] += sum(isinstance(event, e.Report) and event.node != leader.me for event in events)
        out = handle_all(events, now)
        rows[0] += sum(len(one.records) for one in out if isinstance(one, e.Write) and not one.share)
        return out

    monkeypatch.setattr(controller, "handle_all", count)
    cluster.count(lambda: False, seconds)
    # Each agent tells of its steps four times a second. Beside its turn each daemon says all once in a while.
    assert nodes / 2 < heard[0] < 4 * nodes
    assert rows[0] <= (seconds + 1) * 65 * (parts.SLOTS + 1)
    # In that time it has heard of all of them.
    after = [leader.nodes[node].state for node in range(nodes - parts.SPARES)]
    assert all(new is not None and new is not old for old, new in zip(before, after, strict=False))


def test_what_a_node_remakes_it_finds_out_without_looking_at_the_others_nodes() -> None:
    """Each node that is to hold something is looked up once; before, all nodes were sorted for every rank."""
    now, _ = parts.after_a_loss(256)
    following = plan.next_assignment(now)
    asked: list[int] = []

    class Counted(Holders):
        def of_node(self, node: int, unreachable: object = ()) -> tuple[NodeInfo, ...]:
            asked.append(node)
            return super().of_node(node)

        def of_tensors(self, shard: int, unreachable: object = ()) -> tuple[NodeInfo, ...]:
            asked.append(shard)
            return super().of_tensors(shard)

    remakes(Counted(following, parts.COPIES), 100)
    # A record and the tensors of each rank of its own.
    assert len(asked) == 2 * parts.SLOTS


def test_of_each_node_a_daemon_has_a_few_kilobytes_in_memory() -> None:
    """The leader had 21 kB of each, any other 4.8, before what is said alike was kept once."""
    found = scale_memory.measure(2048)
    assert found.leader_nbytes - found.bare_nbytes < 14_000 * 2048
    assert found.other_nbytes - found.bare_nbytes < 4_400 * 2048
