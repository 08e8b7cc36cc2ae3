"""At a job's end its agents agree on the last step to save, whoever of them is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ckptless.daemon.agent.saving.last import agree, leave
from ckptless.daemon.agent.saving.plan import Task
from ckptless.daemon.protocol.messages import Holdings

LONG_S = 30.0


def holds(*ranks: int, steps: tuple[int, ...] = (4, 5)) -> Holdings:
    """Records and shards of these ranks."""
    return Holdings(
        tensors=tuple((rank, steps) for rank in ranks), records=tuple((rank, rank, steps) for rank in ranks)
    )


def test_all_come_to_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "ending"
    held = [holds(0, 1), holds(1, steps=(3, 4)), holds()]

    async def all_of_them() -> list[Task | None]:
        return await asyncio.gather(
            *(agree(folder, node, (0, 1, 2), held[node], 2, LONG_S) for node in range(3))
        )

    tasks = asyncio.run(all_of_them())
    assert tasks == [Task(step=5, shards=((0, 0), (1, 0)), records=((0, 0), (1, 0)))] * 3
    for node in range(3):
        assert folder.exists()
        leave(folder, node)
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_come_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    task = asyncio.run(agree(tmp_path / "e", 0, (0, 1), holds(0, 1), 2, gather_s=0.05))
    assert task is not None
    assert task.step == 5
    # Whoever comes later, with more, follows: there is one decision.
    assert asyncio.run(agree(tmp_path / "e", 1, (0, 1), holds(0, 1, steps=(6,)), 2, LONG_S)) == task


def test_nothing_is_not_decided_where_one_who_comes_late_has_what_the_others_lack(tmp_path: Path) -> None:
    folder = tmp_path / "e"

    async def one_late() -> list[Task | None]:
        first = asyncio.create_task(agree(folder, 0, (0, 1, 2), holds(0), 2, gather_s=0.5))
        await asyncio.sleep(1.0)
        assert not first.done()
        return [await agree(folder, 1, (0, 1, 2), holds(1), 2, gather_s=LONG_S), await first]

    for task in asyncio.run(one_late()):
        assert task is not None
        assert (task.step, task.nodes) == (5, (0, 1))


def test_an_older_step_is_not_decided_where_one_who_comes_late_makes_the_newest_whole(tmp_path: Path) -> None:
    """The first has all of step 5, and of step 6 its own part alone."""
    folder = tmp_path / "e"
    first_holds = Holdings(tensors=((0, (5, 6)), (1, (5,))), records=((0, 0, (5, 6)), (1, 1, (5,))))

    async def one_late() -> list[Task | None]:
        first = asyncio.create_task(agree(folder, 0, (0, 1), first_holds, 2, gather_s=0.5))
        await asyncio.sleep(1.0)
        assert not first.done()
        return [await agree(folder, 1, (0, 1), holds(1, steps=(5, 6)), 2, gather_s=LONG_S), await first]

    for task in asyncio.run(one_late()):
        assert task is not None
        assert (task.step, task.nodes) == (6, (0, 1))
    alone = asyncio.run(agree(tmp_path / "alone", 0, (0, 1), first_holds, 2, gather_s=0.05))
    assert alone is not None
    assert alone.step == 5


def test_nothing_is_decided_in_the_end(tmp_path: Path) -> None:
    assert asyncio.run(agree(tmp_path / "e", 0, (0, 1), holds(0), 2, gather_s=0.05)) is None


def test_nothing_to_save_is_a_decision_too(tmp_path: Path) -> None:
    assert asyncio.run(agree(tmp_path / "e", 0, (0,), holds(), 1, LONG_S)) is None
