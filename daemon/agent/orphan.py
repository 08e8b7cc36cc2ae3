"""An agent whose daemon is away goes on only while it hears enough of the job's other agents.

The lease of a node is held by its daemon (control.lease). While that is away nobody else would end the ranks
of a node that is cut off, so the agent asks the other agents itself, and keeps the lease by the same rule.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.control.lease import Lease

logger = logging.getLogger(__name__)

# As many as there are voters: an agent does not know who these are.
ASKED = 7
INTERVAL_S = 0.5
# A round of questions takes at most so much of the lease: one that goes wrong is never the only one.
ROUND = 0.4


def to_ask(nodes: Sequence[int]) -> tuple[int, ...]:
    """The same for every node of a job, so that two halves of it never both hear more than half of them."""
    if len(nodes) <= ASKED:
        return tuple(sorted(nodes))
    return tuple(sorted(nodes)[number * len(nodes) // ASKED] for number in range(ASKED))


class Orphan:
    """`has_daemon` and `nodes` (of the newest assignment) are asked each time; `knock` talks to an agent."""

    def __init__(
        self,
        me: int,
        lease_s: float,
        has_daemon: Callable[[], bool],
        nodes: Callable[[], Sequence[NodeInfo]],
        knock: Callable[[NodeInfo], Awaitable[None]],
    ) -> None:
        self._me, self._lease_s = me, lease_s
        self._has_daemon, self._nodes, self._knock = has_daemon, nodes, knock

    async def over(self) -> str:
        """Returns once this node must end its ranks, with the reason."""
        lease, loop = Lease(), asyncio.get_running_loop()
        while True:
            infos = {info.node: info for info in self._nodes()}
            asked = to_ask(tuple(infos))
            if self._has_daemon() or not asked:
                lease = Lease()
            else:
                heard = await self._heard([infos[node] for node in asked])
                lease.renew(asked, heard, set(), loop.time())
                if lease.away_s(loop.time()) > self._lease_s:
                    return (
                        f"its daemon is away, and of {len(asked)} agents of the job it heard {len(heard)} for"
                        f" {self._lease_s:.1f} s"
                    )
            await asyncio.sleep(min(INTERVAL_S, self._lease_s / 4))

    async def _heard(self, infos: Sequence[NodeInfo]) -> set[int]:
        # no deadline: each has its own
        answers = await asyncio.gather(*map(self._answers, infos))
        return {info.node for info, answer in zip(infos, answers, strict=True) if answer}

    async def _answers(self, info: NodeInfo) -> bool:
        if info.node == self._me:
            return True
        try:
            async with asyncio.timeout(ROUND * self._lease_s):
                await self._knock(info)
        except (OSError, TimeoutError, CkptlessError) as error:
            logger.debug("node-%d does not answer: %s", info.node, error)
            return False
        return True
