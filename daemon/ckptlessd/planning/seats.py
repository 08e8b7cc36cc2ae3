"""Pure: which free slot a rank gets that has lost its own. Ranks with a good place are not asked."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.protocol.messages import WARM, Assignment, Place
from ckptless.daemon.replication.failure_domains import domain_of

Free = dict[int, list[int]]


@dataclass(frozen=True)
class Seats:
    """The facts that the choice of a slot depends on. `lost`: the nodes lost in this recovery."""

    nodes: Mapping[int, NodeView]
    slots_per_node: int
    domains: Sequence[str]
    lost: Collection[int]

    def free(self, current: Assignment, bad: Collection[Place]) -> Free:
        """Slots on usable nodes that have no rank in `current` and are not `bad`, by node."""
        found: Free = {}
        for node, view in self.nodes.items():
            ranks = current.ranks_on(node)
            if len(ranks) < self.slots_per_node and view.usable:
                taken = {current.places[rank].slot for rank in ranks}
                slots = [slot for slot in range(self.slots_per_node) if slot not in taken]
                if slots := [slot for slot in slots if Place(node=node, slot=slot) not in bad]:
                    found[node] = slots
        return found

    def choose(self, free: Free, home: int, count: int) -> list[Place]:
        """Return so many of the free slots, or all there are, for ranks that leave node `home`; best first.

        Nodes come in the order of: room for all `count` ranks; that many warm slots; the failure domain (the
        home's own, whose network is the nearest, or if that has lost several nodes now, any other one); the
        number. Of one node the warm slots come first.
        """
        worn = Counter(domain_of(self.domains, node) for node in self.lost)
        own = domain_of(self.domains, home)
        stay = worn[own] < 2

        def order(item: tuple[int, list[int]]) -> tuple[bool, bool, bool, int]:
            node, slots = item
            warm = sum(self.warm(node, slot) for slot in slots)
            near = domain_of(self.domains, node) == own
            return len(slots) < count, warm < min(count, len(slots)), near is not stay, node

        places = [
            Place(node=node, slot=slot)
            for node, slots in sorted(free.items(), key=order)
            for slot in sorted(slots, key=lambda slot, node=node: (not self.warm(node, slot), slot))  # type: ignore[misc]
        ]
        return places[:count]

    def warm(self, node: int, slot: int) -> bool:
        """Whether a process waits in a slot: started, torch and the script imported, and it has said Hello.

        Of a script without ckptless.run no process ever says so; then none is warm, and all are alike. Nor is
        one whose process has ended, or is just being started.
        """
        state = self.nodes[node].slot(slot)
        return state is not None and state.phase in WARM


def remove(free: Free, places: Collection[Place]) -> None:
    """These are free no more."""
    for place in places:
        free[place.node].remove(place.slot)
        if not free[place.node]:
            del free[place.node]
