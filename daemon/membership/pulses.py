"""Pure: who of the voters is alive, for daemons that have no connection to them.

Every beat carries the newest sign of life that is known of each voter; the newer one is kept and goes on with
the next beat, so that it is everywhere after a few. What a daemon has seen grow lately it hears.
"""

from dataclasses import dataclass, field

# More than the voters of two decrees: what else a beat brings is not kept.
MOST = 32


@dataclass
class Pulses:
    """Of the daemon of node `me`."""

    me: int
    _newest: dict[int, int] = field(default_factory=dict)
    _seen: dict[int, float] = field(default_factory=dict)

    def beat(self, voters: tuple[int, ...], now: float) -> tuple[tuple[int, int], ...]:
        """What the next beat carries; `now` in seconds of a clock that also grows from life to life."""
        if self.me in voters:
            self._newest[self.me] = max(int(now * 1000), self._newest.get(self.me, 0) + 1)
        for gone in self._newest.keys() - set(voters):
            del self._newest[gone]
            self._seen.pop(gone, None)
        return tuple(sorted(self._newest.items()))

    def hear(self, pulses: tuple[tuple[int, int], ...], now: float) -> list[int]:
        """What a beat has brought; of whom it was news."""
        news = [(node, pulse) for node, pulse in pulses[:MOST] if pulse > self._newest.get(node, 0)]
        for node, pulse in news:
            # Of itself: a former life of this daemon had a faster clock.
            self._newest[node], self._seen[node] = pulse, now
        return [node for node, _ in news]

    def seen_since(self, when: float) -> set[int]:
        """Voters that have given a new sign of life since then."""
        return {node for node, seen in self._seen.items() if seen > when}

    def fresh(self, now: float, within_s: float) -> frozenset[int]:
        """Voters that have given a new sign of life within so many seconds."""
        return frozenset(node for node, seen in self._seen.items() if now - seen <= within_s)
