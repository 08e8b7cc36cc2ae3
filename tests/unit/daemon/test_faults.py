"""From what agents report to findings, each once."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from ckptless.daemon.ckptlessd.planning.faults import (
    CONSEQUENCES,
    FaultLog,
    Finding,
    NodeView,
    NodeViews,
)
from ckptless.daemon.ckptlessd.recovery.generation_progress import GenerationProgress
from ckptless.daemon.protocol import messages as m

INFO = m.NodeInfo(node=0, name="n", address="a", agent_port=1)
ASSIGNMENT = m.Assignment(
    job="j",
    generation=3,
    term=1,
    leader=0,
    places=(m.Place(node=0, slot=0), m.Place(node=0, slot=1), m.Place(node=1, slot=0)),
    nodes=(INFO,),
    restore_step=None,
)


def observed(lost: str | None = None, frozen: int | None = None, **slot: Any) -> list[Finding]:
    """Return what is found where slot 1 of node 0 is told as `slot`, and node 1 is lost as told."""
    told = m.SlotState(**{"slot": 1, "phase": "restored", "generation": 3, **slot})
    state = m.AgentState(seq=1, slots=(told,), frozen=frozen)
    return GenerationProgress.of(
        ASSIGNMENT, {0: NodeView(0, state=state), 1: NodeView(1, lost=lost, lost_source="slurm")}
    ).findings


@pytest.mark.parametrize(
    ("slot", "kind"),
    [
        ({}, None),
        ({"phase": "left", "cause": m.Cause(kind="stop"), "frozen": 3}, None),
        # It left, and nobody had told it to.
        ({"phase": "left", "cause": m.Cause(kind="stop")}, "raised"),
        ({"phase": "exited", "cause": m.Cause(kind="stop")}, None),
        ({"phase": "left", "cause": m.Cause(kind="raised", text="E")}, "raised"),
        ({"phase": "left", "cause": m.Cause(kind="raised"), "generation": 2}, None),
        ({"phase": "restored", "cause": m.Cause(kind="broken")}, "broken"),
        ({"phase": "exited", "cause": m.Cause(kind="died"), "exit_code": -9}, "died"),
        ({"phase": "exited", "cause": m.Cause(kind="hung"), "exit_code": -9}, "hung"),
        ({"phase": "exited", "exit_code": 0}, None),
        ({"slot": 5, "phase": "exited", "cause": m.Cause(kind="died")}, None),
    ],
)
def test_what_is_a_fault(slot: dict[str, Any], kind: str | None) -> None:
    found = observed(**slot)
    assert [finding.kind for finding in found] == ([] if kind is None else [kind])
    if found:
        assert (found[0].node, found[0].slot, found[0].rank) == (0, 1, 1)
        assert found[0].exit_code == slot.get("exit_code")
        assert found[0].source == "process"


def test_a_lost_node_is_one_fault_that_names_its_ranks() -> None:
    (finding,) = observed(lost="dark")
    assert (finding.kind, finding.node, finding.slot) == ("node-lost", 1, None)
    assert (finding.detail, finding.source) == ("dark (rank 2)", "slurm")


def test_of_a_lost_node_only_the_loss_counts() -> None:
    slot = m.SlotState(slot=0, phase="exited", generation=3, cause=m.Cause(kind="died"))
    lost = NodeView(1, state=m.AgentState(seq=1, slots=(slot,)), lost="dark")
    assert [f.kind for f in GenerationProgress.of(ASSIGNMENT, {0: NodeView(0), 1: lost}).findings] == [
        "node-lost"
    ]


def test_a_slot_is_found_in_whatever_order_its_agent_tells_of_them() -> None:
    slots = [m.SlotState(slot=index, phase="starting", generation=3) for index in (2, 0, 3)]
    node = NodeView(0, state=m.AgentState(seq=1, slots=tuple(slots)))
    assert [node.slot(index) for index in range(5)] == [slots[1], None, slots[0], slots[2], None]


def test_an_nccl_that_is_not_known_is_a_fault_until_it_has_roots_of_its_own() -> None:
    slots = tuple(m.SlotState(slot=slot, phase="starting", generation=3) for slot in range(2))
    # Also where it was heard of in the generation before, and came too late for the plan.
    state = m.AgentState(seq=1, slots=slots, assigned=2, nccl_unknown="a check-in of 192 bytes")
    nodes = {0: NodeView(0, state=state), 1: NodeView(1)}
    (found,) = GenerationProgress.of(ASSIGNMENT, nodes).findings
    assert (found.kind, found.node, found.slot, found.rank) == ("nccl-unknown", 0, None, None)
    assert (
        found.detail
        == "a check-in of 192 bytes: it needs roots of its own, as with TORCH_NCCL_RANKS_PER_ROOT=100000"
    )
    assert GenerationProgress.of(replace(ASSIGNMENT, stock_roots=True), nodes).findings == []


def test_the_log_takes_each_fault_once() -> None:
    log = FaultLog()
    finding = Finding("died", 0, 1, 1, "first", source="process")
    assert log.add(finding, "a") is not None
    assert log.add(dataclasses.replace(finding, detail="told again", source="leader"), "b") is None
    assert log.add(dataclasses.replace(finding, slot=0, rank=0), "c") is not None
    assert [fault.id for fault in log.faults] == ["a", "c"]


def test_of_very_many_consequences_the_log_takes_some_and_every_cause() -> None:
    log = FaultLog()
    for rank in range(2 * CONSEQUENCES):
        log.add(Finding("broken", rank, 0, rank, "reset", source="process"), f"b{rank}")
    assert len(log.faults) == CONSEQUENCES
    assert log.add(Finding("died", 0, 0, 0, "killed", source="process"), "d") is not None


def test_news_of_what_is_held_is_newer_than_what_was_told() -> None:
    view, held = NodeView(0), m.Copies(tensors=(), records=(), nbytes=0)
    state = m.AgentState(seq=5, slots=())
    assert not view.take_copies(state, 1.0)
    assert view.copies is None
    assert view.take_copies(replace(state, copies=held), 2.0)
    assert not view.take_copies(replace(state, seq=6), 3.0)
    assert not view.take_copies(replace(state, copies=held), 4.0)
    assert view.copies == (held, 5, 2.0)


def test_a_view_of_each_node_of_the_job_and_of_no_other() -> None:
    views = NodeViews((0, 3))
    views[3].lost = "gone"
    assert views[3].lost == "gone"
    assert [*views] == [0, 3]
    with pytest.raises(KeyError):
        views[1]


def test_usable_means_known_and_not_lost() -> None:
    spec = m.JobSpec(
        job="j",
        command=(),
        nodes=1,
        spares=0,
        slots_per_node=1,
        limits=m.Limits(pong_s=1, leave_s=1, join_s=1, stall_s=1),
    )
    hello = m.AgentHello(protocol=m.PROTOCOL, spec=spec, info=INFO, pid=1)
    assert NodeView(0, hello).usable
    assert not NodeView(0).usable
    assert not NodeView(0, hello, lost="dark").usable
