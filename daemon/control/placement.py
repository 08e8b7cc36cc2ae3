"""Pure: which nodes hold the records of a node's ranks, and the tensors of a shard."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.control.domains import domain_of


def holders(
    nodes: Sequence[NodeInfo],
    me: int,
    copies: int,
    unreachable: Collection[int] = (),
    domains: Sequence[str] = (),
) -> tuple[NodeInfo, ...]:
    """The next `copies` reachable nodes after `me` on a ring; fewer where there are fewer.

    Nodes of other failure domains come before those of the own one. The ring takes the domains in turn, so
    that each node holds for about as many others as they for it, and two holders are in two domains where
    they can be; where no domains are known it is the ring of node ids. Spares hold too: they have memory and
    nothing else to do.
    """
    turns = _turns({*(info.node for info in nodes), me}, domains)
    ring = sorted(nodes, key=lambda info: (turns[info.node] <= turns[me], turns[info.node]))
    others = [info for info in ring if info.node != me and info.node not in unreachable]
    mine = domain_of(domains, me)
    others.sort(key=lambda info: domain_of(domains, info.node) == mine)
    return tuple(others[:copies])


def shard_holders(
    nodes: Sequence[NodeInfo],
    me: int,
    copies: int,
    twins: Collection[int],
    unreachable: Collection[int] = (),
    domains: Sequence[str] = (),
) -> tuple[NodeInfo, ...]:
    """To whom node `me` gives a shard's tensors, which the nodes `twins` (`me` among them) have anyway.

    So that `copies` other nodes have it: twins count. Where all twins are in one failure domain, and there is
    another, at least one in that.
    """
    away = {*unreachable, *twins}
    others = holders(nodes, me, len(nodes), away, domains)
    missing = max(0, copies - (len(twins) - 1))
    alone = len({domain_of(domains, node) for node in twins}) == 1
    elsewhere = bool(others) and domain_of(domains, others[0].node) != domain_of(domains, me)
    if not missing and alone and elsewhere and any(domains):
        missing = 1
    return others[:missing]


def _turns(nodes: Iterable[int], domains: Sequence[str]) -> dict[int, tuple[int, int]]:
    """Places on the ring: the first node of every domain, then the second of every domain, and so on."""
    seen: Counter[str] = Counter()
    turns: dict[int, tuple[int, int]] = {}
    for node in sorted(nodes):
        domain = domain_of(domains, node)
        turns[node] = (seen[domain], node)
        seen[domain] += 1
    return turns
