"""Pure: which node writes what of a step that is saved."""

from collections.abc import Mapping, Sequence

from ckptless.daemon.protocol.messages import Assignment, Holdings
from ckptless.daemon.protocol.model import Value

# What `ckptctl save` asks for lies so far ahead that every node hears of it in time.
LEAD_S = 2.0


class Task(Value, frozen=True, kw_only=True):
    """(shard or rank, node that writes it) of a step. The node that has the first shard's finishes it."""

    step: int
    shards: tuple[tuple[int, int], ...]
    records: tuple[tuple[int, int], ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the nodes that have something to write."""
        return tuple(sorted({node for _, node in (*self.shards, *self.records)}))

    def shards_of(self, node: int) -> tuple[int, ...]:
        """Return the shards that a node writes."""
        return tuple(shard for shard, where in self.shards if where == node)

    def records_of(self, node: int) -> tuple[int, ...]:
        """Return the records that a node writes."""
        return tuple(rank for rank, where in self.records if where == node)


def is_due(step: int, before: int, every: int) -> bool:
    """Whether a committed step is to be saved; `before`: the one committed before it; `every` 0: none is.

    The first from each multiple of `every` on, as not every step need be committed. All nodes find the same.
    """
    return bool(every and step) and (step % every == 0 or step // every > before // every)


def nodes_of(assignment: Assignment) -> tuple[int, ...]:
    """The nodes that write while the job runs: each writes of its own ranks, the first finishes."""
    return tuple(sorted({place.node for place in assignment.places}))


def own_shards(assignment: Assignment, node: int, shards: Mapping[int, int]) -> tuple[int, ...]:
    """Return, of the shards of a node's ranks (by rank), those that it writes: where the lowest twin is."""
    return tuple(sorted({s for s in shards.values() if assignment.places[s].node == node}))


def last_step(held: Mapping[int, Holdings], world_size: int) -> Task | None:
    """The newest step that these nodes (by number) have everything of, and who writes it; else None."""
    tasks = (_task_of(step, held, world_size) for step in sorted(_steps(held), reverse=True))
    return next((task for task in tasks if task is not None), None)


def newest_step(held: Mapping[int, Holdings]) -> int:
    """The newest step that these nodes (by number) have any record of; 0 where there is none."""
    return max(_steps(held), default=0)


def _steps(held: Mapping[int, Holdings]) -> set[int]:
    return {step for holdings in held.values() for _, _, some in holdings.records for step in some}


def _task_of(step: int, held: Mapping[int, Holdings], world_size: int) -> Task | None:
    """Return who writes what of this step, if these nodes have all of it.

    A shard is written by a node that has a record of one of its ranks, too: that describes the tensors.
    """
    records: dict[int, int] = {}
    shards: set[int] = set()
    writers: dict[int, int] = {}
    for node, holdings in sorted(held.items()):
        here = [(rank, shard) for rank, shard, steps in holdings.records if step in steps]
        for rank, shard in here:
            if rank < world_size:
                records.setdefault(rank, node)
                shards.add(shard)
        described = {shard for _, shard in here}
        for shard, steps in holdings.tensors:
            if step in steps and shard in described:
                writers.setdefault(shard, node)
    if len(records) < world_size or not shards <= writers.keys():
        return None
    return Task(
        step=step,
        shards=tuple((shard, writers[shard]) for shard in sorted(shards)),
        records=tuple(sorted(records.items())),
    )


def step_ahead(newest: Sequence[int], steps_per_s: float) -> int:
    """A step that every node can save when it is told now; `newest` are what they have committed.

    Where steps are fast it is one to come. Where they are slow it is the newest that all have, which is not
    written over before two more were made.
    """
    lead = int(steps_per_s * LEAD_S)
    return max(newest) + lead if lead else min(newest)
