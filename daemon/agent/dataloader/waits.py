"""The share of their time that readers of a ring have waited for batches. Pure."""

from collections import deque
from dataclasses import dataclass, field

# "Lately" is as long as so many words of a reader, each of a few batches.
WORDS = 16


@dataclass
class Waits:
    """The waits of the processes of one slot, as each of them has told; times are in seconds."""

    stream: int = 0
    taken: int = 0
    waits: int = 0
    waited_s: float = 0.0
    # When it told, and how long it had waited in all by then.
    _told: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WORDS + 1))

    def begin(self, now_s: float, stream: int) -> None:
        """Note that reading goes on somewhere. After a fault the time before does not count."""
        if stream == self.stream:
            self._told.clear()
        self.stream = stream
        if not self._told:
            self._told.append((now_s, self.waited_s))

    def add(self, now_s: float, taken: int, waits: int, waited_s: float) -> None:
        """Since it told last it has taken so many batches, and waited so often and so long."""
        self.taken += taken
        self.waits += waits
        self.waited_s += waited_s
        self._told.append((now_s, self.waited_s))

    @property
    def share(self) -> float | None:
        """The share of the time lately that it waited, 0 to 1; None where there has been none."""
        if len(self._told) < 2 or self._told[-1][0] <= self._told[0][0]:
            return None
        (begin_s, before_s), (end_s, after_s) = self._told[0], self._told[-1]
        return min(1.0, (after_s - before_s) / (end_s - begin_s))
