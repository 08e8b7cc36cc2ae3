"""An agent whose daemon is silent goes on only while it hears enough of the job's other agents.

The lease of a node is held by its daemon (`ckptlessd/consensus/lease.py`), which says so again and again.
One that is away, stopped or stuck says nothing, and would end no ranks of a node that is cut off; so the
agent asks the other agents itself, by the same rule. Where it hears them its daemon may be away for as long
as it likes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptless.daemon.ckptlessd.consensus.quorum import is_quorum
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.messages import NodeInfo

logger = logging.getLogger(__name__)

Knock: TypeAlias = Callable[[NodeInfo], Awaitable[None]]

# As many as there are voters: an agent does not know who these are.
ASKED = 7
INTERVAL_S = 0.5
# A daemon may say nothing for so much of the lease before the agents are asked. Where these do not answer
# the ranks end so much later than the lease: a daemon that runs comes first, and knows why.
SILENT = 0.25
# A round of questions takes at most so much of the lease; one that goes wrong is never the only one.
ROUND, LEAST_ROUNDS = 0.4, 2


def to_ask(nodes: Sequence[int]) -> tuple[int, ...]:
    """The same for every node of a job, so that two halves of it never both hear more than half of them."""
    if len(nodes) <= ASKED:
        return tuple(sorted(nodes))
    return tuple(sorted(nodes)[number * len(nodes) // ASKED] for number in range(ASKED))


@dataclass
class AgentLease:
    """Pure: when somebody last knew that this node hears enough of the others. Times in s, of one clock.

    The daemon's word counts from when it comes: it was said a moment before, or this agent was late itself.
    """

    lease_s: float
    daemon_at: float
    agents_at: float = float("-inf")
    _failed: int = 0

    def renew(self, now: float) -> None:
        """The daemon says so."""
        self.daemon_at, self._failed = now, 0

    def daemon_is_silent(self, now: float) -> bool:
        """Whether the daemon is away, stopped, stuck or cut off."""
        return now - self.daemon_at > SILENT * self.lease_s

    def must_ask(self, now: float) -> bool:
        """Whether the other agents are to be asked."""
        return self._unknown_s(now) > SILENT * self.lease_s

    def asked(self, asked: tuple[int, ...], heard: set[int], began: float) -> None:
        """Note who of the agents that were asked at `began` has answered; none to ask is no job yet."""
        if not asked or is_quorum(asked, heard, set()):
            self.agents_at, self._failed = began, 0
        else:
            self._failed += 1

    def over(self, now: float) -> bool:
        """Whether this node must end its ranks."""
        return self._failed >= LEAST_ROUNDS and self._unknown_s(now) > (1 + SILENT) * self.lease_s

    def _unknown_s(self, now: float) -> float:
        return now - max(self.daemon_at, self.agents_at)


async def lease_over(
    me: int, lease: AgentLease, nodes: Callable[[], Sequence[NodeInfo]], knock: Knock
) -> str:
    """Keep a lease; return once this node must end its ranks, with the reason.

    `nodes`, of the newest assignment, are asked each time; `knock` talks to an agent.
    """
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        if lease.must_ask(began):
            infos = {info.node: info for info in nodes()}
            asked = to_ask(tuple(infos))
            others = [node for node in asked if node != me]
            # no deadline: each has its own
            answers = await asyncio.gather(*(_answers(infos[node], lease.lease_s, knock) for node in others))
            silent = {node for node, answer in zip(others, answers, strict=True) if not answer}
            heard = set(asked) - silent
            lease.asked(asked, heard, began)
            if lease.over(loop.time()):
                return (
                    f"its daemon does not say that it hears the others, and of {len(asked)} agents of"
                    f" the job it heard {len(heard)} for {lease.lease_s:.1f} s"
                )
        await asyncio.sleep(min(INTERVAL_S, lease.lease_s / 8))


async def _answers(info: NodeInfo, lease_s: float, knock: Knock) -> bool:
    try:
        async with asyncio.timeout(ROUND * lease_s):
            await knock(info)
    except (OSError, TimeoutError, CkptlessError) as error:
        logger.debug("node-%d does not answer: %s", info.node, error)
        return False
    return True
