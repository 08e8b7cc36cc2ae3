"""What could be restored, and lost: from the rows in which daemons have written what agents hold."""

from collections.abc import Sequence

import pytest

from ckptless.daemon.protocol.records import HoldingRecord
from ckptless.daemon.replication.protection import Item, protection


def row(
    node: int,
    tensors: dict[int, Sequence[int]],
    records: dict[int, Sequence[int]],
    updated_s: float = 100.0,
    shard_of: dict[int, int] | None = None,
) -> HoldingRecord:
    """Of FSDP, where each rank is its own shard, if nothing else is said."""
    shards = shard_of or {}
    return HoldingRecord(
        job="j",
        node=node,
        tensors=tuple((shard, tuple(steps), 8 * len(steps)) for shard, steps in tensors.items()),
        records=tuple((rank, shards.get(rank, rank), tuple(steps), 1) for rank, steps in records.items()),
        nbytes=100,
        seq=1,
        updated_s=updated_s,
    )


def ring(count: int, steps: Sequence[int], copies: int = 2) -> list[HoldingRecord]:
    """Nodes with a rank each, which give what they have to the next ones."""
    rows = []
    for node in range(count):
        held = dict.fromkeys(sorted((node - back) % count for back in range(copies + 1)), steps)
        rows.append(row(node, held, held))
    return rows


def test_two_copies_beside_the_own_stand_any_two_failures() -> None:
    found = protection(ring(4, (8, 9, 10)), (), 4, 4)
    assert found.after == (10, 10, 10)
    assert found.ranks == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    assert not found.exposure.one
    assert not found.exposure.two
    assert [copy.node for copy in found.items[Item("tensors", 3)]] == [0, 1, 3]


def test_a_lost_nodes_copies_are_gone_until_they_are_made_anew() -> None:
    rows = ring(4, (8, 9, 10))
    found = protection(rows, {1}, 4, 4)
    assert found.after == (10, 10, None)
    # Node 1 had copies of shards 0 and 3, and its own, which is on 2 and 3.
    assert set(found.exposure.two) == {(0, 2), (0, 3), (2, 3)}
    assert found.exposure.two[2, 3] == (Item("record", 1), Item("tensors", 1))
    both = protection(rows, {1, 2}, 4, 4)
    assert both.after == (10, None, None)
    assert both.exposure.one[0] == (Item("record", 0), Item("tensors", 0))


def test_a_rank_whose_record_nobody_has_cannot_be_restored() -> None:
    rows = ring(3, (5,))
    found = protection(rows, (), 4, 4)
    assert found.step is None
    assert found.exposure.gone == (Item("record", 3),)


def test_twins_count_for_tensors_and_records_are_each_ranks_own() -> None:
    twins = {0: 0, 1: 0}
    rows = [
        row(0, {0: (3, 4)}, {0: (3, 4)}, shard_of=twins),
        row(1, {0: (2, 3)}, {0: (3,), 1: (3,)}, shard_of=twins),
    ]
    found = protection(rows, (), 2, 2)
    assert found.ranks == {0: (0, 1)}
    assert found.step == 3
    assert found.exposure.one == {1: (Item("record", 1),)}
    assert found.exposure.two == {(0, 1): (Item("record", 0), Item("tensors", 0))}


def test_who_is_told_of_later_is_behind_and_no_less_a_holder() -> None:
    rows = [
        row(0, {0: (100, 101, 102)}, {0: (100, 101, 102)}, updated_s=100.0),
        row(1, {0: (80, 81, 82)}, {0: (80, 81, 82)}, updated_s=99.2),
    ]
    found = protection(rows, (), 1, 2)
    assert found.after == (102, 82, None)
    assert not any(copy.old for copies in found.items.values() for copy in copies)


def test_what_does_not_come_along_any_more_protects_nothing() -> None:
    steps = (100, 101, 102)
    # Node 1 holds shard 1 as it goes on, and what it was once given of shard 0. Node 2 holds only such.
    rows = [
        row(0, {0: steps, 1: steps}, {0: steps, 1: steps}),
        row(1, {0: (40, 41), 1: steps}, {0: (40, 41), 1: steps}),
        row(2, {0: (60,)}, {0: (60,)}, updated_s=70.0),
    ]
    found = protection(rows, (), 2, 3)
    old = {(item.kind, item.number, c.node) for item, copies in found.items.items() for c in copies if c.old}
    assert old == {(kind, 0, node) for kind in ("tensors", "record") for node in (1, 2)}
    assert found.exposure.one == {0: (Item("record", 0), Item("tensors", 0))}
    assert found.exposure.two == {(0, 1): (Item("record", 1), Item("tensors", 1))}


@pytest.mark.parametrize(("behind", "old"), [(3, False), (4, True)])
def test_a_copy_that_comes_along_is_at_most_as_many_steps_behind_as_are_kept(behind: int, old: bool) -> None:
    rows = [
        row(0, {0: (100,), 1: (100,)}, {0: (100,), 1: (100,)}),
        row(1, {0: (100 - behind,), 1: (100,)}, {0: (100,), 1: (100,)}),
    ]
    found = protection(rows, (), 2, 2)
    assert [copy.old for copy in found.items[Item("tensors", 0)]] == [False, old]


@pytest.mark.parametrize(
    ("nodes", "late_s", "old"), [(64, 5.0, False), (64, 5.1, True), (128, 10.0, False), (128, 10.1, True)]
)
def test_in_a_large_job_it_may_be_told_later_of_what_a_node_holds(
    nodes: int, late_s: float, old: bool
) -> None:
    rows = [row(0, {0: (102,)}, {0: (102,)}), row(1, {0: (82,)}, {0: (82,)}, updated_s=100.0 - late_s)]
    found = protection(rows, (), 1, nodes)
    assert [copy.old for copy in found.items[Item("record", 0)]] == [False, old]


def test_what_is_ahead_of_what_everything_else_can_give_is_not_old() -> None:
    # Of shard 1 there is nothing newer than step 30, so shard 0 is not asked for anything newer either.
    rows = [
        row(0, {0: (100,), 1: (30,)}, {0: (100,), 1: (100,)}),
        row(1, {0: (41,)}, {0: (100,), 1: (100,)}),
    ]
    found = protection(rows, (), 2, 2)
    assert not any(copy.old for copies in found.items.values() for copy in copies)


def test_where_something_is_held_by_nobody_nothing_else_is_old() -> None:
    rows = [row(0, {0: (100,)}, {0: (100,)}), row(1, {0: (41,)}, {0: (100,)})]
    found = protection(rows, (), 2, 2)
    assert found.step is None
    assert not any(copy.old for copies in found.items.values() for copy in copies)


def test_a_job_that_stands_still_is_held_as_it_was() -> None:
    # A rank of node 0 waits for something; nothing new has been told of the others for an hour.
    rows = [row(0, {0: (7, 8)}, {0: (7, 8)}, updated_s=3700.0), row(1, {0: (8,)}, {0: (8,)}, updated_s=100.0)]
    assert protection(rows, (), 1, 2).after == (8, 8, None)


def test_thousands_of_nodes_are_no_matter_of_pairs() -> None:
    count = 4000
    found = protection(ring(count, (1, 2, 3), copies=1), (), count, count)
    assert found.after == (3, 3, None)
    assert len(found.exposure.two) == count


def test_what_is_of_no_rank_of_the_job_or_has_no_step_is_not_counted() -> None:
    rows = [*ring(3, (5,)), row(3, {3: (9,), 0: ()}, {3: (9,), 1: ()})]
    found = protection(rows, (), 3, 4)
    assert found.items.keys() == {Item(kind, n) for kind in ("tensors", "record") for n in range(3)}
    assert found.step == 5
    assert all(copy.node != 3 for copies in found.items.values() for copy in copies)
    assert found.ranks == {0: (0,), 1: (1,), 2: (2,)}
