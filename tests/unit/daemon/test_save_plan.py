"""Which node writes what of a step that is saved, and which step that is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckptless.daemon.agent.saving import plan as save_plan
from ckptless.daemon.agent.saving.plan import Task, last_step, step_ahead
from ckptless.daemon.protocol.messages import Holdings


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


@pytest.mark.parametrize(
    ("steps", "every", "saved"),
    [
        (range(1, 13), 4, [4, 8, 12]),
        (range(5, 41, 5), 10, [10, 20, 30, 40]),
        (range(3, 40, 3), 10, [12, 21, 30]),
        ([7, 50, 51, 99, 100], 10, [50, 99, 100]),
        (range(1, 13), 0, []),
    ],
)
def test_of_the_steps_that_are_committed_those_are_saved_that_reach_a_multiple(
    steps: Sequence[int], every: int, saved: list[int]
) -> None:
    before = [0, *steps]
    assert [s for s, was in zip(steps, before, strict=False) if save_plan.is_due(s, was, every)] == saved


def test_a_step_that_is_committed_again_after_a_fault_is_saved_where_it_was_due() -> None:
    assert save_plan.is_due(20, 20, 10)
    assert not save_plan.is_due(21, 21, 10)
