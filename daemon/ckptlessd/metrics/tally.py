"""Pure: counts of what this daemon has told and led since it began, whether anybody asks or not."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.planning.plan import RUNGS
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.protocol.messages import SlotState
from ckptless.daemon.protocol.records import (
    PHASES,
    EventRecord,
    FaultRecord,
    JobRecord,
    Record,
    RecoveryRecord,
)

# Seconds, up to which each bucket counts; one more is for the rest.
RECOVERY_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)
# Of phases there are many: fewer buckets.
PHASE_S = (0.1, 0.5, 2.5, 15.0, 60.0)
DELAY_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# Kinds of faults. An agent, which is its user's, may tell of others: together they are one more.
FAULTS = frozenset(
    (
        *("raised", "refused", "no-state", "no-memory", "no-room"),
        *("broken", "hung", "died", "renewed", "node-lost"),
        *("stall", "twins-differ", "silent-corruption", "nccl-unknown"),
    )
)
OTHER = "other"
# Who tells of them: else it is the process itself. And of any whoever wanted it, as a drill.
SOURCES = {
    "node-lost": ("agent", "membership", "slurm", "health", "operator", "lease", "leader"),
    "hung": ("process", "leader"),
    "stall": ("leader",),
    "twins-differ": ("twins",),
    "silent-corruption": ("twins",),
}


class Histogram:
    """Counts of values by `bounds`, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.total = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value in the first bucket that it is not above."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with the count of all that is not above it."""
        found, count = [], 0
        for bound, more in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            count += more
            found.append((bound, float(count)))
        return found


def _recoveries() -> dict[tuple[str, ...], Histogram]:
    return {(rung,): Histogram(RECOVERY_S) for rung in RUNGS}


def _phases() -> dict[tuple[str, ...], Histogram]:
    return {(rung, phase): Histogram(PHASE_S) for rung in RUNGS for phase in PHASES}


def _faults() -> Counter[tuple[str, ...]]:
    told = ((kind, source) for kind in FAULTS for source in (*SOURCES.get(kind, ("process",)), "drill"))
    return Counter(dict.fromkeys(sorted(told), 0))


@dataclass
class Tally:
    """Owned by the daemon's event loop. Each key is that of a series: the values of its labels.

    A series is there from the beginning, at 0: increase() does not see the first of what begins at 1.
    """

    delays: Histogram = field(default_factory=lambda: Histogram(DELAY_S))
    recoveries: dict[tuple[str, ...], Histogram] = field(default_factory=_recoveries)
    phases: dict[tuple[str, ...], Histogram] = field(default_factory=_phases)
    outcomes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    faults: Counter[tuple[str, ...]] = field(default_factory=_faults)
    events: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ended: Counter[tuple[str, ...]] = field(default_factory=Counter)
    steps: int = 0
    # Where the jobs that are led from here were at the last look.
    _stepped: dict[str, int] = field(default_factory=dict)

    def told(self, records: Iterable[Record]) -> None:
        """Count what this daemon says to all others of a job: nobody else counts it."""
        for record in records:
            match record:
                case RecoveryRecord(outcome=str(outcome)):
                    self.outcomes[(outcome,)] += 1
                    if outcome == "recovered":
                        self._recovered(record.rung, record.phases)
                case FaultRecord():
                    kind = record.kind if record.kind in FAULTS else OTHER
                    self.faults[(kind, record.source or OTHER)] += 1
                case EventRecord():
                    self.events[(record.level,)] += 1
                case JobRecord(ended_s=float()):
                    self.ended[(record.state,)] += 1

    def _recovered(self, rung: str, phases: Mapping[str, float]) -> None:
        rung = rung if rung in RUNGS else OTHER
        self.recoveries.setdefault((rung,), Histogram(RECOVERY_S)).add(sum(phases.values()))
        for phase, took_s in phases.items():
            self.phases.setdefault((rung, phase), Histogram(PHASE_S)).add(took_s)

    def look(self, name: str, job: JobState) -> None:
        """Count the steps that a job has done since the last look, if it is led from here."""
        # Another leader counts meanwhile.
        before = self._stepped.pop(name, None)
        if job.leads and job.outcome is None and (step := _step(job, before)) is not None:
            self.steps += max(0, step - (step if before is None else before))
            self._stepped[name] = step


def first_slot(job: JobState) -> SlotState | None:
    """Return the slot of rank 0, by which the whole job is told: all ranks wait for each other."""
    assignment = job.assignment
    if assignment is None or not assignment.places:
        return None
    place = assignment.places[0]
    return job.nodes[place.node].slot(place.slot)


def _step(job: JobState, before: int | None) -> int | None:
    """Return where the job is; None where this daemon does not know yet."""
    slot, assignment = first_slot(job), job.assignment
    if slot is not None and slot.step is not None:
        return slot.step
    begins = assignment is not None and assignment.generation == 1 and assignment.restore_step is None
    return 0 if before is None and begins else before
