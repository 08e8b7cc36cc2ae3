"""An agent without a daemon: who hears most of the others goes on; who does not, ends, and not too soon."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import pytest

from ckptless.daemon.agent.orphan import ASKED, Orphan, to_ask
from ckptless.daemon.api.messages import NodeInfo

LEASE_S = 0.4
DEADLINE_S = 20.0


def info(node: int) -> NodeInfo:
    return NodeInfo(node=node, name=f"n{node}", address="a", agent_port=1)


@dataclass
class Site:
    """The job as the agent of node 0 sees it."""

    nodes: int
    answer: set[int] = field(default_factory=set)
    daemon: bool = False
    mute: bool = False
    knocks: int = 0

    async def knock(self, of: NodeInfo) -> None:
        self.knocks += 1
        if of.node in self.answer:
            return
        if self.mute:
            await asyncio.sleep(DEADLINE_S)
        raise ConnectionRefusedError

    def orphan(self) -> Orphan:
        nodes = [info(node) for node in range(self.nodes)]
        return Orphan(0, LEASE_S, lambda: self.daemon, lambda: nodes, self.knock)


@pytest.mark.parametrize("mute", [False, True])
@pytest.mark.parametrize(("nodes", "answer", "ends"), [(4, {1, 2}, False), (4, {1}, True), (3, set(), True)])
def test_it_takes_more_than_half(nodes: int, answer: set[int], ends: bool, mute: bool) -> None:
    async def main() -> None:
        site = Site(nodes, answer, mute=mute)
        task = asyncio.create_task(site.orphan().over())
        began = time.monotonic()
        done, _ = await asyncio.wait({task}, timeout=DEADLINE_S if ends else 5 * LEASE_S)
        assert bool(done) is ends
        if ends:
            assert time.monotonic() - began > LEASE_S
            assert f"of {nodes} agents of the job it heard {len(answer) + 1}" in task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_with_a_daemon_nobody_is_asked_and_its_return_ends_the_matter() -> None:
    async def main() -> None:
        site = Site(3, daemon=True)
        task = asyncio.create_task(site.orphan().over())
        await asyncio.wait({task}, timeout=3 * LEASE_S)
        assert site.knocks == 0
        for _ in range(4):  # away for less than the lease, again and again
            site.daemon = False
            await asyncio.wait({task}, timeout=LEASE_S / 2)
            site.daemon = True
            await asyncio.wait({task}, timeout=LEASE_S / 2)
        assert site.knocks > 0
        assert not task.done()
        site.daemon = False
        await asyncio.wait_for(task, DEADLINE_S)

    asyncio.run(main())


def test_no_job_yet_no_lease() -> None:
    async def main() -> None:
        task = asyncio.create_task(Site(0).orphan().over())
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
