"""What agents hold gets into the ledger: from their own daemons, and from who leads."""

from __future__ import annotations

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.snapshots import REPORT_INTERVAL_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Decided
from ckptless.daemon.protocol.records import HoldingRecord
from ckptless.daemon.replication.protection import FEW_NODES

from .lease_nodes import Heard, Node, agreed, first_generation, trains

FEW = 3
MANY = FEW_NODES + 1


def holds(node: int, step: int, seq: int, of: int = FEW) -> e.Report:
    """Return what an agent says that has made its rank's step."""
    tensors = ((node, (step - 1, step), 16),)
    copies = m.Copies(tensors=tensors, records=((node, node, (step,), 4),), nbytes=64)
    return e.Report(node, structs.replace(trains(node, first_generation(of), seq=seq), copies=copies))


def written(found: Heard) -> list[HoldingRecord]:
    writes = [output for output in found.outputs if isinstance(output, e.Write)]
    return [row for write in writes for row in write.records if isinstance(row, HoldingRecord)]


def steps(found: Heard) -> list[tuple[int, int]]:
    """(node, newest step) of each row."""
    return [(row.node, row.tensors[0][1][-1]) for row in written(found)]


def test_it_is_written_once_a_second_and_only_when_it_changed() -> None:
    node = Node(me=0, nodes=FEW)
    node.wait(2 * REPORT_INTERVAL_S)
    told = Heard()
    for seq in range(10, 14):
        told.outputs += node.feed(holds(0, seq, seq)).outputs
    assert not written(told)
    (row,) = written(node.wait(2 * REPORT_INTERVAL_S))
    assert row == HoldingRecord(
        job="4711",
        node=0,
        tensors=((0, (12, 13), 16),),
        records=((0, 0, (13,), 4),),
        nbytes=64,
        seq=13,
        updated_s=row.updated_s,
    )
    node.feed(e.Report(0, structs.replace(holds(0, 13, 14).message, slots=())))
    assert not written(node.wait(2 * REPORT_INTERVAL_S))


def test_it_is_as_of_when_it_was_told() -> None:
    node = Node(me=0, nodes=FEW)
    node.wait(REPORT_INTERVAL_S / 2)
    told_s = node.now
    node.feed(holds(1, 9, 9))
    (row,) = written(node.wait(2 * REPORT_INTERVAL_S))
    assert (row.node, row.updated_s) == (1, told_s)


@pytest.mark.parametrize("me", [0, 1])
def test_the_last_word_is_written_when_the_job_is_over(me: int) -> None:
    node = Node(me=me, nodes=FEW)
    node.feed(holds(me, 9, 9))
    node.wait(2 * REPORT_INTERVAL_S)
    node.feed(holds(me, 12, 10))
    outcome = m.Outcome(state="done", exit_code=0, reason="all ranks have finished", why="done")
    decree = structs.replace(agreed(FEW), index=2, outcome=outcome)
    assert steps(node.feed(e.Said(2, Decided(decree=decree)))) == [(me, 12)]


def test_of_other_nodes_only_who_leads_writes() -> None:
    reports = (holds(0, 9, 9), holds(1, 9, 9))
    for me, rows in ((0, [(0, 9), (1, 9)]), (1, [(1, 9)])):
        node = Node(me=me, nodes=FEW)
        node.feed(*reports)
        assert steps(node.wait(2 * REPORT_INTERVAL_S)) == rows


def test_of_few_nodes_the_leader_is_told_at_once() -> None:
    node = Node(me=1, nodes=FEW)
    (forwarded,) = [o for o in node.feed(holds(1, 9, 9)).outputs if isinstance(o, e.Forward)]
    assert forwarded.report == holds(1, 9, 9)


def test_of_many_nodes_the_leader_is_told_in_turn() -> None:
    report = holds(1, 9, 9, MANY)
    node, leader = Node(me=1, nodes=MANY), Node(me=0, nodes=MANY)
    found = node.feed(report)
    (forwarded,) = [o for o in found.outputs if isinstance(o, e.Forward)]
    assert isinstance(forwarded.report.message, m.AgentState)
    assert forwarded.report.message.copies is None
    leader.feed(forwarded.report)
    assert not written(leader.wait(2 * REPORT_INTERVAL_S))
    # Said again, whole, with the same number: what was left out of it is news.
    meetings = [o for o in node.wait(2 * REPORT_INTERVAL_S).outputs if isinstance(o, e.Meet) and o.reports]
    assert {meeting.node for meeting in meetings} == {0}
    assert report in meetings[0].reports
    leader.feed(*meetings[0].reports)
    assert steps(leader.wait(2 * REPORT_INTERVAL_S)) == [(1, 9)]
