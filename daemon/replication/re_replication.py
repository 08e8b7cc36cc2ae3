"""Pure: who is to hold what in a generation; which replicas are made again when it begins, and by whom.

And which are garbage: what a node holds and need not is given back once the watermark has passed it. It is
never missed: whichever nodes are lost after it, up to as many as there are replicas, the newest step of which
everything is left is what it would have been without giving anything back.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptless.daemon.protocol.messages import Assignment, NodeInfo
from ckptless.daemon.replication.placement import PlacementRing
from ckptless.daemon.replication.protection import Item

# A rank commits a step when all who are to hold its commit before have that. And its update took gradients of
# all, so all have begun to commit the step before. So when a third new step is committed anywhere, the first
# of the three is held by all who are to hold it.
HELD_AFTER = 3

# What of, its number, and the nodes that have it.
Had: TypeAlias = tuple[Literal["tensors", "record"], int, Sequence[int]]


@dataclass(frozen=True)
class Remake:
    """A node gives the tensors of a shard, or the record of a rank, to nodes `takers`."""

    item: Item
    takers: tuple[int, ...]


class Holders:
    """The nodes that are to hold each item in the generation of `assignment`; made once for it.

    `copies`: how many there are to be, besides a shard's or a rank's own nodes; `domains` as in JobSpec.
    """

    def __init__(self, assignment: Assignment, copies: int, domains: tuple[str, ...] = ()) -> None:
        self.assignment, self._copies = assignment, copies
        self._ring = PlacementRing(assignment.nodes, domains)
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
        return self._ring.holders(node, self._copies, unreachable)

    def targets(self, item: Item, unreachable: Collection[int] = ()) -> tuple[NodeInfo, ...]:
        """The nodes that are to hold an item beside those whose ranks have it."""
        of = self.of_record if item.kind == "record" else self.of_tensors
        return of(item.number, unreachable)

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
        return self._ring.shard_holders(home, 0 if everywhere else self._copies, twins, unreachable)


def moves(of: Holders, ahead: Assignment) -> dict[int, NodeInfo]:
    """Return the ranks that are on other nodes in `ahead`, of as many ranks, and on which."""
    infos = {info.node: info for info in of.assignment.nodes}
    now = of.assignment.places
    return {
        rank: infos[place.node]
        for rank, (place, before) in enumerate(zip(ahead.places, now, strict=True))
        if place.node != before.node and place.node in infos
    }


def remakes(of: Holders, me: int) -> tuple[Remake, ...]:
    """Return what node `me` is to give, so that the restored step is held as a new one would be.

    A node with ranks of a shard gets it for them anyway. The home of a shard or rank gives it where it has
    it, and otherwise one of those that have it, in turn. Every node finds out its own part alone.
    """
    held: Iterable[Had] = itertools.chain(
        (("tensors", shard, have) for shard, have in of.assignment.tensor_nodes),
        (("record", rank, have) for rank, have in enumerate(of.assignment.record_nodes)),
    )
    found: list[Remake] = []
    for what, number, have in held:
        if me in have and _giver(have, of.assignment.places[number].node, number) == me:
            item = Item(what, number)
            if takers := tuple(info.node for info in of.targets(item) if info.node not in have):
                found.append(Remake(item, takers))
    return tuple(found)


def _giver(have: Sequence[int], home: int, number: int) -> int:
    return home if home in have else have[number % len(have)]


def surplus(to: Holders, node: int, here: Collection[Item]) -> tuple[Item, ...]:
    """Return what of all that is `here`, on `node`, has another place in this generation."""
    if to.assignment.restore_step is None or to.assignment.former is not None:
        # What is here then was given in this generation, and who has twins nobody has told.
        return ()
    return tuple(item for item in sorted(here) if not _belongs(to, node, item))


def _belongs(to: Holders, node: int, item: Item) -> bool:
    if item.number >= len(to.assignment.places):
        return True  # nobody knows of it, so nobody can tell that it is held elsewhere
    own = {to.assignment.places[item.number].node}
    if item.kind == "tensors":
        own |= to.twins(item.number)
    return node in own or any(info.node == node for info in to.targets(item))


class Watermark:
    """The newest step that all who are to hold it have, as one node knows it by the commits that it sees.

    Of one generation, which goes on from `restore_step`; commits are those of its ranks, and those that other
    nodes give it records of.
    """

    def __init__(self, restore_step: int | None) -> None:
        self._restore_step = restore_step or 0
        self._seen: list[int] = []

    @property
    def step(self) -> int | None:
        """The watermark; None where none is known yet."""
        return self._seen[0] if len(self._seen) == HELD_AFTER else None

    def saw_commit(self, step: int) -> bool:
        """Note that a rank has committed a step; whether the watermark has moved."""
        if step <= self._restore_step or step in self._seen:
            return False
        before = self.step
        self._seen = sorted([*self._seen, step])[-HELD_AFTER:]
        return self.step != before

    def passed(self, newest: int | None) -> bool:
        """Whether what has nothing newer than `newest` is not asked for any more."""
        return self.step is not None and (newest is None or newest < self.step)
