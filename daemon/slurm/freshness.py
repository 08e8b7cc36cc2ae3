"""When to ask Slurm again, and what an answer is worth. Pure: time is handed in.

One `Track` per kind of question (all jobs, all nodes). The rules:

- one query at a time;
- queries begin at least `min_interval_s` apart, and further apart while they fail (doubled up to
  `most_interval_s`), however many readers there are and however fresh they want it;
- an answer is as old as the *beginning* of its query;
- after a change of our own, answers to older queries are not fresh, and one query may begin at once.
"""

import enum
import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often Slurm may be asked, in seconds."""

    min_interval_s: float = 1.0
    most_interval_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.min_interval_s <= self.most_interval_s < math.inf:
            raise ValueError("a pace takes 0 < min_interval_s <= most_interval_s")


class Move(enum.Enum):
    """What a reader is to do now."""

    HAVE = "take the last answer, it is fresh enough"
    JOIN = "wait for the query that is under way"
    ASK = "begin a query"
    LATER = "it is too early to ask again: wait until `next_s`, or take the last answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What was asked and answered. Times are seconds of one clock that never goes back; -inf is never."""

    in_flight: bool = False
    asked_s: float = -math.inf
    """Begin of the newest query."""
    answered_s: float = -math.inf
    """Begin of the newest query that was answered."""
    changed_s: float = -math.inf
    """The newest change of our own."""
    owing: bool = False
    """Something was changed since the newest query began: the next one need not wait."""
    failures: int = 0
    """Queries without an answer since the last one with."""
    trouble: str = ""
    """Why the newest query had no answer; "" if it had."""

    def fresh(self, oldest_s: float) -> bool:
        """Whether the last answer's query began at `oldest_s` or later, and after our own changes."""
        return self.answered_s > self.changed_s and self.answered_s >= oldest_s

    def move(self, now_s: float, oldest_s: float, pace: Pace) -> Move:
        """What a reader is to do who wants the answer to a query that began at `oldest_s` or later."""
        if self.fresh(oldest_s):
            return Move.HAVE
        if self.in_flight:
            return Move.JOIN
        return Move.ASK if now_s >= self.next_s(pace) else Move.LATER

    def next_s(self, pace: Pace) -> float:
        """The earliest time of the next query."""
        if self.failures == 0 and self.owing:
            return -math.inf
        # The exponent is bounded, or it would overflow after a thousand failures.
        wait_s = pace.min_interval_s * 2.0 ** min(self.failures, 64)
        return self.asked_s + min(wait_s, pace.most_interval_s)

    def age_s(self, now_s: float) -> float:
        """Age of the last answer; inf if there is none."""
        return now_s - self.answered_s

    def ask(self, now_s: float) -> "Track":
        """A query begins."""
        assert not self.in_flight
        return replace(self, in_flight=True, asked_s=now_s, owing=False)

    def answer(self) -> "Track":
        """The query under way was answered."""
        assert self.in_flight
        return replace(self, in_flight=False, answered_s=self.asked_s, failures=0, trouble="")

    def fail(self, trouble: str) -> "Track":
        """The query under way was not answered."""
        assert self.in_flight
        return replace(self, in_flight=False, failures=self.failures + 1, trouble=trouble)

    def change(self, now_s: float) -> "Track":
        """We have changed something, or may have."""
        return replace(self, changed_s=now_s, owing=True)
