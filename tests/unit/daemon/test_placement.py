"""Which nodes hold the records of a node's ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.control.placement import holders


def infos(nodes: list[int]) -> list[NodeInfo]:
    return [
        NodeInfo(node=n, name=f"n{n}", address="a", agent_port=1, store_address="a", store_port=2)
        for n in nodes
    ]


@pytest.mark.parametrize(
    ("nodes", "me", "copies", "away", "expected"),
    [
        ([0, 1, 2, 3], 0, 2, [], [1, 2]),
        ([0, 1, 2, 3], 3, 2, [], [0, 1]),
        ([3, 1, 0, 2], 2, 2, [], [3, 0]),
        ([0, 1, 2, 3], 0, 2, [1], [2, 3]),
        ([0, 1, 2, 3], 2, 2, [3, 0], [1]),
        ([0, 1], 0, 2, [], [1]),
        ([0], 0, 2, [], []),
        ([0, 1, 2], 0, 0, [], []),
    ],
)
def test_the_next_on_the_ring(
    nodes: list[int], me: int, copies: int, away: list[int], expected: list[int]
) -> None:
    assert [info.node for info in holders(infos(nodes), me, copies, away)] == expected


@given(st.sets(st.integers(0, 20), min_size=1), st.integers(0, 4), st.sets(st.integers(0, 20)), st.data())
def test_as_many_as_there_are_and_never_oneself(
    nodes: set[int], copies: int, away: set[int], data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(sorted(nodes)))
    chosen = [info.node for info in holders(infos(sorted(nodes)), me, copies, away)]
    assert len(chosen) == len(set(chosen)) == min(copies, len(nodes - away - {me}))
    assert not set(chosen) & (away | {me})


@given(st.sets(st.integers(0, 20), min_size=3))
def test_every_node_holds_for_as_many_others(nodes: set[int]) -> None:
    held = [info.node for me in nodes for info in holders(infos(sorted(nodes)), me, 2)]
    assert all(held.count(node) == 2 for node in nodes)
