"""Decides when to ask Slurm again, and what an answer is worth. Pure: time is handed in.

One `Track` per kind of question (all jobs, all nodes). The rules:

- one query at a time;
- queries begin at least `min_interval_s` apart, and further apart while they fail (doubled up to
  `most_interval_s`), however many readers there are and however fresh they want it;
- an answer is as old as the *beginning* of its query;
- after a change of our own, answers to older queries are not fresh, and one query may begin at once.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PollPace:
    """The pauses between questions to Slurm, in seconds."""

    min_interval_s: float = 1.0
    most_interval_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.min_interval_s <= self.most_interval_s < math.inf:
            raise ValueError("a pace takes 0 < min_interval_s <= most_interval_s")


class Track:
    """The latest question and answer. Times are seconds of one clock that never goes back; -inf is never.

    `asked_s` is the begin of the newest query, `answered_s` of the newest that was answered. `failures`
    counts queries without an answer since then; `trouble` says why the newest had none, "" if it had.
    """

    def __init__(self, pace: PollPace) -> None:
        self._pace = pace
        self.in_flight = False
        self.asked_s = self.answered_s = -math.inf
        self.failures = 0
        self.trouble = ""
        self._changed_s = -math.inf
        self._changed_since = False

    def fresh(self, oldest_s: float) -> bool:
        """Whether the last answer's query began at `oldest_s` or later, and after our own changes."""
        return self.answered_s > self._changed_s and self.answered_s >= oldest_s

    @property
    def next_s(self) -> float:
        """The earliest time of the next query."""
        if self.failures == 0 and self._changed_since:
            return -math.inf
        # The exponent is bounded, or it would overflow after a thousand failures.
        wait_s = self._pace.min_interval_s * 2.0 ** min(self.failures, 64)
        return self.asked_s + min(wait_s, self._pace.most_interval_s)

    def begin(self, now_s: float) -> None:
        """A query begins."""
        assert not self.in_flight
        self.in_flight, self.asked_s, self._changed_since = True, now_s, False

    def end(self, trouble: str = "") -> None:
        """The query under way was answered, or not: `trouble`."""
        assert self.in_flight
        self.in_flight, self.trouble = False, trouble
        if trouble:
            self.failures += 1
        else:
            self.failures, self.answered_s = 0, self.asked_s

    def change(self, now_s: float) -> None:
        """We have changed something, or may have."""
        self._changed_s, self._changed_since = now_s, True
