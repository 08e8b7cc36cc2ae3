"""Pure: how many late nodes a launcher is to start now, by what the job wants, and what became of others."""

from dataclasses import dataclass, field


@dataclass
class LateNodes:
    """The nodes that come while a job runs: `most` numbers are kept for them, from `first` on.

    One that was started and has ended without ever being up is replaced by another, under the next number.
    """

    first: int
    most: int
    _started: list[int] = field(default_factory=list)

    def missing(self, wanted: int, up: set[int], ended: set[int]) -> int:
        """Return how many to start: of `wanted` that should be there, those that neither came nor come."""
        failed = len(ended.intersection(self._started) - up)
        return max(0, min(wanted - len(self._started) + failed, self.most - len(self._started)))

    def start(self) -> int:
        """Take the next number."""
        number = self.first + len(self._started)
        self._started.append(number)
        return number
