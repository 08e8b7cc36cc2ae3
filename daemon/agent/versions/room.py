"""Whether this node has the memory for the versions of its ranks, and for the replicas that it is to hold."""

from collections.abc import Callable, Sequence

from ckptless.daemon.agent.free_memory import FreeMemory, free_memory
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.protocol.limits import size_text
from ckptless.daemon.protocol.messages import Assignment
from ckptless.daemon.replication.footprint import held_by, needed, with_shards
from ckptless.daemon.replication.re_replication import Holders


class Room:
    """Owned by the agent's event loop. `free` says what memory is left.

    `node` is this one, the number and the name; `copies` and `domains` say who holds what, as in `Replicas`.
    """

    def __init__(
        self,
        node: tuple[int, str],
        store: VersionStore,
        copies: int,
        domains: tuple[str, ...] = (),
        free: Callable[[], FreeMemory | None] = free_memory,
    ) -> None:
        (self._node, self._name), self._store, self._free = node, store, free
        self._copies, self._domains = copies, domains
        self._assignment: Assignment | None = None
        # Of the shards that ranks here have: all ranks of each.
        self._twins: dict[int, tuple[int, ...]] = {}
        # The shards that this node is to hold for others, as far as those twins tell.
        self._held: tuple[int, ...] | None = None

    def follow(self, assignment: Assignment) -> None:
        """A new generation."""
        self._assignment, self._held = assignment, None
        self._twins.clear()

    def share(self, shard: int, ranks: Sequence[int]) -> None:
        """A rank of this node has a shard, as all of these have."""
        self._twins[shard] = tuple(ranks)

    def refusal(self, shard: int, nbytes: int) -> str | None:
        """Return why a rank's shard cannot have so many bytes; None where it can.

        What this node is to hold for others is counted as well, there or not. Memory that was touched has
        been paid for.
        """
        free = self._free()
        if free is None:
            return None
        if self._held is None:
            self._held = self._to_hold(shard)
        others = [self._store.newest_nbytes(other) for other in self._twins if other != shard]
        own_nbytes, held_nbytes = needed(
            [nbytes, *filter(None, others)], map(self._store.newest_nbytes, self._held)
        )
        there_nbytes = self._store.touched_nbytes
        if own_nbytes + held_nbytes - there_nbytes <= free.nbytes:
            return None
        replicas = f" and {size_text(held_nbytes)} for replicas of others" if held_nbytes else ""
        fewer = f"take fewer replicas (--replicas, now {self._copies}), " if held_nbytes else ""
        return (
            f"{self._name} has too little memory for the state: versions of its own ranks take "
            f"{size_text(own_nbytes)}{replicas}, {size_text(there_nbytes)} of it are there, and "
            f"{free.whose} has {size_text(free.nbytes)} left: {fewer}shard the state over more nodes, or "
            "give the job more memory"
        )

    def _to_hold(self, shard: int) -> tuple[int, ...]:
        assert self._assignment is not None
        as_it_will_be = with_shards(self._assignment, self._twins[shard])
        if as_it_will_be is None:
            return ()
        return held_by(self._node, Holders(as_it_will_be, self._copies, self._domains))
