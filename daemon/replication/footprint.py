"""Pure: the memory that versions take on a job's nodes, and the bytes that each commit sends between them.

Wherever a shard is, as its ranks' own or as a replica, it has `SLOTS` slots. Who holds what is asked of those
who decide it in a job (`re_replication.Holders`). Records are small, and are not counted;
nor is it taken off that a commit need not send what its holder has already.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from ckptless.daemon.protocol.messages import Assignment, NodeInfo, Place
from ckptless.daemon.protocol.version import SLOTS, slot_nbytes
from ckptless.daemon.replication.re_replication import Holders


class Load(NamedTuple):
    """Numbers of shards: those of a node's ranks, those that it holds for others, copies that it sends."""

    own: int = 0
    held: int = 0
    sent: int = 0

    @property
    def slots(self) -> int:
        """The slots that the node has for all of them."""
        return SLOTS * (self.own + self.held)


def loads(to: Holders) -> dict[int, Load]:
    """Return the load of every node, spares too, where `to.assignment` says which rank has which shard."""
    assignment = to.assignment
    own: defaultdict[int, set[int]] = defaultdict(set)
    for place, shard in zip(assignment.places, assignment.shards, strict=True):
        own[place.node].add(shard)
    held, sent = Counter[int](), Counter[int]()
    for shard in set(assignment.shards):
        takers = [info.node for info in to.of_tensors(shard)]
        held.update(takers)
        sent[assignment.places[shard].node] += len(takers)
    nodes = [info.node for info in assignment.nodes]
    return {node: Load(len(own[node]), held[node], sent[node]) for node in nodes}


def held_by(node: int, to: Holders) -> tuple[int, ...]:
    """Return the shards that a node holds for others, where `to.assignment` says which rank has which."""
    shards = sorted(set(to.assignment.shards))
    return tuple(shard for shard in shards if any(info.node == node for info in to.of_tensors(shard)))


def shards_like(twins: Sequence[int], ranks: int) -> tuple[int, ...] | None:
    """Return each rank's shard where all have twins as these ranks are; None where they are of no mesh.

    That is: a DeviceMesh with one dimension of replicas, whichever its place is.
    """
    alike = sorted(set(twins))
    count, first = len(alike), alike[0]
    stride = alike[1] - first if count > 1 else 1
    if ranks % (stride * count) or alike != list(range(first, first + stride * count, stride)):
        return None
    found = tuple(rank - stride * (rank // stride % count) for rank in range(ranks))
    return found if found[first] == first else None


@dataclass(frozen=True)
class Shape:
    """A job that is planned: `shard_ranks` ranks share a whole state, the same for each of its replicas.

    That is all of them with FSDP2, one with DDP, what a mesh says with HSDP. `copies` is how many other nodes
    are to hold each shard. `state_nbytes` are those of the whole state once.
    """

    ranks: int
    per_node: int
    shard_ranks: int
    copies: int
    state_nbytes: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.per_node

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the largest shard."""
        return -(-self.state_nbytes // self.shard_ranks)

    @cached_property
    def _holders(self) -> Holders:
        """The nodes that are to hold each shard."""
        place = lambda rank: Place(node=rank // self.per_node, slot=rank % self.per_node)  # noqa: E731
        info = lambda node: NodeInfo(node=node, name="", address="", agent_port=0)  # noqa: E731
        shards = shards_like(range(0, self.ranks, self.shard_ranks), self.ranks)
        assert shards is not None  # the shards of a mesh
        assignment = Assignment(
            job="plan",
            generation=1,
            term=0,
            leader=0,
            places=tuple(map(place, range(self.ranks))),
            nodes=tuple(map(info, range(self.nodes))),
            restore_step=None,
            shards=shards,
        )
        return Holders(assignment, self.copies)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The load of each node."""
        return tuple(loads(self._holders).values())

    @property
    def together(self) -> set[frozenset[int]]:
        """The sets of nodes of which each has all copies of some shard."""
        to = self._holders
        homes = {shard: to.twins(shard) for shard in range(self.shard_ranks)}
        return {frozenset(own | {info.node for info in to.of_tensors(shard)}) for shard, own in homes.items()}

    @property
    def fullest(self) -> Load:
        """The load of the node that needs the most memory."""
        return max(self.loads, key=lambda load: load.slots)

    def memory_nbytes(self, shards: int) -> int:
        """Bytes that so many shards take on a node."""
        return SLOTS * slot_nbytes(self.shard_nbytes) * shards

    @property
    def node_nbytes(self) -> int:
        """Bytes of memory on the node that needs the most."""
        return self.memory_nbytes(self.fullest.own + self.fullest.held)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that leave the node that sends the most, at each commit."""
        return self.shard_nbytes * max(load.sent for load in self.loads)

    @property
    def received_nbytes(self) -> int:
        """Bytes that come to the node that gets the most, at each commit."""
        return self.shard_nbytes * max(load.held for load in self.loads)

    def commit_s(self, rate: float) -> float:
        """Seconds that a commit's copies are on their way, at so many bytes per second each way."""
        return max(self.sent_nbytes, self.received_nbytes) / rate


def shortest_cadence(commit_s: float, step_s: float) -> int:
    """Return the fewest steps between two commits of which none waits: a commit's copies come first."""
    return max(1, math.ceil(commit_s / step_s))


def needed(own: Iterable[int], replicas: Iterable[int]) -> tuple[int, int]:
    """Return the bytes of a node's own shards, and of its replicas: of these those known, 0 for the others.

    What is not there yet will be of the own ones' size: the least of them, as they need not be even.
    """
    mine = list(own)
    least = min(mine, default=0)
    return sum(mine), sum(max(known, least) for known in replicas)


def with_shards(assignment: Assignment, twins: Sequence[int]) -> Assignment | None:
    """Return an assignment as it will be, where all have twins as these ranks are; None: nobody knows."""
    shards = shards_like(twins, len(assignment.places))
    return None if shards is None else replace(assignment, shards=shards)
