"""Which nodes hold the records of a node's ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol.messages import NodeInfo
from ckptless.daemon.replication.failure_domains import by_members, check_name, domain_of
from ckptless.daemon.replication.placement import PlacementRing


def infos(nodes: list[int]) -> list[NodeInfo]:
    return [NodeInfo(node=n, name=f"n{n}", address="a", agent_port=1) for n in nodes]


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
    assert [info.node for info in PlacementRing(infos(nodes)).holders(me, copies, away)] == expected


@given(st.sets(st.integers(0, 20), min_size=1), st.integers(0, 4), st.sets(st.integers(0, 20)), st.data())
def test_as_many_as_there_are_and_never_oneself(
    nodes: set[int], copies: int, away: set[int], data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(sorted(nodes)))
    chosen = [info.node for info in PlacementRing(infos(sorted(nodes))).holders(me, copies, away)]
    assert len(chosen) == len(set(chosen)) == min(copies, len(nodes - away - {me}))
    assert not set(chosen) & (away | {me})


@given(st.sets(st.integers(0, 20), min_size=3))
def test_every_node_holds_for_as_many_others(nodes: set[int]) -> None:
    held = [info.node for me in nodes for info in PlacementRing(infos(sorted(nodes))).holders(me, 2)]
    assert all(held.count(node) == 2 for node in nodes)


DOMAINS = st.lists(st.sampled_from(("a", "b", "c", "")), min_size=1, max_size=20).map(tuple)


@pytest.mark.parametrize(
    ("domains", "me", "expected"),
    [
        (("a", "a", "b", "b"), 0, [2, 3]),
        (("a", "a", "b", "b"), 1, [3, 2]),
        (("a", "b", "c", "a", "b", "c"), 0, [1, 2]),
        (("a", "b", "c", "a", "b", "c"), 3, [4, 5]),
        (("a", "a", "a", "b"), 0, [3, 1]),
        (("a", "a", "", ""), 2, [3, 1]),
    ],
)
def test_other_domains_come_first(domains: tuple[str, ...], me: int, expected: list[int]) -> None:
    nodes = infos(list(range(len(domains))))
    assert [info.node for info in PlacementRing(nodes, domains).holders(me, 2)] == expected


@given(DOMAINS, st.integers(1, 4), st.sets(st.integers(0, 19)), st.data())
def test_no_domain_holds_all_where_another_can(
    domains: tuple[str, ...], copies: int, away: set[int], data: st.DataObject
) -> None:
    nodes = range(len(domains))
    me = data.draw(st.sampled_from(nodes))
    chosen = [info.node for info in PlacementRing(infos(list(nodes)), domains).holders(me, copies, away)]
    reachable = [node for node in nodes if node != me and node not in away]
    foreign = [node for node in reachable if domain_of(domains, node) != domain_of(domains, me)]
    assert len(chosen) == len(set(chosen)) == min(copies, len(reachable))
    assert not set(chosen) & (away | {me})
    assert set(chosen[: len(foreign)]) <= set(foreign)


@given(st.sets(st.integers(0, 20), min_size=1), st.integers(0, 4), st.data())
def test_one_domain_for_all_is_as_none(nodes: set[int], copies: int, data: st.DataObject) -> None:
    me = data.draw(st.sampled_from(sorted(nodes)))
    expected = PlacementRing(infos(sorted(nodes))).holders(me, copies)
    assert PlacementRing(infos(sorted(nodes)), ("a",) * 21).holders(me, copies) == expected


@pytest.mark.parametrize("racks", [2, 3, 5])
def test_in_racks_of_the_same_size_every_node_holds_for_as_many_others(racks: int) -> None:
    domains = tuple(f"r{node // 4}" for node in range(4 * racks))
    nodes = infos(list(range(4 * racks)))
    held = [info.node for me in range(4 * racks) for info in PlacementRing(nodes, domains).holders(me, 2)]
    assert all(held.count(node) == 2 for node in range(4 * racks))


def test_two_domains_are_enough_to_say_something() -> None:
    members = {"rack1": ("n1",), "rack2": ("n2",)}
    assert by_members(("n1", "n2"), members) == ("rack1", "rack2")
    assert by_members(("n1", "n1"), members) == ()


def test_a_domain_may_have_a_name_of_one_letter() -> None:
    assert check_name("a") == "a"


# -------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(
    ("twins", "copies", "domains", "expected"),
    [
        pytest.param({0}, 2, (), [1, 2], id="nobody has it: FSDP"),
        pytest.param({0, 2}, 2, (), [1], id="a twin counts: HSDP"),
        pytest.param({0, 2, 4}, 2, (), [], id="enough twins"),
        pytest.param({0}, 2, ("a", "a", "b", "b", "b"), [2, 3], id="other domains first"),
        pytest.param({0, 1}, 1, ("a", "a", "b", "b", "b"), [2], id="all twins in one domain"),
        pytest.param({0, 2}, 1, ("a", "a", "b", "b", "b"), [], id="twins in two domains"),
        pytest.param({0, 1}, 1, ("a",) * 5, [], id="there is one domain only"),
    ],
)
def test_who_gets_a_shard(
    twins: set[int], copies: int, domains: tuple[str, ...], expected: list[int]
) -> None:
    found = PlacementRing(infos([0, 1, 2, 3, 4]), domains).shard_holders(0, copies, twins, ())
    assert [info.node for info in found] == expected


@given(
    st.sets(st.integers(0, 12), min_size=1),
    st.integers(0, 4),
    st.sets(st.integers(0, 12)),
    DOMAINS,
    st.data(),
)
def test_any_domain_may_be_lost_where_there_is_another(
    nodes: set[int], copies: int, away: set[int], domains: tuple[str, ...], data: st.DataObject
) -> None:
    twins = data.draw(st.sets(st.sampled_from(sorted(nodes)), min_size=1))
    me = data.draw(st.sampled_from(sorted(twins)))
    found = {
        info.node
        for info in PlacementRing(infos(sorted(nodes)), domains).shard_holders(me, copies, twins, away)
    }
    assert not found & (twins | away)
    have = twins | found
    reachable = nodes - away - twins
    assert len(have) >= min(copies + 1, len(twins | reachable))
    if copies and any(domains) and {domain_of(domains, n) for n in reachable} - {domain_of(domains, me)}:
        assert len({domain_of(domains, n) for n in have}) > 1
