"""Pure: who is to hold what in a generation; which copies are made again when it begins, and by whom."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptless.daemon.api.messages import Assignment, NodeInfo
from ckptless.daemon.control.placement import Ring


@dataclass(frozen=True)
class Remake:
    """A node gives the tensors of shard `number`, or the record of rank `number`, to nodes `takers`."""

    what: Literal["record", "tensors"]
    number: int
    takers: tuple[int, ...]


@dataclass(frozen=True)
class Copies:
    """How many there are to be, besides a shard's or a rank's own nodes; `domains` as in JobSpec."""

    count: int
    domains: tuple[str, ...] = ()


class Holders:
    """Who is to hold what in the generation of `assignment`; made once for it."""

    def __init__(self, assignment: Assignment, copies: Copies) -> None:
        self.assignment, self._count = assignment, copies.count
        self._ring = Ring(assignment.nodes, copies.domains)
        self._ranked = assignment.ranks_by_node.keys()
        # Of each shard the nodes of those ranks that it is not named after: none where there are no twins.
        self._twins: dict[int, set[int]] = {}
        for rank, shard in enumerate(assignment.shards):
            if shard != rank:
                self._twins.setdefault(shard, set()).add(assignment.places[rank].node)

    def twins(self, shard: int) -> set[int]:
        """The nodes that have ranks of a shard, as it was before this generation."""
        shards = self.assignment.shards
        named = shard < len(shards) and shards[shard] == shard
        return self._twins.get(shard, set()) | ({self.assignment.places[shard].node} if named else set())

    def of_node(self, node: int, unreachable: Collection[int] = ()) -> tuple[NodeInfo, ...]:
        """The nodes that are to hold the records of a node's ranks beside it."""
        return self._ring.holders(node, self._count, unreachable)

    def of_record(self, rank: int, unreachable: Collection[int] = ()) -> tuple[NodeInfo, ...]:
        """The nodes that are to hold a rank's record beside its own."""
        return self.of_node(self.assignment.places[rank].node, unreachable)

    def of_tensors(self, shard: int, unreachable: Collection[int] = ()) -> tuple[NodeInfo, ...]:
        """The nodes that are to hold a shard's tensors beside those that have ranks of it."""
        return self.of_shared(self.assignment.places[shard].node, self.twins(shard), unreachable)

    def of_shared(
        self, home: int, twins: Collection[int], unreachable: Collection[int] = ()
    ) -> tuple[NodeInfo, ...]:
        """The same of the shard that node `home` gives, which `twins` have."""
        # Where every node with ranks has a shard, copies beside them could only outlive the whole job.
        everywhere = len(twins) > 1 and self._ranked == set(twins)
        return self._ring.shard_holders(home, 0 if everywhere else self._count, twins, unreachable)


def remakes(of: Holders, me: int) -> tuple[Remake, ...]:
    """What node `me` is to give, so that the restored step is held as a new one would be.

    A node with ranks of a shard gets it for them anyway. The home of a shard or rank gives it where it has
    it, and otherwise one of those that have it, in turn. Every node finds out its own part alone.
    """
    return tuple(_remakes(of, me))


def _remakes(of: Holders, me: int) -> Iterator[Remake]:
    places = of.assignment.places
    for shard, have in of.assignment.tensor_nodes:
        gives = me in have and _giver(have, places[shard].node, shard) == me
        if gives and (takers := _lacking(of.of_tensors(shard), have)):
            yield Remake("tensors", shard, takers)
    for rank, have in enumerate(of.assignment.record_nodes):
        gives = me in have and _giver(have, places[rank].node, rank) == me
        if gives and (takers := _lacking(of.of_record(rank), have)):
            yield Remake("record", rank, takers)


def _lacking(targets: Sequence[NodeInfo], have: Collection[int]) -> tuple[int, ...]:
    return tuple(info.node for info in targets if info.node not in have)


def _giver(have: Sequence[int], home: int, number: int) -> int:
    return home if home in have else have[number % len(have)]
