"""Connections over which agents compare their twins' versions; what follows from it is in `twin_check`."""

import asyncio
from collections.abc import Callable, Collection

from msgspec.structs import replace

from ckptless.daemon.agent.versions.holders import Dial, Holder, Peer
from ckptless.daemon.agent.versions.soundness import header_of
from ckptless.daemon.agent.versions.twin_check import TwinCheck
from ckptless.daemon.agent.versions.vault import Vault
from ckptless.daemon.api.errors import BadVersionError, ProtocolError
from ckptless.daemon.api.messages import Assignment, Holdings, NodeInfo, TensorsAt
from ckptless.daemon.options import TwinsMode
from ckptless.daemon.peers import messages as p


class TwinLink(Holder):
    """To the next node on the ring; what is sent before the connection stands is kept."""

    def __init__(
        self,
        info: NodeInfo,
        on_answer: Callable[[p.TwinsCompared], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        super().__init__(info, on_lost)
        self._on_answer = on_answer
        self._early: list[p.CompareTwins] = []

    def send(self, message: p.CompareTwins) -> None:
        """Soon."""
        if self._link is None:
            self._early.append(message)
        else:
            self._link.send(message)

    async def _talk(self, link: Peer) -> None:
        for message in self._early:
            link.send(message)
        while True:
            answer = await link.receive()
            if not isinstance(answer, p.TwinsCompared):
                raise ProtocolError(f"{type(answer).__name__} is no answer to CompareTwins")
            self._on_answer(answer)


class Twins:
    """Owned by the agent's event loop."""

    def __init__(self, node: int, mode: TwinsMode, vault: Vault, dial: Dial) -> None:
        self.check = TwinCheck(node, mode, send=self._send)
        self._vault, self._dial = vault, dial
        self._nodes: dict[int, NodeInfo] = {}
        self._links: dict[int, TwinLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Digests of what lies in the vault, as long as it does.
        self._known: dict[TensorsAt, tuple[int, str]] = {}

    def follow(self, assignment: Assignment) -> None:
        """A new generation."""
        self._nodes = {info.node: info for info in assignment.nodes}
        for node in self._links.keys() - self._nodes.keys():
            self._links.pop(node).close()
        self.check.follow(assignment.generation)

    def committed(
        self, key: tuple[int, int], rank: int, nodes: Collection[int], acked: Callable[[], None]
    ) -> None:
        """A rank has written this shard's step, which lies in the vault; `acked` once it may count."""
        self.check.committed(key, rank, self._digest(*key)[1], sorted(nodes), acked)

    def holdings(self) -> Holdings:
        """The vault's, with the digests of what is compared."""
        held = self._vault.holdings()
        keys = [(shard, step) for shard, steps in held.tensors if self.check.tells(shard) for step in steps]
        digests = tuple((*key, *self._digest(*key)) for key in keys)
        return replace(held, digests=tuple(one for one in digests if one[3]))

    def _digest(self, shard: int, step: int) -> tuple[int, str]:
        """Who has written a version, and by what it is compared."""
        found = self._vault.tensors(shard, step)
        if found is None:
            return -1, ""
        at, region = found
        if at not in self._known:
            try:
                header = header_of(region, at)
            except BadVersionError:
                return -1, ""  # whoever uses it finds out, and drops it
            while len(self._known) >= 64:
                del self._known[next(iter(self._known))]
            self._known[at] = header.rank, header.twins
        return self._known[at]

    def asked(self, link: Peer, message: p.CompareTwins) -> None:
        """By another agent."""
        self.check.asked(message, link.send)

    def _send(self, node: int, message: p.CompareTwins) -> None:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = TwinLink(self._nodes[node], self.check.answered, self._lost)
            task = asyncio.create_task(link.run(self._dial))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        link.send(message)

    def _lost(self, node: int, why: str) -> None:
        self._links.pop(node, None)
        self.check.lost(node, why)

    async def close(self) -> None:
        """Close every connection."""
        for link in self._links.values():
            link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
