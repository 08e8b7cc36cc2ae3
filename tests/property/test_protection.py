"""What failures would lose, read off the items, is what trying every failure finds."""

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.replication.protection import Exposure, Item, exposure, step_after

NODES = range(6)

items = st.builds(Item, st.sampled_from(("tensors", "record")), st.integers(0, 7))
# Of each item who holds it, and the newest step that each of them has.
stocks = st.dictionaries(items, st.dictionaries(st.sampled_from(NODES), st.integers(1, 9)), max_size=8)
Stock = dict[Item, dict[int, int]]


def lost(stock: Stock, failed: Sequence[int]) -> set[Item]:
    """Return what nobody has once these have failed."""
    return {item for item, steps in stock.items() if not steps.keys() - set(failed)}


def step_left(stock: Stock, failed: Sequence[int]) -> int | None:
    """The newest step that everything is there of, or something newer, once these have failed."""
    if not stock or lost(stock, failed):
        return None
    return min(max(step for n, step in steps.items() if n not in failed) for steps in stock.values())


@given(stocks)
def test_every_failure_of_one_or_two_nodes(stock: Stock) -> None:
    gone = lost(stock, ())
    one = {node: lost(stock, (node,)) - gone for node in NODES}
    two = {(a, b): lost(stock, (a, b)) - gone - one[a] - one[b] for a, b in combinations(NODES, 2)}
    assert exposure(stock) == Exposure(
        tuple(sorted(gone)),
        {node: tuple(sorted(found)) for node, found in one.items() if found},
        {pair: tuple(sorted(found)) for pair, found in two.items() if found},
    )


@given(stocks, st.integers(0, 3))
def test_the_step_after_the_worst_failures(stock: Stock, failures: int) -> None:
    each = [step_left(stock, failed) for failed in combinations(NODES, failures)]
    worst = None if None in each else min(step for step in each if step is not None)
    steps = [sorted(of_item.values(), reverse=True) for of_item in stock.values()]
    assert step_after(steps, failures) == worst
