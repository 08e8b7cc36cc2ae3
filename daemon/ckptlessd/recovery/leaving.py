"""Pure: when the leader has a job leave a node that lives: one that is not well, slow, or wanted by others.

One node at a time, and only while the job trains: it must be able to go on without each. Of a node whose
memory is trusted the ranks move with their newest state, and it is out once it has none; one
that is to be left at once counts as lost.
"""

from dataclasses import dataclass, field, replace

from ckptless.daemon.ckptlessd.planning import plan
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.recovery import eviction
from ckptless.daemon.ckptlessd.recovery.events import Leave, NodeLost
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.ckptlessd.recovery.sizes import LOOK_S
from ckptless.daemon.protocol import messages as m


@dataclass
class Leaving:
    """The nodes that are to be left, as far as one reign has dealt with them.

    `nodes`: the generation was stopped so that the next one has no ranks there.
    """

    job: JobState
    nodes: frozenset[int] = frozenset()
    _looked_s: float = -LOOK_S
    # Why nodes stay, as it was told last.
    _told: dict[int, str] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin to lead."""
        self.nodes, self._looked_s = frozenset(), -LOOK_S
        # What an earlier reign has heard of Slurm, and found out.
        self.job.drained.clear()
        self.job.slow.clear()

    def due(self, assignment: m.Assignment, now: float) -> str | None:
        """Return why a generation that trains is to be stopped: its ranks leave a node; None: it goes on."""
        job = self.job
        nodes = {**job.slow, **job.drained, **job.unwell}
        if not nodes or job.stage != "running" or now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        for node, leave in sorted(nodes.items()):
            view = job.nodes.get(node)
            if view is None or not view.usable:
                continue
            if (why := self._stays(assignment, node, leave)) is not None:
                self._tell_stays(node, leave, why, now)
                continue
            self._told.pop(node, None)
            if leave.at_once or not assignment.ranks_on(node):
                job.lose(NodeLost(node, leave.reason, 0.0, source=leave.source))
                job.meet()
                return None
            self.nodes = frozenset((node,))
            text = f"its ranks leave node-{node}, which is {leave.reason}"
            job.announce(Line("info", "leaves", text), now)
            return text
        return None

    def plan(self, situation: plan.Situation) -> m.Assignment:
        """Return the next generation; where there is none without the nodes, one with them. NoPlanError."""
        if self.nodes:
            try:
                return plan.next_assignment(situation)
            except plan.NoPlanError:
                # What else has failed since has taken the places.
                self.nodes = frozenset()
        return plan.next_assignment(replace(situation, leaving=()))

    def decided(self) -> None:
        """There is a new generation."""
        self.nodes = frozenset()

    def _stays(self, assignment: m.Assignment, node: int, leave: Leave) -> str | None:
        """Return why the job cannot go on without the node, or None."""
        job = self.job
        assert job.spec is not None
        slots = [job.nodes[place.node].slot(place.slot) for place in assignment.places]
        if not all(slot is not None for slot in slots):
            return "not all of its ranks are heard of yet"
        if not all(slot.hooked for slot in slots if slot is not None):
            return "a script that does not use ckptless.run would begin anew"
        if not leave.shrink and assignment.ranks_on(node):
            per_node = job.spec.slots_per_node
            if eviction.homeless_after(assignment, job.nodes, per_node, node) > 0:
                return "there is no spare for its ranks"
        return eviction.refusal(job, node, force=False)

    def _tell_stays(self, node: int, leave: Leave, why: str, now: float) -> None:
        text = f"node-{node} is to be left ({leave.reason}), and stays: {why}"
        if self._told.get(node) != text:
            self._told[node] = text
            self.job.tell(Line("warning", "stays", text), now)
