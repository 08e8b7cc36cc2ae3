"""The cache: readers wait no longer than they want and get no exception; Slurm is asked within bounds."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.slurm.adapter import Job, Node
from ckptless.daemon.slurm.cached import CachedSlurm
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.errors import SlurmRefusedError, SlurmUnreachableError
from ckptless.daemon.slurm.freshness import PollPace

PACE = PollPace(min_interval_s=0.05, most_interval_s=0.2)


class FakeClock:
    """The event loop's time, which these tests let pass for real but in small steps."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class FakeSlurm(Commands):
    """A slurmctld that answers, hangs or is away, and counts."""

    def __init__(self) -> None:
        self.table = [Job(job_id=1, user_id=1000, state="RUNNING", nodes=("n1",))]
        self.queries = 0
        self.at_once = 0
        self.most_at_once = 0
        self.takes_s = 0.0
        self.error: Exception | None = None
        self.orders: list[str] = []
        self.closed = False

    async def aclose(self) -> None:
        self.closed = True

    async def jobs(self, *, deadline_s: float = 10.0) -> tuple[Job, ...]:
        self.queries += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        known = tuple(self.table)
        try:
            await asyncio.sleep(self.takes_s)
            if self.error:
                raise self.error
            return known
        finally:
            self.at_once -= 1

    async def nodes(self, *, deadline_s: float = 10.0) -> tuple[Node, ...]:
        await self.jobs()
        return (Node(name="n1", address="n1", state="IDLE"),)

    async def drain(self, name: str, reason: str, *, deadline_s: float = 10.0) -> None:
        self.orders.append(f"drain {name}")
        if self.error:
            raise self.error


Test = Callable[[FakeSlurm, CachedSlurm], Coroutine[Any, Any, None]]


def with_cache(test: Test) -> Callable[[], None]:
    """A test that gets a fake and a cache in front of it, closed and without tasks left afterwards."""

    def run() -> None:
        async def body() -> None:
            fake = FakeSlurm()
            cached = CachedSlurm(fake, FakeClock(), PACE)
            try:
                async with asyncio.timeout(20.0):
                    await test(fake, cached)
            finally:
                await cached.aclose()
            assert fake.closed
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


@with_cache
async def test_many_readers_cost_one_query(fake: FakeSlurm, cached: CachedSlurm) -> None:
    fake.takes_s = 0.02
    all_jobs = asyncio.gather(*(cached.jobs() for _ in range(200)))
    one_job = asyncio.gather(*(cached.job(1) for _ in range(200)))
    assert all(reading.fresh and reading.value for reading in await all_jobs)
    assert all(reading.fresh and reading.value for reading in await one_job)
    assert fake.queries == 1
    await cached.jobs(max_age_s=60.0)
    assert fake.queries == 1


@with_cache
async def test_greedy_readers_cost_no_more_than_the_interval(fake: FakeSlurm, cached: CachedSlurm) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while (passed := loop.time() - began) < 0.5:
        await asyncio.gather(*(cached.jobs(max_age_s=0.0, wait_s=0.0) for _ in range(20)))
        await asyncio.sleep(0.001)
    assert fake.queries <= passed / PACE.min_interval_s + 1
    assert fake.queries >= 3
    assert fake.most_at_once == 1


@with_cache
async def test_away_from_the_start(fake: FakeSlurm, cached: CachedSlurm) -> None:
    fake.error = SlurmUnreachableError("nobody there")
    reading = await cached.jobs()
    assert (reading.value, reading.age_s, reading.fresh) == (None, math.inf, False)
    assert reading.trouble == "nobody there"
    assert (await cached.job(1)).value is None


@pytest.mark.parametrize(
    "error",
    [SlurmUnreachableError("away"), SlurmRefusedError("no"), ProtocolError("noise"), OSError(24, "files")],
)
def test_the_last_known_state_with_its_age(error: Exception) -> None:
    @with_cache
    async def body(fake: FakeSlurm, cached: CachedSlurm) -> None:
        before = await cached.jobs()
        fake.error = error
        await asyncio.sleep(0.06)
        for _ in range(50):
            reading = await cached.jobs(max_age_s=0.01, wait_s=0.01)
            assert reading.value == before.value
            assert not reading.fresh
            await asyncio.sleep(0.005)
        assert reading.age_s > 0.2
        assert reading.trouble == str(error)
        # 0.05, then 0.1 and 0.2 apart.
        assert fake.queries <= 5
        fake.error = None
        fake.table = []
        await asyncio.sleep(0.21)
        again = await cached.jobs(max_age_s=0.01)
        assert (again.value, again.fresh, again.trouble) == ((), True, "")

    body()


@with_cache
async def test_who_does_not_wait_gets_what_there_is(fake: FakeSlurm, cached: CachedSlurm) -> None:
    fake.takes_s = 5.0
    loop = asyncio.get_running_loop()
    began = loop.time()
    reading = await cached.jobs(wait_s=0.05)
    assert loop.time() - began < 1.0
    assert reading.value is None
    assert "no answer yet" in reading.trouble
    await cached.jobs(wait_s=0.05)
    assert fake.queries == 1


@with_cache
async def test_a_reader_that_is_cancelled_takes_no_query_along(fake: FakeSlurm, cached: CachedSlurm) -> None:
    fake.takes_s = 0.1
    first = asyncio.create_task(cached.jobs())
    await asyncio.sleep(0.01)
    second = asyncio.create_task(cached.jobs())
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second).fresh
    assert fake.queries == 1


@with_cache
async def test_an_order_makes_what_is_known_old(fake: FakeSlurm, cached: CachedSlurm) -> None:
    await cached.jobs()
    fake.table = []
    await cached.order(fake.drain("n1", "x"))
    assert (await cached.jobs(max_age_s=60.0)).value == ()
    assert fake.queries == 2


@with_cache
async def test_a_query_under_way_during_an_order_is_not_the_last_word(
    fake: FakeSlurm, cached: CachedSlurm
) -> None:
    fake.takes_s = 0.05
    early = asyncio.create_task(cached.jobs())
    await asyncio.sleep(0.01)
    fake.table = []
    await cached.order(fake.drain("n1", "x"))
    reading = await cached.jobs(max_age_s=60.0)
    assert (reading.value, reading.fresh) == ((), True)
    await early


@with_cache
async def test_an_order_that_failed_may_have_been_carried_out(fake: FakeSlurm, cached: CachedSlurm) -> None:
    await cached.jobs()
    fake.error = SlurmUnreachableError("no answer")
    with pytest.raises(SlurmUnreachableError):
        await cached.order(fake.drain("n1", "x"))
    fake.error, fake.takes_s = None, 5.0
    assert not (await cached.jobs(max_age_s=60.0, wait_s=0.0)).fresh


@with_cache
async def test_a_job_that_has_just_begun_is_found(fake: FakeSlurm, cached: CachedSlurm) -> None:
    assert (await cached.job(1)).value is not None
    fake.table.append(Job(job_id=2, user_id=1000, state="RUNNING"))
    reading = await cached.job(2, max_age_s=60.0)
    assert reading.value is not None
    assert reading.value.job_id == 2
    none = await cached.job(3, max_age_s=60.0)
    assert (none.value, none.fresh) == (None, True)
    assert (await cached.node("n1")).value is not None
    assert (await cached.node("n2")).value is None


@with_cache
async def test_closing_ends_a_query_under_way(fake: FakeSlurm, cached: CachedSlurm) -> None:
    fake.takes_s = 60.0
    await cached.jobs(wait_s=0.01)
    await cached.nodes(wait_s=0.01)
