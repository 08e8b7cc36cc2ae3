"""Which node writes what of a step that is saved, and which step that is."""

from __future__ import annotations

from ckptless.daemon.agent.save_plan import Task, last_step, step_ahead
from ckptless.daemon.api.messages import Holdings


def held(tensors: dict[int, tuple[int, ...]], records: dict[int, tuple[int, tuple[int, ...]]]) -> Holdings:
    return Holdings(
        tensors=tuple(tensors.items()),
        records=tuple((rank, shard, steps) for rank, (shard, steps) in records.items()),
    )


def test_the_newest_step_of_which_all_is_there() -> None:
    """Two shards; the second is a step behind."""
    nodes = {
        0: held({0: (4, 5, 6)}, {0: (0, (4, 5, 6))}),
        1: held({1: (3, 4, 5)}, {1: (1, (3, 4, 5))}),
    }
    task = last_step(nodes, 2)
    assert task == Task(step=5, shards=((0, 0), (1, 1)), records=((0, 0), (1, 1)))
    assert task.nodes == (0, 1)
    assert task.shards_of(1) == (1,)
    assert task.records_of(0) == (0,)


def test_a_lost_nodes_part_is_written_by_who_holds_it() -> None:
    nodes = {0: held({0: (4, 5), 1: (4, 5)}, {0: (0, (4, 5)), 1: (1, (4, 5))})}
    task = last_step(nodes, 2)
    assert task == Task(step=5, shards=((0, 0), (1, 0)), records=((0, 0), (1, 0)))


def test_twins_are_written_once() -> None:
    nodes = {node: held({0: (7,)}, {node: (0, (7,))}) for node in range(3)}
    task = last_step(nodes, 3)
    assert task == Task(step=7, shards=((0, 0),), records=((0, 0), (1, 1), (2, 2)))


def test_a_shard_is_written_where_a_record_describes_it() -> None:
    nodes = {
        0: held({0: (5,), 1: (5,)}, {0: (0, (5,))}),
        2: held({1: (5,)}, {1: (1, (5,))}),
    }
    task = last_step(nodes, 2)
    assert task is not None
    assert task.shards == ((0, 0), (1, 2))


def test_where_something_is_missing_an_older_step_or_none() -> None:
    nodes = {0: held({0: (4, 5), 1: (4,)}, {0: (0, (4, 5)), 1: (1, (4, 5))})}
    assert (task := last_step(nodes, 2)) is not None
    assert task.step == 4
    assert last_step(nodes, 3) is None
    assert last_step({}, 1) is None
    assert last_step({0: held({}, {})}, 1) is None


def test_a_step_that_everybody_can_still_save() -> None:
    assert step_ahead([7, 8, 7], steps_per_s=0.1) == 7, "slow: what all have now"
    assert step_ahead([7, 8, 7], steps_per_s=100.0) == 208, "fast: one that comes in two seconds"
