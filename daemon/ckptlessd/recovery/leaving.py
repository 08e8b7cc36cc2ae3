"""Pure: when the leader has a job leave a node that lives: one that is not well, slow, or wanted by others.

One node at a time, and only while the job trains: it must be able to go on without each. Of a node whose
memory is trusted the ranks move with their newest state, and it is out once it has none; one that is to be
left at once counts as lost. Before anybody stops, spares build for the ranks that they are to get, and then
get a commit of theirs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ckptless.daemon.ckptlessd.planning import plan
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.recovery import eviction
from ckptless.daemon.ckptlessd.recovery.events import Leave, NodeLost
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.ckptlessd.recovery.sizes import LOOK_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.messages import WARM

# An order that is not followed yet is said again after so long, then after twice as long, and so on.
REPEAT_S = 1.0


@dataclass
class _Ahead:
    """The assignment that spares (`newcomers`) build for since `since_s`, so that ranks can leave `node`.

    `state`: they have built, and are to be given a commit. What they are to do was said at `said_s`. `tried`:
    the nodes that were to do this, for the same ranks, before.
    """

    node: int
    assignment: m.Assignment
    newcomers: tuple[m.Place, ...]
    since_s: float
    said_s: float
    tried: frozenset[int] = frozenset()
    state: bool = False
    repeat_s: float = REPEAT_S

    def order(self, now: float) -> m.Prepare:
        """Return what is to be said to all, now."""
        self.said_s = now
        generation = self.assignment.generation - 1
        return m.Prepare(generation=generation, assignment=self.assignment, state=self.state)


@dataclass
class Leaving:
    """The nodes that are to be left, as far as one reign has dealt with them.

    `nodes`: the generation was stopped so that the next one has no ranks there. `order`: to be said to all.
    """

    job: JobState
    nodes: frozenset[int] = frozenset()
    order: m.Prepare | None = None
    _ahead: _Ahead | None = None
    _looked_s: float = -LOOK_S
    # Why nodes stay, as it was told last.
    _told: dict[int, str] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin to lead."""
        self.nodes, self._looked_s = frozenset(), -LOOK_S
        self.order = self._ahead = None
        # What an earlier reign has heard of Slurm, and found out.
        self.job.drained.clear()
        self.job.slow.clear()

    def due(self, assignment: m.Assignment, step: int, now: float) -> str | None:
        """Return why a generation that trains is to be stopped: its ranks leave a node; None: it goes on.

        `step`: the newest that any rank has committed.
        """
        job = self.job
        nodes = {**job.slow, **job.drained, **job.unwell, **job.asked}
        nodes |= {node: leave for node, leave in job.unwell.items() if leave.at_once}
        if not nodes or job.stage != "running" or not (self._ready() or now - self._looked_s >= LOOK_S):
            return None
        self._looked_s = now
        # Nobody is to move to a node that is not well either, and what cannot be trusted is not waited with.
        order = lambda node: (not nodes[node].at_once, bool(assignment.ranks_on(node)), node)  # noqa: E731
        for node in sorted(nodes, key=order):
            leave = nodes[node]
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
            if self._prepares(assignment, node, step, now):
                return None
            self.nodes = frozenset((node,))
            text = f"its ranks leave node-{node}, which is {leave.reason}"
            job.announce(Line("info", "leaves", f"{text}{self._describe_state()}"), now)
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
        self.order = self._ahead = None

    def _prepares(self, assignment: m.Assignment, node: int, step: int, now: float) -> bool:
        """Whether spares still build, or get state, for the ranks that leave a node; all are told of it."""
        job, ahead = self.job, self._ahead
        assert job.spec is not None
        if ahead is None or (ahead.node, ahead.assignment.generation) != (node, assignment.generation + 1):
            ahead = self._ahead = self._begin_ahead(assignment, node, step, now)
            if ahead is None:
                return False
        slots = self._slots(ahead.newcomers)
        phases = {slot.phase if slot is not None else None for slot in slots}
        if not phases <= WARM:
            # One has died over it, or raised. Each is tried once, so they come to an end.
            self._ahead = self._begin_ahead(assignment, node, step, now, ahead.tried)
            return self._ahead is not None
        if phases == {"prepared"}:
            if not ahead.state:
                ahead.state, ahead.repeat_s = True, REPEAT_S
                self.order = ahead.order(now)
                return True
            if self._ready():
                return False
        if now - ahead.since_s >= job.spec.limits.stall_s:
            text = f"who is to get the ranks of node-{node} was not ready in {job.spec.limits.stall_s:g} s"
            job.tell(Line("warning", "not-prepared", text), now)
            return False
        if (ahead.state or "waiting" in phases) and now - ahead.said_s >= ahead.repeat_s:
            ahead.repeat_s *= 2
            self.order = ahead.order(now)
        return True

    def _ready(self) -> bool:
        """Whether newcomers have built, and a commit has just come to each: no rank has made another one yet.

        That waits for this one to be held, there too; so the moment is not to be missed.
        """
        ahead = self._ahead
        if ahead is None or not ahead.state:
            return False
        slots = self._slots(ahead.newcomers)
        return all(s is not None and s.phase == "prepared" and s.step is not None for s in slots)

    def _describe_state(self) -> str:
        """Return which step newcomers have already, to be told; nothing where they have not all got one."""
        if self._ahead is None or not self._ready():
            return ""
        steps = {slot.step for slot in self._slots(self._ahead.newcomers) if slot is not None}
        return f"; where they go there is step {min(step for step in steps if step is not None)}"

    def _begin_ahead(
        self, assignment: m.Assignment, node: int, step: int, now: float, tried: frozenset[int] = frozenset()
    ) -> _Ahead | None:
        """Return who is to build for what, with the order to do it; None: that would be of no use."""
        job = self.job
        assert job.spec is not None
        known = (job.spec, job.nodes, assignment, (), step, job.term, job.me, now)
        situation = plan.Situation(*known, wanted=job.wanted, leaving=frozenset((node,)))
        if (following := plan.ahead_of(situation)) is None:
            return None
        newcomers = tuple(sorted({*following.places} - {*assignment.places}))
        # One that is only being started joins when it can, as after a fault.
        if any(slot is None or slot.phase != "waiting" for slot in self._slots(newcomers)):
            return None
        nodes = frozenset(place.node for place in newcomers)
        if nodes & tried:
            return None
        ranks = sorted(rank for rank, place in enumerate(following.places) if place in newcomers)
        names = sorted({f"node-{place.node}" for place in newcomers})
        text = f"{', '.join(names)} builds for rank {', '.join(map(str, ranks))} before it leaves node-{node}"
        job.announce(Line("info", "prepares", text), now)
        ahead = _Ahead(node, following, newcomers, now, now, tried | nodes)
        self.order = ahead.order(now)
        return ahead

    def _slots(self, places: Iterable[m.Place]) -> list[m.SlotState | None]:
        """Return these slots as their agents tell of them, None of one that is not heard of, or lost."""
        nodes = self.job.nodes
        return [nodes[one.node].slot(one.slot) if nodes[one.node].usable else None for one in places]

    def _stays(self, assignment: m.Assignment, node: int, leave: Leave) -> str | None:
        """Return why the job cannot go on without the node, or None."""
        job = self.job
        assert job.spec is not None
        slots = self._slots(assignment.places)
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
