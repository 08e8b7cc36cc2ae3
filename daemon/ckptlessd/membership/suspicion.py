"""Pure: how long a silent node is only suspected, and how much a daemon trusts its own senses.

After Dadgar, Phillips and Currey, Lifeguard: local health awareness for more accurate failure detection
(2018), as in hashicorp/memberlist `suspicion.go` and `awareness.go`.
"""

from dataclasses import dataclass, field
from math import log

# Without anybody who says the same, a suspicion takes so many times as long.
ALONE_FACTOR = 3.0
# A daemon that gets no CPU takes so many times as long, at most, to accuse anybody.
WORST = 8
# After so many seconds without a complaint it trusts itself a little more.
BETTER_AFTER_S = 1.0


def suspicion_s(shortest_s: float, confirmed: int, asked: int) -> float:
    """Seconds from the last sign of life to the verdict, where `confirmed` of `asked` others say the same."""
    longest_s = ALONE_FACTOR * shortest_s
    if not asked:
        return longest_s
    if confirmed >= asked:
        return shortest_s
    return longest_s - (longest_s - shortest_s) * log(confirmed + 1) / log(asked + 1)


@dataclass
class LocalHealth:
    """The health of this daemon: 0 is sound; each point makes it wait once more as long before it accuses."""

    score: int = 0
    _since: float = 0.0

    @property
    def factor(self) -> int:
        """The factor for timeouts."""
        return 1 + self.score

    def worse(self, now: float, points: int = 1) -> None:
        """Trust this daemon less: it was late itself, or has accused a node that lives."""
        self.score, self._since = min(WORST, self.score + points), now

    def on_time(self, now: float) -> None:
        """Trust this daemon more: there is nothing to complain of."""
        if self.score and now - self._since >= BETTER_AFTER_S:
            self.score, self._since = self.score - 1, now


@dataclass
class Suspicion:
    """The suspicion that a node is dark. `asked`: who was asked last, at `asked_at`.

    `confirmed`: who hears nothing of it either. `since`: when somebody was asked first.
    """

    asked: frozenset[int]
    asked_at: float
    confirmed: set[int] = field(default_factory=set)
    since: float = 0.0
