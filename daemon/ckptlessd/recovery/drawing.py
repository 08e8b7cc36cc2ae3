"""Pure: the rung "draw in": the leader says how many nodes more the job would use, or gives some back.

Whoever gives out nodes (the launcher asks Slurm for them, as the user) starts agents on those that it gets.
They get numbers that were kept for them, and are spares of the job from the next generation on.
"""

from dataclasses import dataclass

from ckptless.daemon.ckptlessd.planning import resizing
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.planning.resizing import Fleet
from ckptless.daemon.ckptlessd.recovery.events import NodeLost, ToAgent
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.ckptlessd.recovery.sizes import LOOK_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import GIVEN_BACK

# What is lacking is said again so often, also where it is nothing: another leader may have said more.
AGAIN_S = 5.0


@dataclass
class Drawing:
    """The nodes that the job lacks or gives back, as far as one reign has told its agent of them."""

    job: JobState
    _looked_s: float = -LOOK_S
    _told: int = -1
    _told_s: float = 0.0
    # Since when a generation could be planned but for a node.
    _waiting_s: float | None = None
    # When it was said last which nodes were given back.
    _given: frozenset[int] = frozenset()
    _given_s: float = 0.0

    def begin(self) -> None:
        """Begin to lead."""
        self._looked_s, self._told, self._waiting_s, self._given = -LOOK_S, -1, None, frozenset()

    def look(self, spec: m.JobSpec, assignment: m.Assignment, now: float) -> None:
        """Say what nodes the job lacks or gives back. Now and then: it is looked at all nodes."""
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        if spec.late:
            self._ask(spec, assignment, now)
        self.give_back(spec, assignment, now)

    def _ask(self, spec: m.JobSpec, assignment: m.Assignment, now: float) -> None:
        """Say how many nodes are lacking, where that is news."""
        fleet = Fleet.of(spec, self.job.nodes, assignment)
        count = resizing.lacking(spec, self.job.nodes, fleet, self.job.wanted.nodes)
        if count != self._told or now - self._told_s >= AGAIN_S:
            if count > max(0, self._told):
                self.job.tell(Line("info", "draw-in", f"{count} nodes more would be used"), now)
            self._told, self._told_s = count, now
            came = sum(view.late and view.hello is not None for view in self.job.nodes.values())
            self.job.out.append(ToAgent(m.Draw(nodes=came + count)))

    def give_back(self, spec: m.JobSpec, assignment: m.Assignment, now: float) -> None:
        """Take the nodes that are left over out of the job, where somebody wants Slurm to have them.

        And say which were given back, by whomever.
        """
        job, said = self.job, self.job.wanted
        if said.give_back and said.nodes is not None and job.stage == "running":
            fleet = Fleet.of(spec, job.nodes, assignment)
            leaving = resizing.left_over(spec, fleet) if len(fleet.training) <= said.nodes else ()
            for node in leaving:
                job.lose(NodeLost(node, GIVEN_BACK, 0.0, source="operator"))
            if leaving:
                job.meet()
        given = frozenset(node for node, loss in job.losses.items() if loss.reason.startswith(GIVEN_BACK))
        if given and (given != self._given or now - self._given_s >= AGAIN_S):
            self._given, self._given_s = given, now
            job.out.append(ToAgent(m.GiveBack(nodes=tuple(sorted(given)))))

    def waits(self, spec: m.JobSpec, assignment: m.Assignment, outcome: m.Outcome, now: float) -> bool:
        """Whether a job that has no spare left does not end yet, since a node may come."""
        if outcome.why != "no-spare" or not spec.late:
            return False
        fleet = Fleet.of(spec, self.job.nodes, assignment)
        if not resizing.lacking(spec, self.job.nodes, fleet, self.job.wanted.nodes):
            return False
        if self._waiting_s is None:
            self._waiting_s = now
            text = f"{outcome.reason}; it waits {spec.draw_s:.0f} s for another node"
            self.job.announce(Line("warning", "waits-for-node", text), now)
        return now - self._waiting_s < spec.draw_s

    def decided(self) -> None:
        """There is a new generation."""
        self._waiting_s = None
