"""Pure: nodes that live and cannot reach each other, and which of the two gives way.

A cable or a port that is bad one way, a wrong route, a firewall: everybody else reaches both, so neither is
lost, and ranks there wait for each other until the longest stall is over. Both daemons say so, each of its
own attempts, see `membership.watch.Membership.apart`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass
class PairReports:
    """The daemons' latest words on whom each cannot reach, though others see them."""

    _said: dict[int, tuple[frozenset[int], float]] = field(default_factory=dict)

    def say(self, node: int, others: Collection[int], now: float) -> None:
        """The daemon of `node` cannot reach these."""
        self._said[node] = frozenset(others), now

    def fresh(self, since: float) -> dict[int, frozenset[int]]:
        """Return what was said since then, by whom."""
        return {node: others for node, (others, at) in self._said.items() if at >= since}


def pairs(
    said: Mapping[int, frozenset[int]], nodes: Collection[int], hosts: Collection[int]
) -> set[tuple[int, int]]:
    """Return the pairs of `nodes`, the lower one first, that cannot reach each other by the word of both.

    At least one of the two is of `hosts`, which have ranks; the other one may hold its copies. One's word is
    enough where nothing of the other's comes: who is apart from the leader cannot tell it.
    """
    found: set[tuple[int, int]] = set()
    for one, others in said.items():
        for other in others:
            known = one in nodes and other in nodes and (one in hosts or other in hosts)
            if known and one in said.get(other, (one,)):
                found.add((min(one, other), max(one, other)))
    return found


def gives_way(found: Collection[tuple[int, int]], hosts: Collection[int], leader: int) -> int:
    """The node that is in most of the pairs; of several one without ranks, not the leader's, the highest."""
    count = Counter(node for pair in found for node in pair)
    return max(count, key=lambda node: (count[node], node not in hosts, node != leader, node))
