"""Pure: when the leader of an elastic job stops a generation, so that the next one has another size."""

from dataclasses import dataclass

from ckptless.daemon.ckptlessd.planning import resizing
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.planning.resizing import Fleet
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol import messages as m

# So often it is looked at all nodes.
LOOK_S = 0.2


@dataclass
class Sizes:
    """The sizes that the job could have, as far as one reign has seen.

    `resizes`: the generation was stopped for a new size, which the next plan is to have.
    """

    job: JobState
    resizes: bool = False
    # The larger size that the job could have had, and since when.
    _larger: tuple[int, float] | None = None
    _looked_s: float = 0.0

    def begin(self) -> None:
        """Begin to lead: what an earlier reign saw is of no matter."""
        self.resizes, self._larger = False, None

    def due(self, assignment: m.Assignment, now: float) -> str | None:
        """Return why a generation that trains is to be stopped now; None: it has the size that it should."""
        spec = self.job.spec
        if spec is None or not spec.elastic or self.job.stage != "running" or now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        fleet, wanted = Fleet.of(spec, self.job.nodes, assignment), self.job.wanted
        larger = resizing.may_grow(spec, fleet, wanted.nodes)
        if larger is None:
            self._larger = None
        elif self._larger is None or self._larger[0] != larger:
            self._larger = larger, now
        # Who asks for a size does not have to wait for it.
        asked = wanted.at_s > assignment.wanted.at_s
        ripe = self._larger is not None and (asked or now - self._larger[1] >= spec.grow_after_s)
        size = larger if ripe else resizing.must_shrink(spec, fleet, wanted.nodes)
        if size is None:
            return None
        self.resizes = True
        return f"the job goes on with {size} nodes; it had {len(fleet.training)}"

    def decided(self, assignment: m.Assignment, now: float) -> None:
        """There is a new generation: tell of its size, where that is another one."""
        job, self.resizes, self._larger = self.job, False, None
        if assignment.rung not in ("grow", "shrink"):
            return
        had = len(assignment.former.shards) if assignment.former is not None else 0
        before = f"; step {assignment.restore_step} is of {had}" if had else ""
        nodes = len(assignment.ranks_by_node)
        text = f"the job goes on with {len(assignment.places)} ranks on {nodes} nodes{before}"
        job.announce(Line("warning" if assignment.rung == "shrink" else "info", assignment.rung, text), now)
