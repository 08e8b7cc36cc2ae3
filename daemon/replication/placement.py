"""Pure: which nodes hold the records of a node's ranks, and the tensors of a shard."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from ckptless.daemon.protocol.messages import NodeInfo
from ckptless.daemon.replication.failure_domains import domain_of


class PlacementRing:
    """The nodes of a generation in a circle; made once, since it takes all of them to make it.

    It takes the failure domains in turn, so that each node holds for about as many others as they for it, and
    two holders are in two domains where they can be; where no domains are known it is the ring of node ids.
    Spares hold too: they have memory and nothing else to do.
    """

    def __init__(self, nodes: Iterable[NodeInfo], domains: Sequence[str] = ()) -> None:
        self._domains, self._has_domains = domains, any(domains)
        infos = {info.node: info for info in nodes}
        turns = _turns(infos, domains)
        self._ring = [infos[node] for node in sorted(infos, key=lambda node: (turns[node], node))]
        self._at = {info.node: at for at, info in enumerate(self._ring)}

    def holders(self, me: int, copies: int, unreachable: Collection[int] = ()) -> tuple[NodeInfo, ...]:
        """The next `copies` reachable nodes after `me`; fewer where there are fewer.

        Nodes of other failure domains come before those of the own one.
        """
        found: list[NodeInfo] = []
        near: list[NodeInfo] = []
        mine = domain_of(self._domains, me)
        for info in self._after(me) if copies else ():
            if info.node not in unreachable:
                (near if domain_of(self._domains, info.node) == mine else found).append(info)
                if len(found) == copies:
                    break
        return (*found, *near)[:copies]

    def shard_holders(
        self, me: int, copies: int, twins: Collection[int], unreachable: Collection[int] = ()
    ) -> tuple[NodeInfo, ...]:
        """Return the nodes that `me` gives a shard's tensors, which `twins` (`me` too) have anyway.

        So that `copies` other nodes have it: twins count. Where all twins are in one failure domain, and
        there is another, at least one in that.
        """
        away = {*unreachable, *twins}
        missing = max(0, copies - (len(twins) - 1))
        if missing or not self._has_domains:
            return self.holders(me, missing, away)
        if len({domain_of(self._domains, node) for node in twins}) > 1:
            return ()
        mine = domain_of(self._domains, me)
        return tuple(i for i in self.holders(me, 1, away) if domain_of(self._domains, i.node) != mine)

    def _after(self, me: int) -> Iterator[NodeInfo]:
        """All others, from the one after `me` on."""
        begin = self._at.get(me, -1) + 1
        for at in range(begin, begin + len(self._ring)):
            info = self._ring[at % len(self._ring)]
            if info.node != me:
                yield info


def _turns(nodes: Iterable[int], domains: Sequence[str]) -> dict[int, int]:
    """Places on the ring: the first node of every domain, then the second of every domain, and so on."""
    turn: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    return {node: next(turn[domain_of(domains, node)]) for node in sorted(nodes)}
