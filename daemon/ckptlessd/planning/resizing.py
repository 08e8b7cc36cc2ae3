"""Pure: on how many nodes, and on which, an elastic job trains.

The unit is a whole node, all slots of it: a job that has `sizes` of 2, 4 and 6 nodes gives two back, or takes
two, at a time. A node of which a slot may hold no rank any more is not trained on.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.protocol.messages import Assignment, JobSpec, Place, Wish

# Nobody's word.
AS_MANY_AS_THERE_ARE = Wish()


@dataclass(frozen=True)
class Fleet:
    """The nodes that an elastic job could train on: `whole`, and of these those where every slot is `warm`.

    `training`: those that it trains on, in the order of their ranks.
    """

    whole: frozenset[int]
    warm: frozenset[int]
    training: tuple[int, ...]

    @classmethod
    def of(
        cls, spec: JobSpec, nodes: Mapping[int, NodeView], current: Assignment, bad: Collection[Place] = ()
    ) -> "Fleet":
        """Look at all nodes. `bad`: slots that may hold no rank any more, beside those of `current`."""
        whole = _whole(nodes, {place.node for place in (*current.bad, *bad)})
        warm = frozenset(node for node in whole if _is_warm(nodes[node], spec.slots_per_node))
        return cls(whole, warm, tuple(current.ranks_by_node))

    def choose(self, count: int) -> tuple[int, ...]:
        """Return so many nodes: first those that train, then warm ones, then the others."""
        staying = [node for node in self.training if node in self.whole]
        coming = sorted(self.whole.difference(staying), key=lambda node: (node not in self.warm, node))
        return (*staying, *coming)[:count]


def size(spec: JobSpec, fleet: Fleet, wanted: int | None) -> int | None:
    """Return the number of nodes to train on; None where fewer are left than the job's least size.

    As many as there are, or as are `wanted`. Where nobody wants a number, the job's spares stay spares: only
    up to the number that it began with they are trained on.
    """
    there = len(fleet.whole)
    sizes = [one for one in spec.sizes if one <= (there if wanted is None else min(there, wanted))]
    if wanted is None:
        most = max(spec.nodes, len(fleet.training), there - spec.spares)
        sizes = [one for one in sizes if one <= most]
    # Somebody may want fewer nodes than are allowed to be so few.
    return max(sizes, default=None)


def may_grow(spec: JobSpec, fleet: Fleet, wanted: int | None) -> int | None:
    """Return the larger size that the job could have at once, on nodes that are warm; None: none."""
    ready = Fleet(fleet.warm.union(fleet.training) & fleet.whole, fleet.warm, fleet.training)
    larger = size(spec, ready, wanted)
    return larger if larger is not None and larger > len(fleet.training) else None


def must_shrink(spec: JobSpec, fleet: Fleet, wanted: int | None) -> int | None:
    """Return the smaller size that somebody wants the job to have; None: none."""
    smaller = size(spec, fleet, wanted) if wanted is not None else None
    return smaller if smaller is not None and smaller < len(fleet.training) else None


def lacking(spec: JobSpec, nodes: Mapping[int, NodeView], fleet: Fleet, wanted: int | None) -> int:
    """Return how many nodes more the job would use, as far as it has numbers left for them.

    As many as it could train on, and its spares; or as are `wanted`.
    """
    most = max((spec.nodes, *spec.sizes)) + spec.spares if wanted is None else wanted
    free = sum(view.absent and view.lost is None for view in nodes.values()) if spec.late else 0
    return max(0, min(most - len(fleet.whole), free))


def left_over(spec: JobSpec, fleet: Fleet) -> tuple[int, ...]:
    """Return the nodes that are neither trained on nor needed as spares; those that came last first.

    The first node is never one: a job's batch script runs there, with its launcher.
    """
    idle = sorted(fleet.whole.difference(fleet.training) - {0}, reverse=True)
    return tuple(idle[: max(0, len(idle) - spec.spares)])


def places_on(nodes: Sequence[int], slots_per_node: int) -> tuple[Place, ...]:
    """Return the ranks' slots, in order, on all of these nodes."""
    return tuple(Place(node=node, slot=slot) for node in nodes for slot in range(slots_per_node))


def _whole(nodes: Mapping[int, NodeView], worn: Collection[int]) -> frozenset[int]:
    return frozenset(node for node, view in nodes.items() if view.usable and node not in worn)


def _is_warm(view: NodeView, slots_per_node: int) -> bool:
    slots = [view.slot(index) for index in range(slots_per_node)]
    return all(slot is not None and slot.phase == "waiting" for slot in slots)
