"""Which copies of the restored step are made again, and who gives them."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptless.daemon.protocol.messages import Assignment, NodeInfo, Place
from ckptless.daemon.replication.placement import PlacementRing
from ckptless.daemon.replication.protection import Item
from ckptless.daemon.replication.re_replication import Holders, Remake, remakes

STEP = 7
BOTH: tuple[Literal["tensors"], Literal["record"]] = ("tensors", "record")


def assignment(
    places: list[int],
    nodes: list[int],
    tensors: dict[int, list[int]],
    records: list[list[int]],
    shards: list[int] | None = None,
) -> Assignment:
    """Rank r on node places[r]; `tensors` and `records`: who holds the restored step."""
    return Assignment(
        job="job",
        generation=2,
        term=1,
        leader=0,
        places=tuple(Place(node=node, slot=places[:rank].count(node)) for rank, node in enumerate(places)),
        nodes=tuple(NodeInfo(node=n, name=f"n{n}", address="a", agent_port=1) for n in nodes),
        restore_step=STEP,
        shards=tuple(shards if shards is not None else range(len(places))),
        tensor_nodes=tuple((shard, tuple(holders)) for shard, holders in sorted(tensors.items())),
        record_nodes=tuple(map(tuple, records)),
    )


def shares(now: Assignment, copies: int) -> dict[int, tuple[Remake, ...]]:
    """Return what each node gives, as each finds out for itself."""
    of = Holders(now, copies)
    found = {info.node: remakes(of, info.node) for info in now.nodes}
    return {node: given for node, given in found.items() if given}


def test_a_node_is_lost_and_a_spare_has_its_rank() -> None:
    """FSDP on 0 to 3, two copies each; node 1 is gone, node 4 has rank 1 and gets its state for it anyway."""
    held = [[0, 2], [2, 3], [2, 3, 0], [3, 0]]
    now = assignment([0, 4, 2, 3], [0, 2, 3, 4], dict(enumerate(held)), held)
    assert shares(now, 2) == {
        0: (Remake(Item("tensors", 0), (3,)), Remake(Item("record", 0), (3,))),
        # The home of rank 1 has not got it yet: one of those gives it that hold it.
        2: (Remake(Item("tensors", 2), (4,)), Remake(Item("record", 2), (4,))),
        3: tuple(Remake(Item(what, n), (to,)) for what in BOTH for n, to in ((1, 0), (3, 4))),
    }


def test_what_a_lost_node_was_home_of_is_given_by_its_holders_in_turn() -> None:
    """Node 0 of eight ranks is gone; nodes 1 and 2 have copies, of which each gives half."""
    now = assignment([3] * 8, [1, 2, 3, 4], {rank: [1, 2] for rank in range(8)}, [[1, 2]] * 8)
    given = shares(now, 3)
    assert {node: len(remade) for node, remade in given.items()} == {1: 8, 2: 8}
    assert all(remake.takers == (4,) for remade in given.values() for remake in remade)


def test_nothing_where_a_process_was_lost_or_nothing_is_restored() -> None:
    held = [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]
    now = assignment([0, 1, 2, 3], [0, 1, 2, 3], dict(enumerate(held)), held)
    assert shares(now, 2) == {}
    first = assignment([0, 1], [0, 1, 2], {}, [], shards=[])
    assert shares(replace(first, restore_step=None), 2) == {}
    # Nobody can give what nobody has.
    assert shares(assignment([0, 1], [0, 1, 2], {0: [], 1: []}, [[], []]), 2) == {}


def test_twins_are_copies_of_the_tensors_and_not_of_the_record() -> None:
    """HSDP of two replicas, DDP: who has a shard for its rank is given none."""
    records = [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]
    hsdp = assignment(
        [0, 1, 2, 3], [0, 1, 2, 3], {0: [0, 2], 1: [1, 3, 2]}, records=records, shards=[0, 1, 0, 1]
    )
    assert shares(hsdp, 2) == {0: (Remake(Item("tensors", 0), (1,)),)}
    ddp = assignment([0, 1, 2, 3], [0, 1, 2, 3], {0: [0, 1, 2, 3]}, records=records, shards=[0] * 4)
    assert shares(ddp, 2) == {}
    # The spare would have all that every node with ranks has.
    spare = replace(ddp, nodes=(*ddp.nodes, NodeInfo(node=4, name="n4", address="a", agent_port=1)))
    assert [one.item.kind for given in shares(spare, 4).values() for one in given if 4 in one.takers] == [
        "record"
    ] * 4


def test_two_nodes_that_have_a_shard_give_it_to_no_spare_where_no_others_have_ranks() -> None:
    of = Holders(assignment([0, 1], [0, 1, 2], {0: [0, 1]}, [[0], [1]], shards=[0, 0]), 2)
    assert of.of_tensors(0) == ()
    assert [info.node for info in of.of_record(0)] == [1, 2]


@given(st.data(), st.integers(1, 3), st.integers(2, 6), st.integers(0, 3))
def test_then_it_is_held_as_a_new_step_would_be(
    data: st.DataObject, copies: int, ranks: int, spares: int
) -> None:
    nodes = list(range(ranks + spares))
    places = data.draw(st.permutations(nodes))[:ranks]
    some = st.sets(st.sampled_from(nodes), min_size=1).map(sorted)
    held = data.draw(st.lists(some, min_size=ranks, max_size=ranks))
    now = assignment(list(places), nodes, dict(enumerate(held)), held)
    have = {("tensors", n): {places[n], *held[n]} for n in range(ranks)}
    have |= {("record", n): {places[n], *held[n]} for n in range(ranks)}
    for giver, remake in [(node, one) for node, some in shares(now, copies).items() for one in some]:
        known = have[remake.item]
        assert giver in held[remake.item.number]
        assert not known & set(remake.takers)
        known |= set(remake.takers)
    for (what, number), known in have.items():
        wanted = Holders(now, copies)
        found = wanted.of_tensors(number) if what == "tensors" else wanted.of_record(number)
        assert {info.node for info in found} <= known
        assert len(known) >= min(copies + 1, len(nodes))


def test_twins_of_a_shard_are_all_nodes_that_have_ranks_of_it() -> None:
    hsdp = assignment([5, 6, 7, 8], [5, 6, 7, 8], {}, [], shards=[0, 1, 0, 1])
    of = Holders(hsdp, 1)
    assert [of.twins(shard) for shard in range(4)] == [{5, 7}, {6, 8}, set(), set()]
    # A first generation restores nothing, and knows of no shards.
    first = Holders(replace(hsdp, restore_step=None, shards=()), 1)
    assert [first.twins(shard) for shard in range(2)] == [set(), set()]


def test_holders_are_the_next_ones_and_begin_at_the_first_for_a_node_that_is_none_of_them() -> None:
    nodes = [NodeInfo(node=n, name=f"n{n}", address="a", agent_port=1) for n in (1, 3, 5)]
    ring = PlacementRing(nodes)
    assert [[info.node for info in ring.holders(me, 1)] for me in (1, 3, 5, 9)] == [[3], [5], [1], [1]]


def test_a_copy_in_another_domain_where_only_some_domains_are_known() -> None:
    nodes = [NodeInfo(node=n, name=f"n{n}", address="a", agent_port=1) for n in range(3)]
    given = PlacementRing(nodes, ("a", "a", "")).shard_holders(0, 1, {0, 1})
    assert [info.node for info in given] == [2]
