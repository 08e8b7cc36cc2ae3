"""Pure: what the leader writes down of a recovery: its faults, how long each phase took, how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.planning import event_lines, plan
from ckptless.daemon.ckptlessd.planning.faults import SECONDARY, Fault, FaultLog, Finding
from ckptless.daemon.ckptlessd.recovery import ledger_rows
from ckptless.daemon.ckptlessd.recovery.events import ToAgent
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.ckptlessd.recovery.timeline import Timeline
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.records import TRAINS


@dataclass
class RecoveryLog:
    """The recoveries of one reign. Each goes from the stop of a generation to the first steps of the next."""

    job: JobState
    _log: FaultLog = field(default_factory=FaultLog)
    _timeline: Timeline | None = None
    # The recovery that the last stop came into.
    _cut: Timeline | None = None
    # What the job's output is still to hear of ranks that were ended by SIGTERM.
    _ended_so: list[str] = field(default_factory=list)

    @property
    def faults(self) -> Sequence[Fault]:
        """Return the faults of this generation, each once."""
        return self._log.faults

    def begin_reign(self) -> None:
        """Forget what was noted in an earlier one."""
        self._log, self._timeline = FaultLog(), None

    def add(self, finding: Finding, assignment: m.Assignment, now: float) -> None:
        """Note a fault of the generation, where it is not known already."""
        job = self.job
        finding = job.drills.marked(finding, assignment.generation, now)
        fault_id = f"g{assignment.generation}.t{job.term}.{len(self.faults) + 1}"
        fault = self._log.add(finding, fault_id)
        if fault is None:
            return
        job.share(ledger_rows.fault(assignment, fault, now))
        if finding.kind not in SECONDARY and finding.kind != "node-lost":
            self._tell(finding, now)

    def _tell(self, finding: Finding, now: float) -> None:
        line = event_lines.fault_line(finding, self.job.nodes)
        if finding.exit_code == event_lines.BY_SIGTERM:
            # Most likely the whole job is told to end, and its output says so; else the next generation does.
            self.job.tell(line, now)
            self._ended_so.append(line.text)
        else:
            self.job.announce(line, now)

    def stopped(self, now: float, age_s: float) -> None:
        """The generation is stopped, for a fault that began so long ago."""
        self._cut, self._timeline = self._timeline, Timeline(started_s=now - age_s)
        self._timeline.mark("detect", now)

    def mark(self, phase: str, now: float) -> None:
        """A phase of the recovery is over, if there is one."""
        if self._timeline is not None:
            self._timeline.mark(phase, now)

    def planned(self, assignment: m.Assignment, now: float, *, stepped: bool) -> None:
        """All have left `assignment`: tell what it was left for, and how the recovery ended that led to it.

        `stepped`: every rank had made its first step.
        """
        if (alone := event_lines.only_consequences(self.faults)) is not None:
            self.job.announce(event_lines.fault_line(alone, self.job.nodes), now)
        cut, self._cut = self._cut, None
        if cut is None:
            return
        assert self._timeline is not None
        if stepped:
            # Who heard of a rank's end before its step could not say when that was: by then.
            for phase in ("join", "restore", "first step"):
                cut.mark(phase, self._timeline.ends["detect"])
        outcome = "recovered" if stepped else "superseded"
        self.job.share(ledger_rows.recovery(assignment, cut, outcome))

    def agreed(self, assignment: m.Assignment, now: float) -> None:
        """There is a new generation."""
        job = self.job
        self.mark("agree", now)
        job.share(ledger_rows.generation(assignment, now))
        if self._timeline is not None:
            job.share(ledger_rows.recovery(assignment, self._timeline, None))
        job.out += [ToAgent(m.Announce(text=text[: m.MAX_ANNOUNCED])) for text in self._ended_so]
        self._ended_so.clear()
        job.note(now, "info", "generation", ledger_rows.describe(assignment))
        if assignment.origin:
            job.note(now, "info", "start", assignment.origin)
        self._log = FaultLog()

    def recovered(self, assignment: m.Assignment, now: float) -> None:
        """Every rank has made its first step."""
        self.mark("first step", now)
        if self._timeline is None:
            text = f"generation {assignment.generation} trains: every rank has made its first step"
            self.job.note(now, "info", TRAINS, text)
        else:
            self.job.share(ledger_rows.recovery(assignment, self._timeline, "recovered"))
            took_s = self._timeline.total_s(now)
            since = "the fault" if assignment.faults else "the last one was stopped"
            text = f"generation {assignment.generation} trains, {took_s:.3f} s after {since}"
            self.job.announce(event_lines.Line("info", "recovered", text), now)
            self._timeline = None

    def ended(self, *, done: bool) -> None:
        """The job ends; what recovery there was has failed. Of one that is done, nobody has seen its end.

        Its script tells of no steps, or has made none since.
        """
        if self._timeline is None:
            return
        assignment = self.job.assignment
        assert assignment is not None  # it was stopped
        if done:
            self.job.share(ledger_rows.recovery(assignment, self._timeline, "unwatched"))
            return
        causes = plan.causes(self.faults)
        self.job.share(ledger_rows.failed_recovery(assignment, self._timeline, causes))
