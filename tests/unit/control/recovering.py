"""The leader of a job of three ranks and a spare, from a fault on; agents say what a test has them say."""

from __future__ import annotations

from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.protocol import messages as m

from .lease_nodes import STEP, Heard, Node

NODES = 4
RAISED = m.Cause(kind="raised", text="ValueError: x")
HELD = m.Holdings(tensors=((0, (STEP,)),), records=tuple((rank, 0, (STEP,)) for rank in range(NODES - 1)))


class Job:
    """The leader of a job of three ranks and a spare; it hears what the test says."""

    def __init__(self, me: int = 0, *, running: bool = True) -> None:
        self.node = Node(me, NODES) if running else Node.begun(NODES)
        self.seq = 100

    def say(
        self,
        node: int,
        phase: m.Phase,
        *,
        cause: m.Cause | None = None,
        frozen: bool = False,
        stepped: bool = True,
        code: int | None = None,
        hooked: bool = True,
        still: m.Still | None = None,
        allowed_s: float | None = None,
        pace: m.Pace | None = None,
        spare: m.Phase = "waiting",
        spare_has: int | None = None,
        step: int | None = None,
    ) -> Heard:
        self.seq += 1
        assignment = self.node.control.job.assignment
        assert assignment is not None
        generation = assignment.generation
        slot = m.SlotState(
            slot=0,
            phase=phase if assignment.ranks_on(node) else spare,
            generation=generation,
            hooked=hooked,
            step=(STEP + stepped if step is None else step) if assignment.ranks_on(node) else spare_has,
            stepped=stepped,
            still=still,
            allowed_s=allowed_s,
            pace=pace,
            cause=cause,
            exit_code=code,
        )
        held = HELD if frozen else None
        state = m.AgentState(
            seq=self.seq,
            slots=(slot,),
            assigned=generation,
            frozen=generation if frozen else None,
            holdings=held,
        )
        return self.node.feed(e.Report(node, state))

    def stage(self) -> str:
        return self.node.control.job.stage

    def outcome(self) -> m.Outcome | None:
        return self.node.outcome

    def raises(self) -> Heard:
        return self.say(1, "left", cause=RAISED)

    def freeze(self, *nodes: int, phase: m.Phase = "left") -> Heard:
        found = Heard()
        for node in nodes:
            cause = RAISED if node == 1 else None
            found.outputs += self.say(node, phase if node != 1 else "left", cause=cause, frozen=True).outputs
        return found

    @property
    def generation(self) -> int:
        assert self.node.control.job.assignment is not None
        return self.node.control.job.assignment.generation

    @property
    def lost(self) -> list[int]:
        return [node for node, view in self.node.control.job.nodes.items() if view.lost is not None]


def kinds(found: Heard) -> list[type]:
    return [type(order) for order in found.orders]


def kills(found: Heard) -> list[int]:
    return [place.node for order in found.orders if isinstance(order, m.Stop) for place in order.kill]
