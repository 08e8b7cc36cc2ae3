"""Pure: what the leader makes of a job that does not get on: who is late, and what may be why."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.planning import event_lines
from ckptless.daemon.ckptlessd.planning.faults import Finding
from ckptless.daemon.ckptlessd.recovery import pairs
from ckptless.daemon.ckptlessd.recovery.generation_progress import GenerationProgress
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol import messages as m

# Without a step for so long, two nodes that cannot reach each other are why.
APART_S = 3.0
# Many find out about one bad port, one after the other: so long after the last one it is said who gives way,
# but before the longest stall is over.
SETTLED_S = 1.0
# A step counts as late by the job's own rhythm: after so many times the longest of the last so many steps,
# and never sooner than a scheduler, a disk or a collector of garbage may hold a rank up.
LATE_TIMES, LATE_S = 5, 10.0
RHYTHM, FEWEST = 256, 8
MOST_NAMED = 4


@dataclass
class Stalls:
    """The leader's watch over deadlines, and what daemons have told it of nodes that they cannot reach."""

    job: JobState
    apart: pairs.PairReports = field(default_factory=pairs.PairReports)
    # Nodes that cannot reach each other, by what was said last, and since when it is these.
    _pairs: set[tuple[int, int]] = field(default_factory=set)
    _paired: float = 0.0
    # Since when some of a generation's ranks are done and others not; never, once that was told.
    _early: tuple[int, float] = (0, 0.0)
    _told_early: str = ""
    # How long the last steps of this reign took; the step that was seen last; of which it was told as late.
    _rhythm: deque[float] = field(default_factory=lambda: deque(maxlen=RHYTHM))
    _seen: float = 0.0
    _told_late: float = 0.0

    def _still_s(self, now: float) -> float:
        return now - max(self.job.since, self.job.moved)

    def in_the_way(self, assignment: m.Assignment, limits: m.Limits, now: float) -> tuple[int, str] | None:
        """Return which one of two nodes that live and cannot reach each other leaves the job, and why.

        Without a spare it is waited for as long as for any step: the job ends then, and says why.
        """
        job, still_s = self.job, self._still_s(now)
        if still_s < APART_S:
            return None
        self.apart.say(job.me, job.apart, now)
        hosts = {place.node for place in assignment.places} - job.losses.keys()
        usable = {node for node, view in job.nodes.items() if view.usable}
        found = pairs.pairs(self.apart.fresh(now - 3 * job.remind_s), usable, hosts)
        if found != self._pairs:
            self._pairs, self._paired = found, now
        if now - self._paired < SETTLED_S < limits.stall_s - still_s:
            return None
        if not found or (usable <= hosts and still_s < limits.stall_s):
            return None
        node = pairs.gives_way(found, hosts, job.me)
        others = ", ".join(f"node-{b if a == node else a}" for a, b in sorted(found) if node in (a, b))
        text = f"it and {others} cannot reach each other, though others see both; no step in {still_s:.1f} s"
        return node, text

    def silent(self, assignment: m.Assignment, limits: m.Limits, now: float) -> list[int]:
        """Nodes of which a new leader has not heard a word for as long as a step may take."""
        if self._still_s(now) <= limits.stall_s:
            return []
        hosts = {place.node for place in assignment.places} - self.job.losses.keys()
        return sorted(node for node in hosts if self.job.nodes[node].state is None)

    def overdue(self, assignment: m.Assignment, limits: m.Limits, now: float) -> list[Finding]:
        """Deadlines of joining, restoring and of steps. Only processes with hooks tell how far they are."""
        job = self.job
        to_join = job.stage in ("joining", "restoring") and now - job.since > limits.join_s
        stalled = self._still_s(now) > limits.stall_s
        slots = [*self._slots(assignment)] if to_join or stalled else []
        # Who has committed anything has come to ckptless.run before: what is started again will.
        if assignment.restore_step is None and not any(slot.hooked for _, _, slot in slots):
            return []
        late = [*self._late(assignment, slots, limits)] if to_join else []
        training = [one for one in slots if one[2].phase == "restored"]
        if not late and stalled and training:
            text = f"no step in {limits.stall_s:.0f} s"
            if alone := [*self._waited_for(training, text)]:
                return alone
            text += _together({slot.waits for _, _, slot in training})
            if (early := event_lines.returned_early(assignment, job.nodes)) is not None:
                text += f": {early.text}"
            return [Finding("stall", assignment.places[0].node, None, None, text, source="leader")]
        return late

    def _slots(self, assignment: m.Assignment) -> Iterator[tuple[int, m.Place, m.SlotState]]:
        for rank, place in enumerate(assignment.places):
            slot = self.job.nodes[place.node].slot(place.slot)
            if slot is not None:
                yield rank, place, slot

    def _late(
        self, assignment: m.Assignment, slots: list[tuple[int, m.Place, m.SlotState]], limits: m.Limits
    ) -> Iterator[Finding]:
        want = ("joined",) if self.job.stage == "joining" else ("restored", "finished")
        # At the very start a script may take its time before it comes to ckptless.run.
        first = assignment.generation == 1
        text = f"not {want[0]} in {limits.join_s:.0f} s"
        for rank, place, slot in slots:
            if slot.phase not in want and (slot.hooked or not first):
                yield Finding("hung", place.node, place.slot, rank, text, source="leader")

    @staticmethod
    def _waited_for(training: list[tuple[int, m.Place, m.SlotState]], text: str) -> Iterator[Finding]:
        """Yield those that wait for nobody while others wait, who hold the job up; nobody where all wait."""
        waiting = sum(slot.waits is True for _, _, slot in training)
        for rank, place, slot in training:
            if waiting and slot.waits is False:
                others = f"{waiting} other rank{'s wait' if waiting > 1 else ' waits'}"
                said = f"{text}: {others} in a collective that it has not come to"
                yield Finding("hung", place.node, place.slot, rank, said, source="leader")

    def late(self, assignment: m.Assignment, now: float) -> event_lines.Line | None:
        """Say who holds up a step that takes much longer than the others did; once, and nothing is done.

        A rank may have its reasons: an evaluation, a save. That it is in the way of others is worth a line
        long before `overdue` replaces it.
        """
        job = self.job
        if job.moved != self._seen:
            # Over a stop, or another leader's reign, it was no step's time.
            if self._seen > job.since:
                self._rhythm.append(job.moved - self._seen)
            self._seen = job.moved
        still_s = self._still_s(now)
        if job.stage != "running" or len(self._rhythm) < FEWEST or self._told_late == job.moved:
            return None
        longest_s = max(self._rhythm)
        if still_s < max(LATE_S, LATE_TIMES * longest_s):
            return None
        training = [one for one in self._slots(assignment) if one[2].phase == "restored"]
        late = [f"rank {rank}" for rank, _, slot in training if slot.waits is False]
        waiting = sum(slot.waits is True for _, _, slot in training)
        if not late or not waiting:
            return None
        self._told_late = job.moved
        more = len(late) - MOST_NAMED
        who = ", ".join(late[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        others = f"{waiting} other rank{'s wait' if waiting > 1 else ' waits'} for it"
        text = f"no step in {still_s:.0f} s, where the longest took {longest_s:.1f} s: {who}; {others}"
        return event_lines.Line("warning", "late", text)

    def returned_early(self, progress: GenerationProgress, now: float) -> event_lines.Line | None:
        """Ranks that are done long before others, which wait for them in the next collective; told once."""
        assignment = progress.assignment
        if not progress.counts["ended"]:
            return None
        if self._early[0] != assignment.generation:
            self._early = assignment.generation, now
        if now - self._early[1] < event_lines.EARLY_S:
            return None
        self._early = assignment.generation, math.inf
        line = event_lines.returned_early(assignment, self.job.nodes)
        # Where it comes again in every generation, it is told once.
        if line is None or line.text == self._told_early:
            return None
        self._told_early = line.text
        return line


def _together(waits: set[bool | None]) -> str:
    """Return what all ranks do, where it is the same."""
    if waits == {True}:
        return ": all ranks wait in collectives, perhaps for different ones"
    return ": no rank waits for another one" if waits == {False} else ""
