"""What the first generation goes on from: memory if all of it is there and the disk is not newer."""

from __future__ import annotations

from msgspec import structs

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.planning.plan import first_assignment
from ckptless.daemon.ckptlessd.planning.start import KEPT_CUT, start_from
from ckptless.daemon.protocol import messages as m

PLACES = tuple(m.Place(node=node, slot=0) for node in (0, 1))


def view(node: int, steps: tuple[int, ...], run: str = "7", generation: int = 1, **more: str) -> NodeView:
    """A node that has brought what it and its rank had."""
    holdings = m.Holdings(tensors=((node, steps),), records=((node, node, steps),))
    brought = m.Brought(run=run, generation=generation, ranks=2, holdings=holdings)
    info = m.NodeInfo(node=node, name=f"n{node}", address="", agent_port=1)
    hello = m.Introduction(info=info, pid=1, brought=brought if steps else None)
    return NodeView(node, hello, None, more.get("lost"))


def test_the_newest_step_that_all_have() -> None:
    start = start_from([view(0, (4, 5, 6)), view(1, (3, 4, 5))], PLACES, None)
    assert (start.sources.step, start.sources.shards) == (5, (0, 1))
    assert start.sources.tensor_nodes == ((0, (0,)), (1, (1,)))
    assert start.text == "step 5 from the memory of run 7, kept on 2 nodes"


def test_the_disk_if_it_is_newer() -> None:
    both = [view(0, (5,)), view(1, (5,))]
    assert start_from(both, PLACES, 4).sources.step == 5
    start = start_from(both, PLACES, 5)
    assert (start.sources.step, start.text.endswith("; the disk has step 5")) == (5, True)
    start = start_from(both, PLACES, 6)
    assert start.sources.step is None
    assert start.text == "step 6 from the disk; memory of run 7, kept on 2 nodes, has step 5"


def test_a_part_of_it_is_nothing() -> None:
    for nodes in ([view(0, (5,)), view(1, ())], [view(0, (5,)), view(1, (5,), lost="dark")]):
        start = start_from(nodes, PLACES, 3)
        assert start.sources.step is None
        assert start.text.startswith("step 3 from the disk; memory is not whole (no step that every rank")
        assert start_from(nodes, PLACES, None).text.startswith("from the beginning; memory is not whole")
    assert start_from([view(0, (5,)), view(1, (6,))], PLACES, None).sources.step is None


def test_runs_and_generations_are_never_mixed() -> None:
    for other in (view(1, (5,), run="7.1"), view(1, (5,), generation=2)):
        assert start_from([view(0, (5,)), other], PLACES, None).sources.step is None
    older = [view(0, (5,)), view(1, (5,))]
    newer = [NodeView(n + 2, view(n, (9,), generation=2).hello, None, None) for n in (0, 1)]
    start = start_from([*older, *newer], PLACES, None)
    assert start.sources.step == 9
    assert start.sources.tensor_nodes == ((0, (2,)), (1, (3,)))
    # Also where the run that was first has come further.
    behind = [NodeView(n + 2, view(n, (4,), generation=2).hello, None, None) for n in (0, 1)]
    assert start_from([*older, *behind], PLACES, None).sources.step == 5


def test_nothing_to_choose_from() -> None:
    assert start_from([view(0, ()), view(1, ())], PLACES, None).text == ""
    assert start_from([view(0, ()), view(1, ())], PLACES, 3).text == "step 3 from the disk"


def test_a_memory_without_a_step_is_not_spoken_of() -> None:
    """Nodes that have kept nothing of a run that committed nothing."""
    brought = m.Brought(run="7", generation=1, ranks=2, holdings=m.Holdings(tensors=(), records=()))
    infos = [m.NodeInfo(node=n, name=f"n{n}", address="", agent_port=1) for n in (0, 1)]
    nodes = [NodeView(i.node, m.Introduction(info=i, pid=1, brought=brought), None, None) for i in infos]
    assert start_from(nodes, PLACES, None).text == ""
    assert start_from(nodes, PLACES, 3).text == "step 3 from the disk"


def kept(node: int, *shards: int, ranks: int, step: int = 5, cut: int = 1) -> NodeView:
    """A node that has brought these shards, and their ranks' records, of so many ranks."""
    holdings = m.Holdings(
        tensors=tuple((shard, (step,)) for shard in shards),
        records=tuple((shard, shard, (step,)) for shard in shards),
        cut=cut,
    )
    brought = m.Brought(run="7", generation=3, ranks=ranks, holdings=holdings)
    return NodeView(node, structs.replace(introduction(node), brought=brought), None, None)


def introduction(node: int) -> m.Introduction:
    return m.Introduction(info=m.NodeInfo(node=node, name=f"n{node}", address="", agent_port=1), pid=1)


def test_another_number_of_ranks_has_kept_it() -> None:
    start = start_from([kept(0, 0, 1, ranks=4), kept(1, 2, 3, ranks=4)], PLACES, 4)
    assert (start.sources.step, start.sources.cut, start.sources.shards) == (5, KEPT_CUT, (0, 1, 2, 3))
    assert start.sources.record_nodes == ((0,), (0,), (1,), (1,))
    assert start.text == "step 5 from the memory of run 7, kept on 2 nodes by 4 ranks; the disk has step 4"
    fewer = start_from([kept(0, 0, ranks=1), kept(1, ranks=1)], PLACES, None)
    assert (fewer.sources.cut, fewer.sources.shards) == (KEPT_CUT, (0,))
    # A part of it is nothing.
    assert start_from([kept(0, 0, 1, ranks=4), kept(1, 2, ranks=4)], PLACES, None).sources.step is None
    # One of them had the state of other ranks by then.
    mixed = [kept(0, 0, 1, ranks=4), kept(1, 2, 3, ranks=4, cut=2)]
    assert start_from(mixed, PLACES, None).sources.step is None


def test_the_first_generation_takes_its_parts_and_the_next_one_too() -> None:
    spec = m.JobSpec(
        job="7.1",
        command=("train.py",),
        nodes=2,
        spares=0,
        slots_per_node=1,
        limits=m.Limits(pong_s=1, leave_s=1, join_s=10, stall_s=10),
        sizes=(1, 2, 4),
    )
    nodes = {0: kept(0, 0, 1, ranks=4), 1: kept(1, 2, 3, ranks=4)}
    first = first_assignment(spec, nodes, 1, 0)
    assert (first.restore_step, first.shards, first.cut) == (5, (), 1)
    assert first.former is not None
    assert (first.former.cut, first.former.shards) == (KEPT_CUT, (0, 1, 2, 3))
    # As many as have kept it: they are these ranks.
    same = first_assignment(
        structs.replace(spec, slots_per_node=2, nodes=1), {0: kept(0, 0, 1, ranks=2)}, 1, 0
    )
    assert (same.restore_step, same.shards, same.former) == (5, (0, 1), None)
