"""Pure: which copies of the restored step are made again when a generation begins, and who gives them."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptless.daemon.api.messages import Assignment, NodeInfo
from ckptless.daemon.control.placement import holders, shard_holders


@dataclass(frozen=True)
class Remake:
    """Node `giver` gives the tensors of shard `number`, or the record of rank `number`, to nodes `takers`."""

    what: Literal["record", "tensors"]
    number: int
    giver: int
    takers: tuple[int, ...]


@dataclass(frozen=True)
class Copies:
    """How many there are to be, besides a shard's or a rank's own nodes; `domains` as in JobSpec."""

    count: int
    domains: tuple[str, ...] = ()

    def of_record(
        self, assignment: Assignment, rank: int, unreachable: Collection[int] = ()
    ) -> tuple[NodeInfo, ...]:
        """The nodes that are to hold a rank's record beside its own."""
        home = assignment.places[rank].node
        return holders(assignment.nodes, home, self.count, unreachable, self.domains)

    def of_tensors(
        self, assignment: Assignment, shard: int, unreachable: Collection[int] = ()
    ) -> tuple[NodeInfo, ...]:
        """The nodes that are to hold a shard's tensors beside those that have ranks of it."""
        home, twins = assignment.places[shard].node, twin_nodes(assignment, shard)
        count = self.beside(twins, frozenset(place.node for place in assignment.places))
        return shard_holders(assignment.nodes, home, count, twins, unreachable, self.domains)

    def beside(self, twins: frozenset[int], ranked: frozenset[int]) -> int:
        """Where every node with ranks has a shard, copies beside them could only outlive the whole job."""
        return 0 if twins == ranked and len(twins) > 1 else self.count


def twin_nodes(assignment: Assignment, shard: int) -> frozenset[int]:
    """The nodes that have ranks of a shard, as it was before this generation."""
    return frozenset(
        place.node for place, of in zip(assignment.places, assignment.shards, strict=True) if of == shard
    )


def remakes(assignment: Assignment, copies: Copies) -> tuple[Remake, ...]:
    """All that is to be given, so that the restored step is held as a new one would be.

    A node with ranks of a shard gets it for them anyway. The home of a shard or rank gives it where it has
    it, and otherwise whoever has been asked for the least until then.
    """
    if assignment.restore_step is None:
        return ()
    busy: Counter[int] = Counter()
    found: list[Remake] = []
    for shard in sorted(set(assignment.shards)):
        targets = copies.of_tensors(assignment, shard)
        have = assignment.holders_of(shard)
        if takers := _lacking(targets, have):
            giver = _giver(have, assignment.places[shard].node, busy)
            found.append(Remake("tensors", shard, giver, takers))
    for rank, place in enumerate(assignment.places):
        have = assignment.record_nodes[rank]
        if takers := _lacking(copies.of_record(assignment, rank), have):
            found.append(Remake("record", rank, _giver(have, place.node, busy), takers))
    return tuple(found)


def _lacking(targets: Sequence[NodeInfo], have: Collection[int]) -> tuple[int, ...]:
    return tuple(info.node for info in targets if info.node not in have) if have else ()


def _giver(have: Sequence[int], home: int, busy: Counter[int]) -> int:
    giver = home if home in have else min(have, key=lambda node: (busy[node], node))
    busy[giver] += 1
    return giver
