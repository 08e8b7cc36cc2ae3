"""Computed ids: the same everywhere, others for every other communicator, and they prove themselves."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.nccl.ids import MAX_LISTS, NcclIds, generation_of, magic_of
from ckptless.daemon.agent.nccl.wire import (
    Address,
)

from .nccl_rank import decode_id

KEY = b"k" * 32
NODES = [Address(f"10.0.0.{n}", 4000 + n) for n in range(1, 4)]
# Uneven: three ranks on the first node, two on the second, one on the third; and not in order.
HOMES = [NODES[n] for n in (0, 1, 0, 2, 0, 1)]


def test_every_agent_computes_the_same_list() -> None:
    one, other = NcclIds(KEY, 3, HOMES), NcclIds(KEY, 3, list(HOMES))
    for group, count in ((b"default_pg/0//cuda//", 6), (b"default_pg/0//7//cuda//", 2), (b"", 1)):
        assert one.ids(group, 0, count) == other.ids(group, 0, count)
        assert len(one.ids(group, 0, count)) == count


def test_each_root_of_the_world_is_on_its_ranks_node_and_all_have_one_magic() -> None:
    ids = [decode_id(data) for data in NcclIds(KEY, 3, HOMES).ids(b"world", 0, 6)]
    assert [unique.root for unique in ids] == HOMES
    assert {unique.magic for unique in ids} == {magic_of(KEY, 3, b"world", 0)}


def test_with_fewer_roots_each_is_on_the_node_of_its_blocks_first_rank() -> None:
    """As torch asks for them with two ranks for a root: three roots; and with four two, of three ranks."""
    for ranks_per_root, roots in ((2, [HOMES[0], HOMES[2], HOMES[4]]), (4, [HOMES[0], HOMES[3]])):
        ids = NcclIds(KEY, 3, HOMES, ranks_per_root).ids(b"world", 0, len(roots))
        assert [decode_id(data).root for data in ids] == roots


@given(st.binary(max_size=40), st.integers(1, 5))
def test_roots_of_other_groups_are_dealt_out_over_nodes_with_ranks(group: bytes, count: int) -> None:
    roots = NcclIds(KEY, 1, HOMES).roots(group, count)
    assert set(roots) <= set(NODES)
    assert len(set(roots)) == min(count, len(NODES))


def test_key_generation_group_and_round_all_make_another_magic() -> None:
    made = {
        magic_of(key, generation, group, round_)
        for key, generation, group, round_ in itertools.product(
            (KEY, b"other"), (1, 2, 256), (b"", b"a", b"b"), (0, 1, 256)
        )
    }
    assert len(made) == 2 * 3 * 3 * 3


@given(st.integers(1, 10**6), st.binary(max_size=60), st.integers(0, 1000))
def test_a_magic_proves_its_generation_to_whoever_has_the_key(
    generation: int, group: bytes, round_: int
) -> None:
    magic = magic_of(KEY, generation, group, round_)
    assert generation_of(KEY, magic, range(generation - 3, generation + 4)) == generation
    assert generation_of(KEY, magic, [generation - 1, generation + 1]) is None
    assert generation_of(b"another job's", magic, range(generation - 3, generation + 4)) is None


def test_only_so_many_lists_are_kept() -> None:
    ids = NcclIds(KEY, 1, HOMES)
    for round_ in range(3 * MAX_LISTS):
        ids.ids(b"g", round_, 6)
    assert ids.ids.cache_info().currsize == MAX_LISTS
    assert decode_id(ids.ids(b"g", 0, 6)[0]).magic == magic_of(KEY, 1, b"g", 0)
