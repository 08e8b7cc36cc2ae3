"""Pure: whether a node hears enough of its job's nodes to decide anything, and to let its ranks live.

Whoever hears at least half of the nodes that it knew to live goes on, and takes what it then finds lost as
lost. Whoever hears fewer may be the one that is cut off: for it nothing changes any more but the time.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass
class Lease:
    """`base`: the living nodes when this one last heard at least half of them; `since`: when it did not."""

    base: frozenset[int]
    since: float | None = None

    def renew(
        self, heard: Collection[int], living: Collection[int], ended: Collection[int], now: float
    ) -> None:
        """What is known at `now` (seconds). `ended`: nodes whose agents have certainly ended."""
        base = self.base - frozenset(ended)
        if 2 * len(base.intersection(heard)) >= len(base):
            self.base, self.since = frozenset(living), None
        elif self.since is None:
            self.since = now

    @property
    def held(self) -> bool:
        """Whether this node may decide."""
        return self.since is None

    def away_s(self, now: float) -> float:
        """For how long it has not heard enough; 0.0 while it does."""
        return 0.0 if self.since is None else now - self.since
