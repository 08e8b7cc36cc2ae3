"""Pure: which daemons of a job have connections to each other, whatever their number.

Few nodes: each to each. More: the nodes stand on four rings, each in another order that follows from the
job's name, and each node keeps to the next one on both sides of every ring. So a node has at most eight
neighbours; a rack that dies takes no other node's neighbours all at once; and news gets to everybody in about
log(nodes) hops, since a union of random rings is an expander (Friedman, A proof of Alon's second eigenvalue
conjecture, 2003; Law and Siu, Distributed construction of random expander networks, 2003).
"""

from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b

RINGS = 4
DEGREE = 2 * RINGS
# So many nodes in a row on a ring may be away before a node has no neighbour any more on that side.
REACH = 32


class Overlay:
    """The graph of one job. Every daemon computes the same one."""

    def __init__(self, job: str, nodes: tuple[int, ...]) -> None:
        self.nodes = nodes
        self.complete = len(nodes) <= DEGREE + 1
        self._rings = [_ring(job, number, nodes) for number in range(RINGS)]
        self._places = [{node: place for place, node in enumerate(ring)} for ring in self._rings]

    def neighbours(self, me: int, away: Collection[int] = ()) -> frozenset[int]:
        """Return the nodes that `me` keeps a connection to, past those that it knows to be away."""
        if self.complete:
            return frozenset(self.nodes) - {me}
        found: set[int] = set()
        for ring, places in zip(self._rings, self._places, strict=True):
            for step in (1, -1):
                around = (ring[(places[me] + step * hop) % len(ring)] for hop in range(1, REACH + 1))
                found.update(next(([node] for node in around if node not in away), []))
        return frozenset(found) - {me}


def _ring(job: str, number: int, nodes: tuple[int, ...]) -> list[int]:
    def place(node: int) -> bytes:
        return blake2b(f"{job}:{number}:{node}".encode(), digest_size=16).digest()

    return sorted(nodes, key=place)


@lru_cache(maxsize=64)
def overlay(job: str, nodes: tuple[int, ...]) -> Overlay:
    """The job's graph, computed once."""
    return Overlay(job, nodes)
