"""A point in time by which something must be done, handed down through calls."""

import time


class Deadline:
    """`within_s` seconds from its making."""

    def __init__(self, within_s: float) -> None:
        self._at_s = time.monotonic() + within_s

    @property
    def left_s(self) -> float:
        """Seconds until then, 0.0 from then on."""
        return max(0.0, self._at_s - time.monotonic())
