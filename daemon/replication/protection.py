"""Pure: of what agents have told that they hold, what can be restored, and which failures would lose it.

Every rank needs its own record and its shard's tensors. Each is an *item* here, and has *copies* on nodes.
Nothing is asked about pairs of nodes: an item is lost to exactly those failures that take all of its copies,
so that those of one or two nodes can be read off the items that have so few.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ckptless.daemon.protocol.records import HoldingRecord

# A holder that does not come along any more keeps what it has. One that does is never further behind than
# this, in steps of the same node's other copies, ...
KEPT_STEPS = 3
# ... or as what it holds is told and written once in a while, in seconds behind who was heard of last.
LAG_S = 5.0
# Of more nodes, what each holds is told more seldom: see recovery/snapshots.py.
FEW_NODES = 64


class Item(NamedTuple):
    """The tensors of a shard, or the record of a rank."""

    kind: Literal["tensors", "record"]
    number: int


class HeldCopy(NamedTuple):
    """One node's copy of an item; `nbytes` of all these steps. `old`: it does not come along any more."""

    node: int
    steps: tuple[int, ...]
    nbytes: int
    old: bool = False

    @property
    def step(self) -> int:
        """The newest."""
        return self.steps[-1]


@dataclass(frozen=True)
class Exposure:
    """The items that one node's failure would lose, and those that it takes two for.

    `gone`: those that nobody holds.
    """

    gone: tuple[Item, ...] = ()
    one: Mapping[int, tuple[Item, ...]] = field(default_factory=dict)
    two: Mapping[tuple[int, int], tuple[Item, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Protection:
    """A job's protection against losses. `ranks`: the ranks of each shard, as far as they are known.

    `step`: the newest step that everything can be restored at, the watermark; `after[k]`: the same once any k
    nodes have failed, whichever would be worst. None where something is held by nobody (any more).
    """

    items: Mapping[Item, tuple[HeldCopy, ...]]
    ranks: Mapping[int, tuple[int, ...]]
    after: tuple[int | None, int | None, int | None]
    exposure: Exposure

    @property
    def step(self) -> int | None:
        """The watermark."""
        return self.after[0]


def protection(
    holdings: Iterable[HoldingRecord], lost: Collection[int], world_size: int, nodes: int
) -> Protection:
    """Return the protection of a job of so many ranks and nodes; what `lost` nodes held is gone."""
    living = [one for one in holdings if one.node not in lost]
    shards = {rank: shard for one in living for rank, shard, _, _ in one.records if rank < world_size}
    ranks: dict[int, list[int]] = {}
    for rank, shard in sorted(shards.items()):
        ranks.setdefault(shard, []).append(rank)
    items: dict[Item, list[HeldCopy]] = {Item("tensors", shard): [] for shard in ranks}
    items |= {Item("record", rank): [] for rank in range(world_size)}
    for node, item, steps, nbytes in _told(living):
        if item in items and steps:
            items[item].append(HeldCopy(node, steps, nbytes))
    found = _marked(items, living, nodes)
    present = {item: [copy for copy in copies if not copy.old] for item, copies in found.items()}
    steps_of = _newest_first(present.values())
    return Protection(
        items=found,
        ranks={shard: tuple(found) for shard, found in sorted(ranks.items())},
        after=(step_after(steps_of, 0), step_after(steps_of, 1), step_after(steps_of, 2)),
        exposure=exposure({item: [copy.node for copy in copies] for item, copies in present.items()}),
    )


def _told(holdings: Iterable[HoldingRecord]) -> Iterable[tuple[int, Item, tuple[int, ...], int]]:
    for one in sorted(holdings, key=lambda one: one.node):
        for shard, steps, nbytes in one.tensors:
            yield one.node, Item("tensors", shard), steps, nbytes
        for rank, _, steps, nbytes in one.records:
            yield one.node, Item("record", rank), steps, nbytes


def _newest_first(items: Iterable[Iterable[HeldCopy]]) -> list[list[int]]:
    return [sorted((copy.step for copy in copies), reverse=True) for copies in items]


def _marked(
    items: Mapping[Item, Sequence[HeldCopy]], holdings: Sequence[HoldingRecord], nodes: int
) -> dict[Item, tuple[HeldCopy, ...]]:
    """The copies, and of each whether it is an old one."""
    mark = step_after(_newest_first(items.values()), 0)
    lag_s = LAG_S * max(1.0, nodes / FEW_NODES)
    heard_s = max((one.updated_s for one in holdings), default=0.0) - lag_s
    # A node of which nothing new is heard stands still: it counts where it has what everybody can give.
    still = {one.node for one in holdings if one.updated_s < heard_s}
    steps_on: defaultdict[int, set[int]] = defaultdict(set)
    for node, _, steps, _ in _told(holdings):
        steps_on[node].update(steps)

    def is_old(copy: HeldCopy) -> bool:
        return (
            mark is not None
            and copy.step < mark
            and (copy.node in still or copy.step < max(steps_on[copy.node]) - KEPT_STEPS)
        )

    return {item: tuple(c._replace(old=is_old(c)) for c in copies) for item, copies in items.items()}


def step_after(steps: Iterable[Sequence[int]], failures: int) -> int | None:
    """The newest step that every item has a copy of, or of a newer one, when the worst `failures` nodes fail.

    `steps`: of each item, the newest step of each of its copies, the newest first.
    """
    found: int | None = None
    for of_item in steps:
        if len(of_item) <= failures:
            return None
        found = of_item[failures] if found is None else min(found, of_item[failures])
    return found


def exposure(holders: Mapping[Item, Collection[int]]) -> Exposure:
    """Return which failures would lose what. Grows with the items, not with pairs of nodes."""
    gone: list[Item] = []
    one: dict[int, list[Item]] = {}
    two: dict[tuple[int, int], list[Item]] = {}
    for item in sorted(holders):
        match sorted(set(holders[item])):
            case []:
                gone.append(item)
            case [node]:
                one.setdefault(node, []).append(item)
            case [first, second]:
                two.setdefault((first, second), []).append(item)
            case _:
                pass
    return Exposure(
        tuple(gone),
        {node: tuple(items) for node, items in sorted(one.items())},
        {pair: tuple(items) for pair, items in sorted(two.items())},
    )
