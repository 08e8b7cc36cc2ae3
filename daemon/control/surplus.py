"""Pure: what a node holds and need not, and when it may give that back.

What is given back is never missed: whichever nodes are lost after it, up to as many as there are copies, the
newest step of which everything is left is what it would have been without giving anything back.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ckptless.daemon.api.messages import Assignment
from ckptless.daemon.control.remaking import Holders

# "record" of a rank or "tensors" of a shard, and its number.
Item: TypeAlias = tuple[Literal["record", "tensors"], int]

# That a rank has committed a step says that the one before it is committed by all, since its update took
# gradients of all, and so that the one before that is held by all who are to hold it. So after two steps.
STEPS = 2


def home_of(assignment: Assignment, item: Item) -> int:
    """The node that gives an item to others."""
    return assignment.places[item[1]].node


def targets_of(to: Holders, item: Item) -> frozenset[int]:
    """The nodes that are to hold an item beside those whose ranks have it."""
    what, number = item
    of = to.of_record if what == "record" else to.of_tensors
    return frozenset(info.node for info in of(number))


def surplus(to: Holders, node: int, here: Collection[Item]) -> tuple[Item, ...]:
    """What of all that is `here`, on `node`, has another place in this generation."""
    if to.assignment.restore_step is None:
        return ()
    return tuple(item for item in sorted(here) if not _belongs(to, node, item))


def _belongs(to: Holders, node: int, item: Item) -> bool:
    what, number = item
    if number >= len(to.assignment.places):
        return True  # nobody knows of it, so nobody can tell that it is held elsewhere
    own = {home_of(to.assignment, item)}
    if what == "tensors":
        own |= to.twins(number)
    return node in own or node in targets_of(to, item)


@dataclass
class Settled:
    """What a home knows: the newer steps that all who are to hold an item have, in this generation."""

    restore_step: int | None = None
    _steps: dict[Item, set[int]] = field(default_factory=dict)
    _nodes: dict[Item, frozenset[int]] = field(default_factory=dict)

    def held(self, item: Item, step: int, nodes: Collection[int]) -> None:
        """All of `nodes` have it, and they are all who are to hold it."""
        if step <= (self.restore_step or 0):
            return
        steps = self._steps.setdefault(item, set())
        if len(steps) < STEPS:
            steps.add(step)
        self._nodes[item] = frozenset(nodes)

    def lost(self, node: int) -> None:
        """It holds nothing any more."""
        self._nodes = {item: nodes - {node} for item, nodes in self._nodes.items()}

    def holders(self, item: Item) -> frozenset[int] | None:
        """Who has it, beside its own nodes; None where older steps may still be asked for."""
        return self._nodes.get(item) if len(self._steps.get(item, ())) >= STEPS else None


def may_go(
    to: Holders,
    node: int,
    item: Item,
    newest: int | None,
    holders: Collection[int] | None,
) -> bool:
    """Whether `node` may give back an item; `newest`: its newest step here, `holders`: what its home said."""
    if holders is None or node in holders:
        return False
    # Its home gives it to this node after all, since another cannot be reached.
    if newest is not None and newest > (to.assignment.restore_step or 0):
        return False
    return len(holders) >= len(targets_of(to, item))
