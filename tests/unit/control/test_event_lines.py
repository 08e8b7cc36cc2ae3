"""The story says who it was and why; what only follows from it is not told as if it were the cause."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from msgspec import structs

from ckptless.daemon.ckptlessd.planning import event_lines
from ckptless.daemon.ckptlessd.planning.faults import Fault, Finding, NodeView
from ckptless.daemon.ckptlessd.recovery.events import NodeLost
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import FaultSource, Subject


def view(node: int, *slots: m.SlotState) -> NodeView:
    info = m.NodeInfo(node=node, name=f"n{node:02}", address="a", agent_port=1)
    return NodeView(node, m.Introduction(info=info, pid=1), m.AgentState(seq=1, slots=slots))


def assignment(ranks: int) -> m.Assignment:
    return m.Assignment(
        job="j",
        generation=2,
        term=1,
        leader=0,
        places=tuple(m.Place(node=rank, slot=0) for rank in range(ranks)),
        nodes=(),
        restore_step=3,
    )


def slot(phase: m.Phase, step: int | None = 9, generation: int = 2, **more: Any) -> m.SlotState:
    return m.SlotState(slot=0, phase=phase, generation=generation, pid=77, step=step, **more)


NODES = {0: view(0), 1: view(1)}


@pytest.mark.parametrize(
    ("kind", "detail", "exit_code", "says", "event", "more"),
    [
        ("died", "was ended by SIGKILL", -9, "was ended by SIGKILL", "died", {"signal": "SIGKILL"}),
        ("died", "ended with exit code 3", 3, "ended with exit code 3", "died", {"exit_code": 3}),
        ("died", "ended with exit code 0", 0, "ended with exit code 0", "died", {"exit_code": 0}),
        ("died", "was ended by 35", -35, "was ended by 35", "died", {"signal": "signal 35"}),
        (
            "raised",
            "ValueError: no\nsuch",
            None,
            "raised ValueError: no",
            "raised",
            {"error": "ValueError: no"},
        ),
        (
            "hung",
            "did not answer for 3.0 s",
            -9,
            "hung: did not answer for 3.0 s",
            "hung",
            {"signal": "SIGKILL"},
        ),
        ("refused", "UsageError: x", None, "raised UsageError: x", "refused", {"error": "UsageError: x"}),
        ("silent-corruption", "shard 0", None, "has other tensors than its twins: shard 0", "corrupt", {}),
        ("no-state", "nobody", None, "did not get its state: nobody", "no-state", {}),
        ("no-memory", "x", None, "did not get its device's memory: x", "no-memory", {}),
        ("hung", "", None, "hung", "hung", {}),
        ("died", "", None, "died", "died", {}),
        # How its process has ended later is not what was wrong.
        ("raised", "ValueError: x", -15, "raised ValueError: x", "raised", {"error": "ValueError: x"}),
    ],
)
def test_who_it_was_and_why(
    kind: str, detail: str, exit_code: int | None, says: str, event: str, more: dict[str, Any]
) -> None:
    finding = Finding(kind, 1, 0, 3, detail, exit_code=exit_code, pid=4711, source="process")
    line = event_lines.fault_line(finding, NODES)
    assert (line.level, line.kind) == ("warning", event)
    assert line.text == f"rank 3 on n01 (slot 0, pid 4711) {says}"
    assert line.about == Subject(**{"node": 1, "name": "n01", "slot": 0, "rank": 3, "pid": 4711, **more})


def test_a_slot_whose_process_is_not_known() -> None:
    line = event_lines.fault_line(Finding("hung", 1, 0, 3, "", source="process"), NODES)
    assert line.text == "rank 3 on n01 (slot 0) hung"


def test_a_fault_of_a_whole_node() -> None:
    finding = Finding("nccl-unknown", 1, None, None, "a check-in of 192 bytes", source="process")
    line = event_lines.fault_line(finding, NODES)
    assert line.text == "n01 nccl-unknown: a check-in of 192 bytes"
    assert line.about == Subject(node=1, name="n01")


def test_signals_have_their_names() -> None:
    assert {number: signal.Signals(number).name for number in event_lines.SIGNALS} == event_lines.SIGNALS
    assert event_lines.SIGNALS.keys() == {*range(1, 16), 24, 25, 31}


def test_consequences_are_told_where_there_is_no_cause() -> None:
    broken = Fault("a", Finding("broken", 0, 0, 0, "gloo: a pair", source="process"))
    died = Fault("b", Finding("died", 1, 0, 1, "was ended by SIGKILL", source="process"))
    assert event_lines.only_consequences([]) is None
    assert event_lines.only_consequences([broken, died]) is None
    alone = event_lines.only_consequences([broken, broken])
    assert alone is broken.finding
    assert "no rank is known to be the cause" in event_lines.fault_line(alone, NODES).text


@pytest.mark.parametrize(
    ("source", "reason", "kind", "text"),
    [
        ("membership", "silent", "node-lost", "node-1 (n01, rank 1) is lost: silent (membership)"),
        ("operator", "taken out by uid 5: fan", "evicted", "node-1 (n01, rank 1) is taken out by uid 5: fan"),
        ("health", "taken out by a check", "evicted", "node-1 (n01, rank 1) is taken out by a check"),
    ],
)
def test_nodes_that_are_gone(source: FaultSource, reason: str, kind: str, text: str) -> None:
    line = event_lines.loss_line(NodeLost(1, reason, 0.0, source=source), NODES[1], assignment(2))
    assert (line.kind, line.text) == (kind, text)
    assert line.about == Subject(node=1, name="n01", error=reason)


def test_a_node_with_several_ranks_is_gone() -> None:
    plan = structs.replace(assignment(1), places=tuple(m.Place(node=1, slot=slot) for slot in range(3)))
    line = event_lines.loss_line(NodeLost(1, "silent", 0.0, source="membership"), NODES[1], plan)
    assert line.text == "node-1 (n01, ranks 0-2) is lost: silent (membership)"


def test_a_node_without_a_rank_is_gone() -> None:
    line = event_lines.loss_line(NodeLost(1, "silent", 0.0, source="membership"), NODES[1], assignment(1))
    assert line.text == "node-1 (n01, no rank) is lost: silent (membership)"


def test_causes_are_parts_of_a_sentence() -> None:
    died = Finding("died", 1, 0, 2, "was ended by SIGKILL", pid=9, exit_code=-9, source="process")
    assert event_lines.cause_text(died, NODES) == "rank 2 on n01 (slot 0, pid 9) was ended by SIGKILL"
    lost = Finding("node-lost", 1, None, None, "dark", source="membership")
    assert event_lines.cause_text(lost, NODES) == "n01 is lost: dark"
    stall = Finding("stall", 0, None, None, "no step in 10 s", source="leader")
    assert event_lines.cause_text(stall, NODES) == "no step in 10 s"


def test_ranks_that_return_before_others() -> None:
    plan = assignment(4)
    nodes = {
        0: view(0, slot("restored", 12)),
        1: view(1, slot("finished", 9)),
        2: view(2, slot("restored", 12)),
        3: view(3, slot("exited", 10)),
    }
    line = event_lines.returned_early(plan, nodes)
    assert line is not None
    assert (line.kind, line.about) == (
        "returned-early",
        Subject(node=1, name="n01", slot=0, rank=1, pid=77),
    )
    assert line.text == (
        "ranks 1, 3 have returned from the training function after step 10, while ranks 0, 2 still train, "
        "and may wait for them"
    )
    nodes[3] = view(3, slot("exited", 10, cause=m.Cause(kind="died")))
    nodes[1] = view(1, slot("finished", 9, generation=1))
    assert event_lines.returned_early(plan, nodes) is None
    every = {node: view(node, slot("finished")) for node in range(4)}
    assert event_lines.returned_early(plan, every) is None


@pytest.mark.parametrize(("steps", "when"), [((None, 4), " after step 4"), ((None, None), "")])
def test_a_rank_that_returns_without_a_step(steps: tuple[int | None, ...], when: str) -> None:
    nodes = {node: view(node, slot("finished", step)) for node, step in enumerate(steps)}
    line = event_lines.returned_early(assignment(3), {**nodes, 2: view(2, slot("restored", 5))})
    assert line is not None
    assert line.text == (
        f"ranks 0, 1 have returned from the training function{when}, while rank 2 still trains, "
        "and may wait for them"
    )


def test_a_line_stays_one() -> None:
    assert event_lines.one_line("\n  a \nb") == "a"
    assert event_lines.one_line("") == ""
    assert event_lines.one_line("\x1b[2Jforged") == "\\x1b[2Jforged"
    assert event_lines.one_line("dépassé") == "dépassé"
    assert len(event_lines.one_line("x" * 9999)) == event_lines.TEXT_LIMIT == 500
    longest = "x" * event_lines.TEXT_LIMIT
    assert event_lines.one_line(longest) == longest
