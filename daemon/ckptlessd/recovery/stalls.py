"""Pure: what the leader makes of a job that does not get on: who is late, and what may be why."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.planning import event_lines, hangs, pairs
from ckptless.daemon.ckptlessd.planning.faults import Finding
from ckptless.daemon.ckptlessd.recovery.generation_progress import GenerationProgress
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.ckptlessd.recovery.sizes import LOOK_S
from ckptless.daemon.protocol import messages as m

# Without a step for so long, two nodes that cannot reach each other are why.
APART_S = 3.0
# Many find out about one bad port, one after the other: so long after the last one it is said who gives way,
# but before the longest stall is over.
SETTLED_S = 1.0
# Without a step for so long, and so often, it is looked at whether a rank's script has said that this may be.
ASK_S = 1.0


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
    # The newest step when a rank was replaced, or named, for being late: not again before the next one.
    _replaced: int = -1
    _looked_s: float = -LOOK_S
    _named: int = -1
    # When a rank was last at what may last by its script's word, and when that was last looked at.
    _excused_s: float = -math.inf
    _asked_s: float = -math.inf

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
        stalled = self._is_stalled(assignment, limits.stall_s, now)
        slots = [*self._slots(assignment)] if to_join or stalled else []
        # Who has committed anything has come to ckptless.run before: what is started again will.
        if assignment.restore_step is None and not any(slot.hooked for _, _, slot in slots):
            return []
        late = [*self._late(assignment, slots, limits)] if to_join else []
        training = [one for one in slots if one[2].phase == "restored"]
        if not late and stalled and training:
            text = f"no step in {limits.stall_s:.0f} s"
            still = {rank: slot.still for rank, _, slot in training if slot.still is not None}
            # Of a rank that gets on nobody knows what it waits for.
            if len(still) == len(training):
                verdict = hangs.judge(still)
                if verdict.suspects:
                    return [*self._hung(assignment, verdict, text)]
                text += f": {verdict.why}"
            if (early := event_lines.returned_early(assignment, job.nodes)) is not None:
                text += f": {early.text}"
            return [_stall(assignment, text)]
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

    def _hung(self, assignment: m.Assignment, verdict: hangs.Verdict, text: str) -> Iterator[Finding]:
        for rank, why in verdict.suspects:
            place = assignment.places[rank]
            yield Finding("hung", place.node, place.slot, rank, f"{text}: {why}", source="leader")

    def _is_stalled(self, assignment: m.Assignment, stall_s: float, now: float) -> bool:
        """Whether there was no step for so long, beside what may last longer by the word of the script.

        The step after that has all its time; where it lasts longer than was said nothing is beside it.
        """
        if (still_s := self._still_s(now)) > ASK_S and now - self._asked_s >= ASK_S:
            self._asked_s = now
            excused = self._excused(self._slots(assignment), now)
            if excused is not None:
                self._excused_s = now if excused else -math.inf
        return min(still_s, now - self._excused_s) > stall_s

    def _excused(self, slots: Iterable[tuple[int, m.Place, m.SlotState]], now: float) -> bool | None:
        """Whether a rank may be without a step yet by its script's word; None: none has said anything."""
        left_s = [
            slot.allowed_s + self.job.nodes[place.node].told_s - now
            for _, place, slot in slots
            if slot.phase == "restored" and slot.allowed_s is not None
        ]
        return max(left_s) > 0.0 if left_s else None

    def late(
        self, assignment: m.Assignment, step: int, now: float
    ) -> tuple[list[Finding], event_lines.Line | None]:
        """Return who hangs by the job's own rhythm, or a line on who may: all ranks stand still for too long.

        A rank that runs may have its reasons, an evaluation or a save of which it has not said anything: it
        is named. One that sleeps where others wait for it is replaced; where that brings no step it was no
        reason, and nothing is done until the longest stall is over. Where all others have returned from the
        script and one waits for them, nothing else can help: all try again, soon, as often as it is of use.
        """
        # Where the last step was restored nobody makes another one: a generation runs from the first one on.
        if self.job.stage not in ("running", "restoring") or now - self._looked_s < LOOK_S:
            return [], None
        # Not at each report: of many ranks all are looked at.
        self._looked_s = now
        slots = [*self._slots(assignment)]
        training = [one for one in slots if not event_lines.has_returned(one[2], assignment.generation)]
        still = {
            rank: slot.still
            for rank, _, slot in training
            if slot.phase == "restored" and slot.still is not None and slot.still.late
        }
        known = bool(still) and len(still) == len(training) and len(slots) == len(assignment.places)
        if not known or self._excused(training, now):
            return [], None
        longest_s = max(one.longest_s for one in still.values())
        # The one that has moved last may have waited for another one at first.
        still_s = min(
            one.still_s + now - self.job.nodes[place.node].told_s
            for one, (_, place, _) in zip(still.values(), training, strict=True)
        )
        text = f"no step in {still_s:.1f} s, where the longest took {longest_s:.1f} s"
        if len(still) < len(slots):
            why = hangs.left_alone(still, len(slots) - len(still))
            return [] if why is None else [_stall(assignment, f"{text}: {why}")], None
        return self._suspect(assignment, still, step, text)

    def _suspect(
        self, assignment: m.Assignment, still: dict[int, m.Still], step: int, text: str
    ) -> tuple[list[Finding], event_lines.Line | None]:
        """Return as `late` who of all ranks holds up the others, once for each step."""
        if self.job.stage != "running" or self._replaced >= step:
            return [], None
        verdict = hangs.judge(still)
        many = 2 * len(verdict.suspects) > len(still)
        if verdict.sure and not many:
            self._replaced = step
            if verdict.suspects:
                return [*self._hung(assignment, verdict, text)], None
            return [_stall(assignment, f"{text}: {verdict.why}")], None
        if self._named >= step or not verdict.suspects:
            return [], None
        self._named = step
        ranks = hangs.ranks_in_words([rank for rank, _ in verdict.suspects])
        return [], event_lines.Line("warning", "late", f"{text}: {ranks}: {verdict.suspects[0][1]}")

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


def _stall(assignment: m.Assignment, text: str) -> Finding:
    """Return that no rank gets on, which is no rank's fault."""
    return Finding("stall", assignment.places[0].node, None, None, text, source="leader")
