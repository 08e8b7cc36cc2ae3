"""The graph of a job's daemons: small degree, whole, also when many are away, and a few hops wide."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.membership.overlay import DEGREE, REACH, Overlay, overlay


def hops(graph: Overlay, start: int, away: frozenset[int] = frozenset()) -> dict[int, int]:
    """Return how far everybody is from `start`, where nobody passes on through those that are away."""
    found, edge = {start: 0}, [start]
    while edge:
        following: list[int] = []
        for node in edge:
            for other in graph.neighbours(node, away):
                if other not in found:
                    found[other] = found[node] + 1
                    following.append(other)
        edge = following
    return found


@given(st.integers(1, DEGREE + 1))
def test_few_nodes_know_each_other(count: int) -> None:
    graph = overlay("4711", tuple(range(count)))
    assert graph.complete
    assert all(graph.neighbours(node) == set(range(count)) - {node} for node in range(count))


@given(st.text(min_size=1, max_size=20), st.integers(DEGREE + 2, 300))
@settings(max_examples=30, deadline=None)
def test_neighbours_are_mutual_and_few(job: str, count: int) -> None:
    graph = Overlay(job, tuple(range(count)))
    for node in range(count):
        neighbours = graph.neighbours(node)
        assert 2 <= len(neighbours) <= DEGREE
        assert node not in neighbours
        assert all(node in graph.neighbours(other) for other in neighbours)


@given(st.integers(DEGREE + 2, 300), st.data())
@settings(max_examples=30, deadline=None)
def test_it_is_whole_whoever_is_away(count: int, data: st.DataObject) -> None:
    graph = Overlay("4711", tuple(range(count)))
    away = frozenset(data.draw(st.sets(st.integers(0, count - 1), max_size=count // 4)))
    left = set(range(count)) - away
    assert left <= hops(graph, min(left), away).keys()


def test_ten_thousand_nodes_are_a_few_hops_wide() -> None:
    graph = overlay("4711", tuple(range(10_000)))
    far = hops(graph, 0)
    assert len(far) == 10_000
    # log(10 000) / log(7) is 4.7.
    assert max(far.values()) <= 8


def test_a_rack_takes_nobody_elses_neighbours() -> None:
    graph = overlay("4711", tuple(range(1024)))
    rack = frozenset(range(256, 288))
    assert all(len(graph.neighbours(node) - rack) >= 5 for node in range(1024) if node not in rack)


def test_every_daemon_computes_the_same() -> None:
    nodes = tuple(range(100))
    assert all(Overlay("a", nodes).neighbours(n) == Overlay("a", nodes).neighbours(n) for n in nodes)
    assert any(Overlay("a", nodes).neighbours(n) != Overlay("b", nodes).neighbours(n) for n in nodes)


@pytest.mark.parametrize("gone", [0, 1, 2, REACH - 1, REACH])
def test_neighbours_are_the_next_ones_that_are_there_on_each_ring(gone: int) -> None:
    graph = Overlay("4711", tuple(range(1000)))
    assert len(graph._rings) * 2 == DEGREE
    ways = [
        [ring[(ring.index(7) + side * hop) % 1000] for hop in range(1, REACH + 2)]
        for ring in graph._rings
        for side in (1, -1)
    ]
    away = {node for way in ways for node in way[:gone]}
    expected = {node for way in ways for node in [node for node in way[:REACH] if node not in away][:1]}
    assert graph.neighbours(7, away) == expected - {7}
