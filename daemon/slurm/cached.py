"""Slurm's last known state with its age: bounded polling, and an answer when slurmctld is away.

Readers never get an exception for Slurm's sake: they get the last answer, how old it is, and what the trouble
is. Orders (drain, cancel, ...) are given to the backend itself, within `order`, as they make what is known
stale.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.slurm.adapter import DEADLINE_S, Job, Node
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.errors import SlurmUnreachableError
from ckptless.daemon.slurm.freshness import PollPace, Track

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Generic[T]):
    """A fact that is known. `value` is None if there never was an answer; then `age_s` is inf.

    `fresh` says that its query began late enough for what was asked, and after our own last order. `trouble`
    says why the newest query had no answer, "" if it had.
    """

    value: T | None
    age_s: float
    fresh: bool
    trouble: str = ""

    def require_fresh(self, about: str) -> T | None:
        """Return the value. Raises SlurmUnreachableError where it is not fresh."""
        if not self.fresh:
            raise SlurmUnreachableError(f"Slurm cannot be asked about {about}: {self.trouble or 'no answer'}")
        return self.value


class Time(Protocol):
    """`clock.Clock`."""

    def now(self) -> float:
        """Seconds, never going back."""
        ...


class _Question(Generic[T]):
    """One kind of question: its last answer, and the query under way."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Time, pace: PollPace) -> None:
        self._ask = ask
        self._clock = clock
        self._value: T | None = None
        self._query: asyncio.Task[None] | None = None
        self.track = Track(pace)

    async def read(self, max_age_s: float, wait_s: float) -> Reading[T]:
        """At most `max_age_s` old if that is to be had within `wait_s`; else what there is."""
        track, deadline = self.track, Deadline(wait_s)
        oldest_s = self._clock.now() - max_age_s
        # At most: wait for a query that is too old, until the next may begin, and for that.
        for _ in range(3):
            if track.fresh(oldest_s):
                break
            if not track.in_flight:
                pause_s = track.next_s - self._clock.now()
                if pause_s > 0:
                    if track.failures or pause_s > deadline.left_s:
                        break
                    await asyncio.sleep(pause_s)
                    continue
                track.begin(self._clock.now())
                self._query = asyncio.create_task(self._run())
            assert self._query is not None
            # The query belongs to all readers: it goes on when one of them has waited long enough.
            await asyncio.wait({self._query}, timeout=deadline.left_s)
        now_s, fresh, trouble = self._clock.now(), track.fresh(oldest_s), track.trouble
        if track.in_flight and not fresh and not trouble:
            trouble = f"asked {now_s - track.asked_s:.1f} s ago, no answer yet"
        return Reading(value=self._value, age_s=now_s - track.answered_s, fresh=fresh, trouble=trouble)

    async def _run(self) -> None:
        trouble = "the query was ended"
        try:
            self._value = await self._ask()
            trouble = ""
        except (CkptlessError, OSError) as error:
            trouble = str(error) or type(error).__name__
        finally:
            self.track.end(trouble)

    async def aclose(self) -> None:
        """End the query under way."""
        if self._query is not None:
            self._query.cancel()
            await asyncio.wait({self._query})


class CachedSlurm:
    """A backend, `direct`, with a memory. Its owner closes it, which closes the backend as well.

    `query_s` bounds one query: with slurmctld away, that is how long Slurm's own commands try.
    """

    def __init__(
        self, direct: Commands, clock: Time, pace: PollPace | None = None, query_s: float = DEADLINE_S
    ) -> None:
        self.direct = direct
        self._clock = clock
        pace = pace or PollPace()
        self._jobs = _Question(lambda: direct.jobs(deadline_s=query_s), clock, pace)
        self._nodes = _Question(lambda: direct.nodes(deadline_s=query_s), clock, pace)

    async def aclose(self) -> None:
        """End the queries under way, then the backend."""
        await self._jobs.aclose()
        await self._nodes.aclose()
        await self.direct.aclose()

    async def order(self, order: Awaitable[T]) -> T:
        """Await an order to `direct`. Also one that failed, or was cancelled, may have changed something."""
        try:
            # no deadline: `deadline_s`, which the order itself has
            return await order
        finally:
            now_s = self._clock.now()
            for question in (self._jobs, self._nodes):
                question.track.change(now_s)

    async def jobs(self, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[tuple[Job, ...]]:
        """All jobs. Never raises for Slurm's sake."""
        return await self._jobs.read(max_age_s, wait_s)

    async def nodes(self, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[tuple[Node, ...]]:
        """All nodes. Never raises for Slurm's sake."""
        return await self._nodes.read(max_age_s, wait_s)

    async def job(self, job_id: int, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[Job]:
        """One job, out of all. `value` None with `fresh`: Slurm knows no such job, asked after this call."""
        return await self._find(self._jobs, lambda job: job.job_id == job_id, max_age_s, wait_s)

    async def node(self, name: str, *, max_age_s: float = 2.0, wait_s: float = 5.0) -> Reading[Node]:
        """One node, out of all. `value` None with `fresh`: Slurm knows no such node, asked after the call."""
        return await self._find(self._nodes, lambda node: node.name == name, max_age_s, wait_s)

    async def _find(
        self, question: _Question[tuple[T, ...]], wanted: Callable[[T], bool], max_age_s: float, wait_s: float
    ) -> Reading[T]:
        deadline = Deadline(wait_s)
        known = await question.read(max_age_s, wait_s)
        found = _first(known, wanted)
        if found is None and known.fresh:
            # It may be younger than what is known: who asks for a job has often just started it.
            known = await question.read(0.0, deadline.left_s)
            found = _first(known, wanted)
        return Reading(value=found, age_s=known.age_s, fresh=known.fresh, trouble=known.trouble)


def _first(known: Reading[tuple[T, ...]], wanted: Callable[[T], bool]) -> T | None:
    return next((value for value in known.value or () if wanted(value)), None)
