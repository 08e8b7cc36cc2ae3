"""Pure: which nodes hold the records of a node's ranks."""

from collections.abc import Collection, Sequence

from ckptless.daemon.api.messages import NodeInfo


def holders(
    nodes: Sequence[NodeInfo], me: int, copies: int, unreachable: Collection[int] = ()
) -> tuple[NodeInfo, ...]:
    """The next `copies` reachable nodes after `me` on the ring of node ids; fewer where there are fewer.

    Spares hold too: they have memory and nothing else to do.
    """
    ring = sorted(nodes, key=lambda info: (info.node <= me, info.node))
    others = [info for info in ring if info.node != me and info.node not in unreachable]
    return tuple(others[:copies])
