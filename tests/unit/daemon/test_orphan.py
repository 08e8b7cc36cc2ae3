"""An agent without a daemon: who hears most of the others goes on; who does not, ends, and not too soon."""

import asyncio
import itertools
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from ckptless.daemon.agent.lease import ASKED, ROUND, SILENT, AgentLease, lease_over, to_ask
from ckptless.daemon.protocol.messages import NodeInfo

LEASE_S = 0.4
DEADLINE_S = 20.0


def info(node: int) -> NodeInfo:
    return NodeInfo(node=node, name=f"n{node}", address="a", agent_port=1)


@dataclass
class Site:
    """The job as the agent of node 0 sees it."""

    nodes: int
    answer: set[int] = field(default_factory=set)
    mute: bool = False
    knocks: int = 0

    async def knock(self, of: NodeInfo) -> None:
        self.knocks += 1
        if of.node in self.answer:
            return
        if self.mute:
            await asyncio.sleep(DEADLINE_S)
        raise ConnectionRefusedError

    def over(self) -> Coroutine[Any, Any, str]:
        """Return whose daemon is heard now, and then no more."""
        self.lease = AgentLease(LEASE_S, asyncio.get_running_loop().time())
        nodes = [info(node) for node in range(self.nodes)]
        return lease_over(0, self.lease, lambda: nodes, self.knock)


@pytest.mark.parametrize("mute", [False, True])
@pytest.mark.parametrize(("nodes", "answer", "ends"), [(4, {1, 2}, False), (4, {1}, True), (3, set(), True)])
def test_it_takes_more_than_half(nodes: int, answer: set[int], ends: bool, mute: bool) -> None:
    async def main() -> None:
        site = Site(nodes, answer, mute=mute)
        task = asyncio.create_task(site.over())
        began = time.monotonic()
        done, _ = await asyncio.wait({task}, timeout=DEADLINE_S if ends else 5 * LEASE_S)
        assert bool(done) is ends
        if ends:
            assert time.monotonic() - began > LEASE_S
            assert f"of {nodes} agents of the job it heard {len(answer) + 1}" in task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


async def _says_so(lease: AgentLease) -> None:
    while True:
        lease.renew(asyncio.get_running_loop().time())
        await asyncio.sleep(LEASE_S / 20)


def test_with_a_daemon_nobody_is_asked_and_its_return_ends_the_matter() -> None:
    async def main() -> None:
        site = Site(3)
        task = asyncio.create_task(site.over())
        daemon = asyncio.create_task(_says_so(site.lease))
        await asyncio.wait({task}, timeout=3 * LEASE_S)
        assert site.knocks == 0
        for _ in range(4):  # silent for less than the lease, again and again
            daemon.cancel()
            await asyncio.wait({task}, timeout=LEASE_S / 2)
            daemon = asyncio.create_task(_says_so(site.lease))
            await asyncio.wait({task}, timeout=LEASE_S / 2)
        assert site.knocks > 0
        assert not task.done()
        daemon.cancel()
        await asyncio.wait_for(task, DEADLINE_S)

    asyncio.run(main())


def test_a_lease_is_as_old_as_the_last_word_of_either() -> None:
    asked, few, enough = (0, 1, 2, 3, 4), {0, 1}, {0, 1, 2}
    lease = AgentLease(10.0, 100.0)
    assert not lease.must_ask(100.0 + 10 * SILENT)
    assert lease.must_ask(100.1 + 10 * SILENT)
    lease.asked(asked, few, 103.0)
    assert lease.must_ask(103.0)
    lease.asked(asked, few, 104.0)
    assert not lease.over(112.0)
    # What they have answered is as old as the question.
    lease.asked(asked, enough, 111.0)
    assert not lease.must_ask(113.0)
    assert lease.daemon_is_silent(113.0)
    for began in (114.0, 115.0):
        lease.asked(asked, few, began)
    assert not lease.over(111.0 + 10 * (1 + SILENT))
    assert lease.over(111.1 + 10 * (1 + SILENT))
    lease.renew(124.0)
    assert not lease.over(124.0)
    assert not lease.daemon_is_silent(125.0)


def test_who_was_stopped_itself_asks_twice_before_it_ends_anything() -> None:
    """All of the job was suspended for an hour: the daemon, or the others, get to say that they are there."""
    lease = AgentLease(10.0, 100.0)
    assert not lease.over(3700.0)
    lease.asked((0, 1, 2), {0}, 3700.0)
    assert not lease.over(3704.0)
    lease.asked((0, 1, 2), {0}, 3704.0)
    assert lease.over(3704.0)


def test_mute_agents_take_less_than_two_leases() -> None:
    """Each round takes all of its time; the first one begins as late as it can."""
    lease = AgentLease(10.0, 0.0)
    now = 10 * SILENT + 0.5
    while not lease.over(now):
        lease.asked((0, 1, 2), {0}, now)
        now += 10 * ROUND + 0.5
    assert now < 20.0


def test_no_job_yet_no_lease() -> None:
    async def main() -> None:
        task = asyncio.create_task(Site(0).over())
        done, _ = await asyncio.wait({task}, timeout=3 * LEASE_S)
        assert not done
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, 2, 6, 7, 8, 9, 50, 12_500])
def test_all_ask_the_same_and_never_too_many(count: int) -> None:
    nodes = [3 * node for node in range(count)]
    asked = to_ask(nodes)
    assert asked == to_ask(nodes[::-1])
    assert set(asked) <= set(nodes)
    assert len(set(asked)) == min(count, ASKED)


def test_two_halves_never_both_go_on() -> None:
    for count in range(1, 10):
        asked = set(to_ask(range(count)))
        for size in range(count + 1):
            for side in itertools.combinations(range(count), size):
                one, other = asked & set(side), asked - set(side)
                assert not (2 * len(one) > len(asked) and 2 * len(other) > len(asked))
