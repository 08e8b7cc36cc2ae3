"""Nodes that live and cannot reach each other: which pairs there are by what was said, and who gives way."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.planning.pairs import PairReports, gives_way, pairs

NODES = st.frozensets(st.integers(0, 11), min_size=2)
SAID = st.dictionaries(st.integers(0, 11), st.frozensets(st.integers(0, 11)))
CASES = settings(max_examples=1000, deadline=None)


def by_hand(
    said: Mapping[int, frozenset[int]], nodes: frozenset[int], hosts: frozenset[int]
) -> set[frozenset[int]]:
    """The same from the other end: of every pair, what is known of it."""
    found = set()
    for one in nodes:
        for other in nodes - {one}:
            accuses, accused = other in said.get(one, ()), one in said.get(other, ())
            silent = other not in said
            if accuses and (accused or silent) and {one, other} & hosts:
                found.add(frozenset((one, other)))
    return found


@CASES
@given(SAID, NODES, st.data())
def test_pairs_are_those_of_which_both_say_so(
    said: dict[int, frozenset[int]], nodes: frozenset[int], data: st.DataObject
) -> None:
    said = {node: others - {node} for node, others in said.items()}
    hosts = data.draw(st.frozensets(st.sampled_from(sorted(nodes))))
    found = pairs(said, nodes, hosts)
    assert all(low < high for low, high in found)
    assert {frozenset(pair) for pair in found} == by_hand(said, nodes, hosts)


@CASES
@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1), st.frozensets(st.integers(0, 7)))
def test_who_gives_way_is_in_most_pairs_and_costs_least(
    drawn: set[tuple[int, int]], hosts: frozenset[int]
) -> None:
    found = {(min(pair), max(pair)) for pair in drawn if pair[0] != pair[1]}
    if not found:
        return
    nodes = {node for pair in found for node in pair}
    count = {node: sum(node in pair for pair in found) for node in nodes}
    for leader in range(8):
        node = gives_way(found, hosts, leader)
        rivals = {other for other in nodes if count[other] == count[node]} - {node}
        assert count[node] == max(count.values())
        if node in hosts:
            assert rivals <= hosts
        if node == leader:
            # Only where that is the cheaper one, or it is the only one of so many pairs.
            assert all(other in hosts and node not in hosts for other in rivals)
        alike = {other for other in rivals if (other in hosts) == (node in hosts) and other != leader}
        assert node == leader or all(other < node for other in alike)


@CASES
@given(st.sets(st.integers(1, 7), min_size=2), st.frozensets(st.integers(0, 7)), st.integers(0, 7))
def test_a_node_apart_from_several_is_the_one(others: set[int], hosts: frozenset[int], leader: int) -> None:
    assert gives_way({(0, other) for other in others}, hosts, leader) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.frozensets(st.integers(4, 7)), st.floats(0, 100))))
def test_only_what_was_said_lately_counts(said: list[tuple[int, frozenset[int], float]]) -> None:
    apart, newest = PairReports(), dict[int, tuple[frozenset[int], float]]()
    for node, others, at in sorted(said, key=lambda one: one[2]):
        apart.say(node, others, at)
        newest[node] = others, at
    for since in (0.0, 50.0, 101.0):
        assert apart.fresh(since) == {node: others for node, (others, at) in newest.items() if at >= since}


def test_one_without_ranks_that_holds_copies_of_others_is_of_a_pair_by_its_word_alone() -> None:
    assert pairs({3: frozenset({1})}, {1, 2, 3}, {1, 2}) == {(1, 3)}
    assert pairs({1: frozenset({3})}, {1, 2, 3}, {1, 2}) == {(1, 3)}
