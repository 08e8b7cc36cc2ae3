"""Pure: the timed record of one recovery."""

from dataclasses import dataclass, field

from ckptless.daemon.protocol.records import PHASES


@dataclass
class Timeline:
    """Marks the end of each phase; it lasts from the mark before it. Only its first mark counts."""

    started_s: float
    ends: dict[str, float] = field(default_factory=dict)

    def mark(self, phase: str, now: float) -> None:
        """`phase` of PHASES ends now, unless it has ended before."""
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is no phase of a recovery")
        self.ends.setdefault(phase, now)

    def phases(self) -> dict[str, float]:
        """Seconds of every phase so far, in order; their sum is the recovery so far."""
        durations: dict[str, float] = {}
        last = self.started_s
        for phase in PHASES:
            if phase in self.ends:
                durations[phase] = max(0.0, self.ends[phase] - last)
                last = max(last, self.ends[phase])
        return durations

    def total_s(self, now: float) -> float:
        """Seconds since the first sign of the fault."""
        return now - self.started_s
