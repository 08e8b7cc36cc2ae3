"""Gives back what this node holds and need not, once its home says that others hold newer steps of it."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable

from ckptless.daemon.agent.versions.vault import Vault
from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.control.remaking import Holders
from ckptless.daemon.control.surplus import Item, Settled, home_of, may_go, surplus
from ckptless.daemon.peers import messages as p

logger = logging.getLogger(__name__)

# How long after a generation's begin its homes are asked, and again, and again.
FIRST_S, MOST_S = 0.5, 30.0

Ask = Callable[[NodeInfo, p.WhoHolds], Awaitable[p.HeldBy]]


class GivingBack:
    """Owned by the agent's event loop. `settled`: what this node knows as a home.

    `may`: not while this node's agent is frozen, since what it has told of its holdings must stay true.
    """

    def __init__(self, node: int, vault: Vault, ask: Ask, may: Callable[[], bool]) -> None:
        self._me, self._vault, self._ask, self._may = node, vault, ask, may
        self._generation = 0
        self._task: asyncio.Task[None] | None = None
        self.settled = Settled()
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    def follow(self, to: Holders) -> None:
        """A new generation: other holders."""
        self.stop()
        self._generation = to.assignment.generation
        self.settled = Settled(to.assignment.restore_step)
        if self._surplus(to):
            self._task = asyncio.create_task(self._give_all(to))

    def answer(self, ask: p.WhoHolds) -> p.HeldBy:
        """To a node that holds what it need not."""
        if ask.generation != self._generation:
            return p.HeldBy(tensors=(), records=())
        shards = [(n, self.settled.holders(("tensors", n))) for n in ask.tensors]
        ranks = [(n, self.settled.holders(("record", n))) for n in ask.records]
        return p.HeldBy(
            tensors=tuple((n, tuple(sorted(nodes))) for n, nodes in shards if nodes is not None),
            records=tuple((n, tuple(sorted(nodes))) for n, nodes in ranks if nodes is not None),
        )

    def _surplus(self, to: Holders) -> tuple[Item, ...]:
        return surplus(to, self._me, self._vault.items())

    async def _give_all(self, to: Holders) -> None:
        """Until nothing is left to give back."""
        pause_s = FIRST_S
        infos = {info.node: info for info in to.assignment.nodes}
        while items := self._surplus(to):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_S)
            by_home: dict[int, list[Item]] = defaultdict(list)
            for item in items:
                by_home[home_of(to.assignment, item)].append(item)
            for home, of_home in by_home.items():
                if home in infos:
                    await self._ask_home(to, infos[home], of_home)

    async def _ask_home(self, to: Holders, home: NodeInfo, items: list[Item]) -> None:
        ask = p.WhoHolds(
            generation=to.assignment.generation,
            tensors=tuple(number for what, number in items if what == "tensors"),
            records=tuple(number for what, number in items if what == "record"),
        )
        try:
            reply = await self._ask(home, ask)
        except (OSError, TimeoutError, CkptlessError) as error:
            logger.info("%s does not say who holds its state: %s", home.name, error)
            return
        found: dict[Item, tuple[int, ...]] = {("tensors", n): nodes for n, nodes in reply.tensors}
        found |= {("record", n): nodes for n, nodes in reply.records}
        if self._may():
            self._give(to, {item: found.get(item) for item in items})

    def _give(self, to: Holders, found: dict[Item, tuple[int, ...] | None]) -> None:
        before, given = self._vault.nbytes, list[str]()
        for item, holders in found.items():
            if may_go(to, self._me, item, self._vault.newest(item), holders):
                self._vault.give_back(item)
                given.append(f"{item[0]} {item[1]}")
        if given:
            text = f"{', '.join(given)}: {before - self._vault.nbytes} bytes; others hold newer steps"
            self.on_event("copies-given-back", text)

    def stop(self) -> None:
        """Nothing is given back any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Stop, and wait for it."""
        task = self._task
        self.stop()
        if task is not None:
            # no deadline: `stop` has cancelled it
            await asyncio.gather(task, return_exceptions=True)
