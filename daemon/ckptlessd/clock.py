"""The daemon's clock: Unix time that never jumps."""

import time


class Clock:
    """Seconds since the Unix epoch, as they were at the start, carried on by the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds; differences are exact durations whatever happens to the system's clock."""
        return time.monotonic() + self._offset
