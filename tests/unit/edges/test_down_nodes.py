"""Which nodes a run leaves by Slurm's word."""

from __future__ import annotations

import pytest

from ckptless.daemon.ckptlessd.down_nodes import is_dead, newly_down, newly_leaving
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.protocol.records import FaultSource
from ckptless.daemon.slurm.adapter import Node

NAMES = ("node01", "node02", "node03")
OURS = "ckptless: "


def node(name: str, state: str = "ALLOCATED", *flags: str, reason: str = "") -> Node:
    return Node(name=name, address=name, state=state, flags=frozenset(flags), reason=reason)


@pytest.mark.parametrize(
    ("drained", "found"),
    [
        (node("node02", "ALLOCATED", "DRAIN", reason="fan"), [(1, "drained in Slurm: fan")]),
        (node("node02", "ALLOCATED", "DRAIN", reason="ckptless: job 4: it is dark"), []),
        (node("node09", "ALLOCATED", "DRAIN", reason="fan"), []),
        (node("node02"), []),
        # That is a loss.
        (node("node02", "DOWN", "DRAIN", reason="fan"), []),
    ],
)
def test_a_node_that_somebody_else_drains(drained: Node, found: list[tuple[int, str]]) -> None:
    assert newly_leaving(NAMES, (), [node("node01"), drained], OURS) == found
    assert newly_leaving(NAMES, (1,), [drained], OURS) == []


def test_a_reservation_for_maintenance_that_begins() -> None:
    """Some of its nodes are left; a job of which all nodes are in one has been started in it."""
    maintained = [node("node02", "MIXED", "MAINTENANCE"), node("node03", "ALLOCATED", "MAINTENANCE")]
    text = "reserved for its maintenance from now on"
    assert newly_leaving(NAMES, (), [node("node01"), *maintained], OURS) == [(1, text), (2, text)]
    assert newly_leaving(NAMES, (0,), [node("node01"), *maintained], OURS) == []
    assert newly_leaving(NAMES, (2,), [node("node01"), *maintained], OURS) == [(1, text)]
    drained = node("node02", "MIXED", "MAINTENANCE", "DRAIN", reason="fan")
    assert newly_leaving(NAMES[1:], (), [drained, maintained[1]], OURS) == [(0, "drained in Slurm: fan")]


def test_a_name_that_has_come_again_is_the_later_number() -> None:
    """A node that was given back and drawn in again: its first number is out of the job."""
    names = (*NAMES, "node02")
    down = node("node02", "DOWN", reason="power")
    assert newly_down(names, (1,), [down]) == [(3, "Slurm has it down: power")]


@pytest.mark.parametrize(
    ("source", "dead"),
    [
        *((source, True) for source in ("membership", "agent", "slurm", "lease")),
        *((source, False) for source in ("operator", "health", "drill")),
    ],
)
def test_whether_its_batch_script_may_live(source: FaultSource, dead: bool) -> None:
    assert is_dead(NodeView(0, lost="gone", lost_source=source)) is dead
    assert not is_dead(NodeView(0, lost_source=source))
