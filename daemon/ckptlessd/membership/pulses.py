"""Pure: whether the voters and the leader are alive, for daemons that have no connection to them.

Every beat carries the newest sign of life that is known of each of these, and how long ago the first who saw
it did; the newer one is kept and goes on with the next beat, so that it is everywhere after a few. What a
daemon has seen grow lately it hears. Without its age an old sign would pass for a new one where none came
before.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from ckptless.daemon.protocol.peers.membership import Pulse

# More than the voters of two decrees, and two leaders: what else a beat brings is not kept.
MOST = 32


@dataclass
class Pulses:
    """The newest signs of life, as the daemon of node `me` knows them."""

    me: int
    # 0 of whoever has given none.
    _newest: Counter[int] = field(default_factory=Counter)
    _seen: dict[int, float] = field(default_factory=dict)
    _doubted: dict[int, int] = field(default_factory=dict)
    # How far a former life's clock was ahead of this one: it goes on from there, as fast as time does.
    _ahead_ms: int = 0

    def beat(self, nodes: Collection[int], now: float) -> tuple[Pulse, ...]:
        """Return what the next beat carries of these; `now` in s of a clock that grows over all lives.

        A leader may be no voter: its disk takes no votes any more.
        """
        if self.me in nodes:
            self._newest[self.me] = max(self.clock_ms(now), self._newest[self.me] + 1)
        for gone in self._newest.keys() - set(nodes):
            del self._newest[gone]
            self._seen.pop(gone, None)
        return tuple((node, pulse, self._age_ms(node, now)) for node, pulse in sorted(self._newest.items()))

    def clock_ms(self, now: float) -> int:
        """Return this daemon's clock in ms; no less than a former life of it has said."""
        return max(int(now * 1000) + self._ahead_ms, self._newest[self.me])

    def _age_ms(self, node: int, now: float) -> int:
        return 0 if node == self.me else int((now - self._seen[node]) * 1000)

    def hear(self, pulses: tuple[Pulse, ...], now: float) -> list[Pulse]:
        """Take what a beat has brought; return what of it was news."""
        news = [(node, pulse, age_ms) for node, pulse, age_ms in pulses[:MOST] if pulse > self._newest[node]]
        for node, pulse, age_ms in news:
            if node == self.me:  # a former life of this daemon had a faster clock
                self._ahead_ms = max(self._ahead_ms, pulse - int(now * 1000))
            self._newest[node] = pulse
            self._seen[node] = max(now - max(0, age_ms) / 1000, self._seen.get(node, float("-inf")))
        return news

    def doubt(self, node: int, margin_s: float) -> None:
        """A connection to it has ended: a sign of life is only what it does so long after what is known."""
        if node in self._newest:
            self._doubted[node] = self._newest[node] + int(margin_s * 1000)

    def _is_sure(self, node: int) -> bool:
        return node not in self._doubted or self._newest[node] > self._doubted[node]

    def seen_since(self, when: float) -> set[int]:
        """Nodes that have given a new sign of life since then."""
        return {node for node, seen in self._seen.items() if seen > when and self._is_sure(node)}

    def fresh(self, now: float, within_s: float) -> frozenset[int]:
        """Nodes that have given a new sign of life within so many seconds."""
        recent = (node for node, seen in self._seen.items() if now - seen <= within_s)
        return frozenset(node for node in recent if self._is_sure(node))
