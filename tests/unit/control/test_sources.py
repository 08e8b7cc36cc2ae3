"""A node is lost by whoever's word: what follows is the same, and whose word it was is written down."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import pytest

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.records import FaultRecord, FaultSource
from ckptless.daemon.control import edges as e

sys.path.insert(0, str(Path(__file__).parent))

from lease_nodes import Heard, Node, agreed, lost_by

NODES = 5
SOURCES: tuple[FaultSource, ...] = get_args(FaultSource)


def faults(heard: Heard) -> list[FaultRecord]:
    writes = [output for output in heard.outputs if isinstance(output, e.Write)]
    return [row for write in writes for row in write.records if isinstance(row, FaultRecord)]


@pytest.mark.parametrize("source", SOURCES)
def test_the_leader_stops_and_writes_the_source_down(source: FaultSource) -> None:
    node = Node(0, NODES)
    heard = node.feed(lost_by(2, "gone", 0.5, source=source))
    assert [type(order) for order in heard.orders] == [m.Stop]
    (fault,) = faults(heard)
    assert (fault.kind, fault.node, fault.source) == ("node-lost", 2, source)
    assert fault.seen_s == node.now - 0.5
    assert heard.dark == []


def test_the_first_word_counts() -> None:
    node = Node(0, NODES)
    node.feed(lost_by(2, "gone", source="agent"))
    heard = node.feed(lost_by(2, "reason=fan", source="slurm"))
    assert faults(heard) == []
    assert node.control.standing.lost == ((2, "gone", "agent"),)


def test_the_source_is_told_on() -> None:
    """Who has missed the message hears it from the leader's standing, and tells it on as it was."""
    node = Node(3, NODES)
    standing = e.Standing(1, 0, "running", agreed(NODES), lost=((2, "fan", "health"),))
    node.feed(e.PeerUp(0, standing))
    assert node.control.standing.lost == standing.lost


@pytest.mark.parametrize("source", SOURCES)
def test_the_own_node_is_ended_and_only_here(source: FaultSource) -> None:
    node = Node(3, NODES)
    (end,) = node.feed(lost_by(3, "fan", source=source)).ends
    assert end.here_only
    assert end.outcome.reason == "node-3 counts as lost: fan"


def test_a_leader_that_is_out_leads_no_more() -> None:
    node = Node(0, NODES)
    heard = node.feed(lost_by(0, "fan", source="operator"))
    assert len(heard.ends) == 1
    assert not node.control.leads
    assert (0, "fan", "operator") in heard.meetings[-1].lost
