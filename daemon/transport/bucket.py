"""A token bucket, which says how fast something may be sent and knows no clock."""


class TokenBucket:
    """`rate` tokens a second; it keeps up to `burst`, and may go into debt, for which the next ones wait."""

    def __init__(self, rate: float, burst: float) -> None:
        if rate <= 0 or burst < 0:
            raise ValueError(f"a bucket of {rate} a second, {burst} at once")
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, float("-inf")

    def take(self, count: float, now: float) -> float:
        """Seconds to wait before what `count` tokens are for; they are counted as taken from now on."""
        self._fill(now)
        self._level -= count
        return max(0.0, -self._level / self._rate)

    def spend(self, count: float, now: float) -> bool:
        """Take `count` tokens where there are so many, and say whether there were."""
        self._fill(now)
        if self._level < count:
            return False
        self._level -= count
        return True

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._at)
        self._at = max(self._at, now)
        self._level = min(self._burst, self._level + passed * self._rate)
