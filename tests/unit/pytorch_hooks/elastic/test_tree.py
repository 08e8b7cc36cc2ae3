"""Sums over virtual ranks have the same brackets, however many real ranks there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.pytorch_hooks.elastic.tree import Node, block, fold, nodes, subtrees


def brackets(virtual: int, ranks: int) -> str:
    """The sum as so many real ranks make it."""

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    sent: list[tuple[Node, str]] = []
    for rank in range(ranks):
        leaves = [(Node(v, v + 1), str(v)) for v in block(rank, ranks, virtual)]
        sent += fold(virtual, leaves, add)
    ((root, found),) = fold(virtual, sent, add)
    assert root == (0, virtual)
    return found


@given(st.integers(1, 200).flatmap(lambda v: st.tuples(st.just(v), st.integers(1, v))))
def test_brackets_do_not_depend_on_the_number_of_ranks(sizes: tuple[int, int]) -> None:
    virtual, ranks = sizes
    assert brackets(virtual, ranks) == brackets(virtual, 1)


@given(st.integers(1, 200).flatmap(lambda v: st.tuples(st.just(v), st.integers(1, v))))
def test_every_rank_has_a_block_and_few_subtrees(sizes: tuple[int, int]) -> None:
    virtual, ranks = sizes
    assert [v for rank in range(ranks) for v in block(rank, ranks, virtual)] == list(range(virtual))
    for rank in range(ranks):
        mine = block(rank, ranks, virtual)
        assert mine
        assert all(v * ranks // virtual == rank for v in mine)
        found = subtrees(rank, ranks, virtual)
        assert [v for node in found for v in range(*node)] == list(mine)
        assert len(found) <= max(1, 2 * (virtual - 1).bit_length())
        assert set(found) <= nodes(virtual)


@pytest.mark.parametrize(
    ("virtual", "wanted"),
    [(1, "0"), (3, "((0+1)+2)"), (4, "((0+1)+(2+3))"), (6, "(((0+1)+(2+3))+(4+5))")],
)
def test_the_tree(virtual: int, wanted: str) -> None:
    assert brackets(virtual, virtual) == wanted


def test_few_are_held_at_once() -> None:
    held = most = 0

    def leaves() -> Iterator[tuple[Node, int]]:
        nonlocal held, most
        for v in range(64):
            held += 1
            most = max(most, held)
            yield Node(v, v + 1), v

    def add(left: int, right: int) -> int:
        nonlocal held
        held -= 1
        return left + right

    fold(64, leaves(), add)
    assert most == 7
