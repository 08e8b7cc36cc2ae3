"""The memory and the traffic of versions, held against a count of who holds what, shard by shard."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptless.daemon.protocol.messages import Assignment, NodeInfo, Place
from ckptless.daemon.protocol.version import PAGE_NBYTES, SLOTS, header_nbytes, slot_nbytes
from ckptless.daemon.replication.failure_domains import domain_of
from ckptless.daemon.replication.footprint import (
    Load,
    Shape,
    held_by,
    loads,
    needed,
    shards_like,
    shortest_cadence,
    with_shards,
)
from ckptless.daemon.replication.re_replication import Holders

CASES = settings(max_examples=1000, deadline=None)


def assignment(places: Sequence[int], nodes: int, shards: tuple[int, ...] = ()) -> Assignment:
    return Assignment(
        job="7",
        generation=1,
        term=1,
        leader=0,
        places=tuple(Place(node=node, slot=places[:rank].count(node)) for rank, node in enumerate(places)),
        nodes=tuple(NodeInfo(node=n, name=f"n{n}", address="a", agent_port=1) for n in range(nodes)),
        restore_step=None,
        shards=shards,
    )


def takers(home: int, twins: set[int], ranked: set[int], nodes: int, copies: int) -> list[int]:
    """Return the nodes that a shard goes to where no failure domains are known: the next on the ring."""
    if len(twins) > 1 and twins == ranked:
        return []
    ring = [node for node in (*range(home + 1, nodes), *range(home)) if node not in twins]
    return ring[: max(0, copies - (len(twins) - 1))]


@CASES
@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2), st.integers(1, 5))
def test_every_shard_is_counted_where_it_is(
    data: st.DataObject, nodes: int, per_node: int, spares: int, copies: int
) -> None:
    ranks = nodes * per_node
    shard_ranks = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    shards = tuple(rank % shard_ranks for rank in range(ranks))
    places = data.draw(st.permutations([rank // per_node for rank in range(ranks)]))
    to = Holders(assignment(places, nodes + spares, shards), copies)
    expected = {
        node: [len({s for s, p in zip(shards, places, strict=True) if p == node}), 0, 0]
        for node in range(nodes + spares)
    }
    for shard in range(shard_ranks):
        twins = {p for s, p in zip(shards, places, strict=True) if s == shard}
        for node in takers(places[shard], twins, set(places), nodes + spares, copies):
            expected[node][1] += 1
            expected[places[shard]][2] += 1
    found = loads(to)
    assert found == {node: Load(*counts) for node, counts in expected.items()}
    assert {node: len(held_by(node, to)) for node in found} == {n: load.held for n, load in found.items()}


@CASES
@given(st.integers(1, 24), st.integers(1, 8), st.integers(1, 4), st.integers(1, 1 << 40))
def test_fsdp_is_as_the_formula_says(nodes: int, per_node: int, copies: int, state_nbytes: int) -> None:
    ranks = nodes * per_node
    shape = Shape(ranks, per_node, ranks, copies, state_nbytes)
    held = min(copies, nodes - 1)
    assert set(shape.loads) == {Load(per_node, held * per_node, held * per_node)}
    shard = -(-state_nbytes // ranks)
    assert shape.node_nbytes == (1 + held) * SLOTS * slot_nbytes(shard) * per_node
    assert shape.sent_nbytes == shape.received_nbytes == held * shard * per_node
    assert 0 <= slot_nbytes(shard) - shard - header_nbytes(shard) < PAGE_NBYTES


@CASES
@given(st.integers(2, 24), st.integers(1, 8), st.integers(1, 4))
def test_of_ddp_nothing_is_sent(nodes: int, per_node: int, copies: int) -> None:
    shape = Shape(nodes * per_node, per_node, 1, copies, 10**9)
    assert set(shape.loads) == {Load(1, 0, 0)}
    assert shape.commit_s(1e9) == 0
    assert shape.node_nbytes == SLOTS * slot_nbytes(10**9)


def test_of_hsdp_only_what_twins_lack_is_sent() -> None:
    two = Shape(ranks=32, per_node=8, shard_ranks=16, copies=2, state_nbytes=16 << 30)
    # Nodes 0 and 1 have it all, 2 and 3 too; so one more copy goes from each of 0 and 1 to the next.
    assert two.loads == (Load(8, 0, 8), Load(8, 8, 8), Load(8, 8, 0), Load(8, 0, 0))
    three = Shape(ranks=48, per_node=8, shard_ranks=16, copies=2, state_nbytes=16 << 30)
    assert set(three.loads) == {Load(8, 0, 0)}


@CASES
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.data())
def test_shards_of_a_mesh_follow_from_any_ranks_twins(
    outer: int, replicas: int, inner: int, data: st.DataObject
) -> None:
    ranks = outer * replicas * inner
    mesh = tuple(rank - inner * (rank // inner % replicas) for rank in range(ranks))
    shard = mesh[data.draw(st.integers(0, ranks - 1))]
    twins = data.draw(st.permutations([rank for rank in range(ranks) if mesh[rank] == shard]))
    assert shards_like(twins, ranks) == mesh


@CASES
@given(st.integers(1, 24), st.data())
def test_whatever_twins_are_said_a_shard_is_named_after_its_lowest_rank(
    ranks: int, data: st.DataObject
) -> None:
    twins = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=8))
    found = shards_like(twins, ranks)
    whole = with_shards(assignment([0] * ranks, 1), twins)
    assert (None if whole is None else whole.shards) == found
    if found is not None:
        assert [rank for rank in range(ranks) if found[rank] == min(twins)] == sorted(set(twins))
        assert all(found[shard] == shard for shard in found)


@CASES
@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 4), st.data())
def test_with_failure_domains_what_goes_out_comes_in(
    nodes: int, per_node: int, copies: int, data: st.DataObject
) -> None:
    domains = tuple(data.draw(st.lists(st.sampled_from("abc"), min_size=nodes, max_size=nodes)))
    ranks = nodes * per_node
    whole = assignment([rank // per_node for rank in range(ranks)], nodes, tuple(range(ranks)))
    found = loads(Holders(whole, copies, domains))
    assert sum(load.held for load in found.values()) == sum(load.sent for load in found.values())
    assert all(load.sent == per_node * min(copies, nodes - 1) for load in found.values())
    for node in range(nodes) if copies == 1 and len(set(domains)) > 1 else ():
        homes = {shard // per_node for shard in held_by(node, Holders(whole, 1, domains))}
        assert all(domain_of(domains, home) != domain_of(domains, node) for home in homes)


@CASES
@given(st.floats(0, 1e4), st.floats(1e-3, 1e4))
def test_the_shortest_cadence_is_the_first_at_which_no_commit_waits(commit_s: float, step_s: float) -> None:
    assume(commit_s / step_s < 1e6)
    every = shortest_cadence(commit_s, step_s)
    assert every * step_s >= commit_s * (1 - 1e-9)
    assert every == 1 or (every - 1) * step_s < commit_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("own", "replicas", "expected"),
    [
        ([30], [], (30, 0)),
        ([30, 40], [0, 0, 0], (70, 90)),
        ([30, 40], [50, 0], (70, 80)),
        ([30], [10], (30, 30)),
        ([], [10], (0, 10)),
    ],
)
def test_what_is_not_there_yet(own: list[int], replicas: list[int], expected: tuple[int, int]) -> None:
    assert needed(own, replicas) == expected


def test_an_assignment_of_no_mesh() -> None:
    whole = assignment([0, 0, 1, 1], 2)
    assert with_shards(whole, [0, 1, 3]) is None
    assert with_shards(whole, [0, 2]) == replace(whole, shards=(0, 1, 0, 1))
