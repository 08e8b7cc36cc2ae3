"""Which step to go on from: of every rank the record, and of its shard the tensors, must be held."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.planning.sources import NoCommonStepError, Same, once, state_sources
from ckptless.daemon.protocol import messages as m

STEPS = 5
Tensors = dict[int, Sequence[int]]
Records = dict[tuple[int, int], Sequence[int]]  # by (rank, shard)

few_steps = st.frozensets(st.integers(0, STEPS - 1)).map(sorted)


def view(node: int, tensors: Tensors, records: Records, lost: str | None = None) -> NodeView:
    info = m.NodeInfo(node=node, name=f"n{node}", address="a", agent_port=1)
    holdings = m.Holdings(
        tensors=tuple((shard, tuple(steps)) for shard, steps in sorted(tensors.items())),
        records=tuple((rank, shard, tuple(steps)) for (rank, shard), steps in sorted(records.items())),
    )
    state = m.AgentState(seq=1, slots=(), holdings=holdings, frozen=1)
    return NodeView(node, m.Introduction(info=info, pid=1), state, lost)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, NodeView], list[int]]:
    """Nodes that hold this and that, and each rank's shard."""
    shards = draw(st.sampled_from(([0], [0, 0, 0], [0, 1, 2], [0, 1, 0, 1])))
    nodes: dict[int, NodeView] = {}
    for node in range(draw(st.integers(1, 4))):
        tensors: Tensors = {shard: draw(few_steps) for shard in set(shards) if draw(st.booleans())}
        records: Records = {
            (rank, shard): draw(few_steps) for rank, shard in enumerate(shards) if draw(st.booleans())
        }
        nodes[node] = view(node, tensors, records, draw(st.sampled_from((None, None, "dark"))))
    return nodes, shards


def gives(node: NodeView, step: int, *, rank: int | None = None, shard: int | None = None) -> bool:
    assert node.state is not None
    assert node.state.holdings is not None
    if not node.usable:
        return False
    if shard is not None:
        return step in dict(node.state.holdings.tensors).get(shard, ())
    return any(step in steps for of, _, steps in node.state.holdings.records if of == rank)


def possible(nodes: dict[int, NodeView], shards: list[int]) -> list[int]:
    return [
        step
        for step in range(STEPS)
        if all(any(gives(n, step, rank=rank) for n in nodes.values()) for rank in range(len(shards)))
        and all(any(gives(n, step, shard=shard) for n in nodes.values()) for shard in shards)
    ]


@given(jobs())
def test_it_is_the_newest_step_that_usable_nodes_can_give(
    case: tuple[dict[int, NodeView], list[int]],
) -> None:
    nodes, shards = case
    places = [m.Place(node=rank % len(nodes), slot=rank) for rank in range(len(shards))]
    try:
        step = state_sources(nodes, places, progress=0).step
    except NoCommonStepError:
        step = None
    assert step == max(possible(nodes, shards), default=None)


@given(jobs())
def test_whoever_is_named_can_give_it(case: tuple[dict[int, NodeView], list[int]]) -> None:
    nodes, shards = case
    places = [m.Place(node=rank % len(nodes), slot=rank) for rank in range(len(shards))]
    try:
        sources = state_sources(nodes, places, progress=0)
    except NoCommonStepError:
        assert not possible(nodes, shards)
        return
    if sources.step is None:
        assert not possible(nodes, shards)
        return
    assert sources.shards == tuple(shards)
    assert [shard for shard, _ in sources.tensor_nodes] == sorted(set(shards))
    for shard, holders in sources.tensor_nodes:
        assert set(holders) == {n for n, view in nodes.items() if gives(view, sources.step, shard=shard)}
    for rank, holders in enumerate(sources.record_nodes):
        assert set(holders) == {n for n, view in nodes.items() if gives(view, sources.step, rank=rank)}
        home = places[rank].node
        assert home not in holders or holders[0] == home


def test_the_only_copy_of_a_shard_decides() -> None:
    """Rank 1's node is lost; another holds its shard, but a step behind."""
    nodes = {
        0: view(0, {0: (6, 7)}, {(0, 0): (6, 7), (1, 1): (6, 7)}),
        1: view(1, {1: (6, 7)}, {(1, 1): (6, 7)}, "dark"),
        2: view(2, {1: (5, 6)}, {}),
    }
    places = [m.Place(node=0, slot=0), m.Place(node=2, slot=0)]
    sources = state_sources(nodes, places, progress=7)
    assert (sources.step, sources.tensor_nodes) == (6, ((0, (0,)), (1, (2,))))


def test_without_any_state_it_begins_anew_only_where_no_step_was_made() -> None:
    places = [m.Place(node=0, slot=0)]
    assert state_sources({0: view(0, {}, {})}, places, progress=0).step is None
    with pytest.raises(NoCommonStepError):
        state_sources({0: view(0, {}, {})}, places, progress=1)
    with pytest.raises(NoCommonStepError):
        state_sources({0: view(0, {0: (0, 1)}, {})}, places, progress=0)


def test_what_is_missing_is_named() -> None:
    nodes = {
        0: view(0, {0: (6, 7)}, {(0, 0): (6, 7), (1, 1): (6, 7)}),
        1: view(1, {1: (3,)}, {}),
    }
    places = [m.Place(node=0, slot=0), m.Place(node=1, slot=0)]
    with pytest.raises(NoCommonStepError, match=r"rank 1's records .* \[6, 7\], its tensors for steps \[3\]"):
        state_sources(nodes, places, progress=7)


def test_the_rank_is_named_whose_newest_step_is_the_oldest() -> None:
    places = [m.Place(node=0, slot=rank) for rank in range(3)]
    holds = {0: (1, 9), 1: (3, 4), 2: (5, 8)}
    nodes = {0: view(0, dict(holds), {(rank, rank): steps for rank, steps in holds.items()})}
    with pytest.raises(NoCommonStepError, match=r"rank 1's records .* \[3, 4\], its tensors for .* \[3, 4\]"):
        state_sources(nodes, places, progress=9)
    # A rank of which nobody has anything is worse off than any other.
    with pytest.raises(NoCommonStepError, match=r"rank 3's records .* \[\], its tensors for steps \[\]"):
        state_sources(nodes, [*places, m.Place(node=0, slot=3)], progress=9)


def test_the_tensors_that_are_missing_are_those_of_the_shard_that_its_records_name() -> None:
    nodes = {
        0: view(0, {2: (6, 7), 3: (2,)}, {(0, 2): (6, 7), (1, 3): (7,)}),
        1: view(1, {}, {(1, 2): ()}),
    }
    places = [m.Place(node=0, slot=0), m.Place(node=1, slot=0)]
    with pytest.raises(NoCommonStepError, match=r"rank 1's records .* \[7\], its tensors for steps \[2\]"):
        state_sources(nodes, places, progress=7)
    nodes[1] = view(1, {3: (6, 7)}, {})
    assert state_sources(nodes, places, progress=7).shards == (2, 3)


def test_a_node_that_has_told_nothing_yet_gives_nothing() -> None:
    nodes = {node: view(node, {0: (6,)}, {(0, 0): (6,)}) for node in range(3)}
    nodes[1].state = None
    nodes[2].state = m.AgentState(seq=1, slots=())
    sources = state_sources(nodes, [m.Place(node=0, slot=0)], progress=6)
    assert (sources.step, sources.record_nodes) == (6, ((0,),))


def test_a_record_of_which_no_step_is_held_says_nothing_of_its_rank() -> None:
    nodes = {0: view(0, {0: (6,)}, {(0, 0): (6,)}), 1: view(1, {}, {(0, 5): ()})}
    sources = state_sources(nodes, [m.Place(node=0, slot=0)], progress=6)
    assert (sources.step, sources.shards) == (6, (0,))


def test_who_has_a_step_is_told_by_node_whatever_else_is_held_beside_it() -> None:
    nodes = {
        0: view(0, {0: (5,), 1: (6,), 2: (5, 6)}, {(0, 0): (5,), (1, 1): (6,), (2, 2): (6,)}),
        1: view(1, {0: (6,), 1: (5,), 2: (6,)}, {(0, 0): (6,), (1, 1): (5,), (2, 2): (6,)}),
        2: view(2, {1: (6,), 2: (5,)}, {(1, 1): (6,), (2, 2): (5,)}),
    }
    sources = state_sources(nodes, [m.Place(node=node, slot=0) for node in (1, 0, 1)], progress=6)
    assert sources.step == 6
    assert sources.tensor_nodes == ((0, (1,)), (1, (0, 2)), (2, (0, 1)))
    assert sources.record_nodes == ((1,), (0, 2), (1, 0))


def test_what_nodes_tell_alike_is_in_memory_once() -> None:
    def told(node: int) -> m.Holdings:
        decoded = msgspec.msgpack.encode(view(node, {0: [3, 4], 1: [4]}, {(0, 0): [3, 4], (1, 0): [4]}).state)
        state = msgspec.msgpack.decode(decoded, type=m.AgentState)
        assert state.holdings is not None
        return state.holdings

    same: Same = {}
    first, second = told(0), told(1)
    kept = [once(first, same), once(second, same)]
    assert kept == [first, second]
    for one, other in ((kept[0].tensors, kept[1].tensors), (kept[0].records, kept[1].records)):
        assert all(a is b for a, b in zip(one, other, strict=True))
    assert kept[0].tensors[0][1] is kept[0].records[0][2]
