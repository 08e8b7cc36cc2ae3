"""How long the batch script of a preempted job stays, and when it requeues the job by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest

from ckptless.daemon.slurm import requeue as module
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.ending import Ending
from ckptless.daemon.slurm.errors import SlurmUnreachableError
from ckptless.daemon.slurm.requeue import LATE_S, LONGEST_S, stay

GRACE = Ending(state="RUNNING", preempt_s=1000.0)
KNOWN = Ending(state="RUNNING", preempt_s=1000.0, end_s=1060.0)
OVER = Ending(state="COMPLETING", preempt_s=1000.0, restarts=1)
AWAY = None


class Asked:
    """Gives one answer after the other, ten seconds apart, and the last one for ever."""

    def __init__(self, *answers: Ending | None) -> None:
        self._answers: Iterator[Ending | None] = iter(answers)
        self._last = answers[-1]
        self.now_s = 990.0

    async def ending(self, job_id: int, *, deadline_s: float) -> Ending:
        assert job_id == 4711
        self.now_s += 10.0
        found = next(self._answers, self._last)
        if found is None:
            raise SlurmUnreachableError("slurmctld is away")
        return found


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    told: list[tuple[int, str]] = []

    async def requeue(job_id: int, why: str) -> bool:
        told.append((job_id, why))
        return True

    monkeypatch.setattr(module, "requeue", requeue)
    return told


def stayed_s(*answers: Ending | None) -> float:
    asked = Asked(*answers)
    asyncio.run(stay(4711, cast(Commands, asked), lambda: asked.now_s, poll_s=0.0))
    return asked.now_s - 1000.0


@pytest.mark.parametrize("answer", [AWAY, OVER, Ending(state="RUNNING"), Ending(state="COMPLETING")])
def test_a_job_that_is_not_in_its_grace_time_ends_at_once(
    answer: Ending | None, requeued: list[tuple[int, str]]
) -> None:
    assert stayed_s(answer) == 0.0
    assert requeued == []


@pytest.mark.parametrize("answers", [(GRACE, GRACE, OVER), (KNOWN, AWAY, OVER)])
def test_it_stays_until_slurm_has_acted(
    answers: tuple[Ending | None, ...], requeued: list[tuple[int, str]]
) -> None:
    assert stayed_s(*answers) == 20.0
    assert requeued == []


def test_where_slurm_forgets_it_the_job_is_requeued(requeued: list[tuple[int, str]]) -> None:
    assert 60.0 + LATE_S <= stayed_s(GRACE, KNOWN) <= 60.0 + LATE_S + 20.0
    assert len(requeued) == 1


@pytest.mark.parametrize("ever", [GRACE, AWAY])
def test_it_does_not_stay_for_ever(ever: Ending | None, requeued: list[tuple[int, str]]) -> None:
    assert stayed_s(GRACE, ever) <= LONGEST_S + 20.0
    assert len(requeued) == 1
