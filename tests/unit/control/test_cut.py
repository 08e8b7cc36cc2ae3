"""A recovery that another fault came after is superseded only where some rank had not made its first step."""

from __future__ import annotations

import pytest

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import PHASES, RecoveryRecord

from .lease_nodes import STEP, Heard, Node

NODES = 3
RAISED = m.Cause(kind="raised", text="ValueError: x")
HELD = m.Holdings(tensors=((0, (STEP,)),), records=tuple((rank, 0, (STEP,)) for rank in range(NODES)))


class Job:
    """The leader of a job, and what its agents say."""

    def __init__(self) -> None:
        self.node = Node(me=0, nodes=NODES)
        self.seq = 100

    @property
    def assignment(self) -> m.Assignment:
        assert self.node.control.job.assignment is not None
        return self.node.control.job.assignment

    def say(
        self, node: int, phase: m.Phase, *, stepped: bool, raised: bool = False, frozen: bool = False
    ) -> e.Report:
        self.seq += 1
        generation = self.assignment.generation
        cause = RAISED if raised else m.Cause(kind="stop") if phase == "left" else None
        slot = m.SlotState(
            slot=0,
            phase=phase if self.assignment.ranks_on(node) else "waiting",
            generation=generation,
            hooked=True,
            step=STEP + stepped,
            stepped=stepped,
            cause=cause if self.assignment.ranks_on(node) else None,
        )
        state = m.AgentState(
            seq=self.seq,
            slots=(slot,),
            assigned=generation,
            frozen=generation if frozen else None,
            holdings=HELD if frozen else None,
        )
        return e.Report(node, state)

    def at_once(self, *reports: e.Report) -> None:
        """Several inputs, after which the leader looks once, as when they come in one batch."""
        outputs = self.node.control.handle_all(reports, self.node.now)
        self.node.told.outputs += outputs
        for output in outputs:
            said = self.node._answer(output)
            if said is not None:
                self.node.feed(said)

    def freeze(self, *, stepped: frozenset[int], raised: int) -> None:
        for node in range(NODES):
            report = self.say(node, "left", stepped=node in stepped, raised=node == raised, frozen=True)
            self.node.feed(report)


def outcomes(told: Heard, generation: int) -> list[RecoveryRecord]:
    rows = [row for out in told.outputs if isinstance(out, e.Write) for row in out.records]
    return [row for row in rows if isinstance(row, RecoveryRecord) and row.generation == generation]


@pytest.mark.parametrize(("stepped", "outcome"), [({0, 1, 2}, "recovered"), ({0, 2}, "superseded")])
def test_a_fault_right_after_a_recovery(stepped: set[int], outcome: str) -> None:
    job = Job()
    job.node.feed(job.say(1, "left", stepped=True, raised=True))
    job.freeze(stepped=frozenset(), raised=1)
    assert job.assignment.generation == 2
    for phase in ("joined", "restored"):
        for node in range(NODES):
            job.node.feed(job.say(node, phase, stepped=False))
    assert job.node.control.job.stage == "restoring"
    # Before the leader has heard of every rank's first step one of them raises again.
    job.at_once(job.say(1, "left", stepped=1 in stepped, raised=True))
    job.freeze(stepped=frozenset(stepped), raised=1)
    assert job.assignment.generation == 3
    last = outcomes(job.node.told, 2)[-1]
    assert last.outcome == outcome
    assert (list(last.phases) == list(PHASES)) is (outcome == "recovered")
    events = job.node.told.events
    assert events.count("raised") == 2
    assert "broken" not in events
