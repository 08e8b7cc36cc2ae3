"""Sums over virtual ranks whose bracketing depends on their number alone, whoever has them. Pure.

    node (first, last)     the virtual ranks first .. last - 1
    its children           (first, middle) and (middle, last); middle - first is the largest power of two
                           that is less than last - first

A real rank has a block of neighbours. It adds up the largest subtrees that lie within its block; everybody
adds up the rest in the same order. So the sum of 4 is ((0 + 1) + (2 + 3)) for 1, 2, 3 or 4 real ranks.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A subtree: its first virtual rank, and one after its last."""

    first: int
    last: int


def block(rank: int, ranks: int, virtual: int) -> range:
    """Return the virtual ranks that a real one has: those v of which v * ranks // virtual is its number."""
    return range(-(-rank * virtual // ranks), -(-(rank + 1) * virtual // ranks))


@cache
def nodes(virtual: int) -> frozenset[Node]:
    """Return all subtrees of so many virtual ranks."""
    found, rest = set[Node](), [Node(0, virtual)]
    while rest:
        node = rest.pop()
        found.add(node)
        count = node.last - node.first
        if count > 1:
            middle = node.first + (1 << (count - 1).bit_length() - 1)
            rest += [Node(node.first, middle), Node(middle, node.last)]
    return frozenset(found)


def fold(virtual: int, parts: Iterable[tuple[Node, T]], add: Callable[[T, T], T]) -> list[tuple[Node, T]]:
    """Add neighbours up for as long as they are the two children of a node; what is left, in order.

    `parts` are in order and without gaps; `add(left, right)` may write into either. No more of them are held
    at once than the tree is deep.
    """
    whole, left = nodes(virtual), list[tuple[Node, T]]()
    for node, value in parts:
        here = (node, value)
        while left and Node(left[-1][0].first, here[0].last) in whole:
            before = left.pop()
            here = (Node(before[0].first, here[0].last), add(before[1], here[1]))
        left.append(here)
    return left


@cache
def subtrees(rank: int, ranks: int, virtual: int) -> tuple[Node, ...]:
    """Return the largest subtrees within a real rank's block, in order: at most 2 log2(virtual) of them."""
    leaves = ((Node(v, v + 1), None) for v in block(rank, ranks, virtual))
    return tuple(node for node, _ in fold(virtual, leaves, lambda _left, _right: None))
