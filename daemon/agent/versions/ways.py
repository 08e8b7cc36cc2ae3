"""The ways to other agents: from each interface of this node to the same one of theirs; those left out."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ckptless.daemon.agent.versions.connections import Peer, is_silence
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.messages import NodeInfo
from ckptless.daemon.transport.link import Route
from ckptless.daemon.transport.tasks import end_all


class Way(NamedTuple):
    """The way to an agent over the interface of this number, from 0."""

    info: NodeInfo
    number: int = 0

    @property
    def address(self) -> tuple[str, int]:
        """Where the agent listens there."""
        here = (self.info.address, self.info.agent_port)
        return (here, *self.info.interfaces)[self.number]


class Ways:
    """Owned by the agent's event loop. `sources` are this node's addresses, `connect` makes a connection.

    A way that is found dead is left out until the next generation, as long as there is another.
    """

    def __init__(self, sources: tuple[str, ...], connect: Callable[[Route], Awaitable[Peer]]) -> None:
        self._sources, self._connect = sources, connect
        self._left_out: set[tuple[int, int]] = set()
        self._dialling: set[asyncio.Task[Peer]] = set()
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    def to(self, info: NodeInfo) -> tuple[Way, ...]:
        """All ways to an agent that are not left out: at least one."""
        count = min(max(1, len(self._sources)), 1 + len(info.interfaces))
        return tuple(Way(info, n) for n in range(count) if (info.node, n) not in self._left_out)

    def lose(self, way: Way, why: str) -> bool:
        """Leave a way out, of which that is told once; False where it is the last one, which stays."""
        left = self.to(way.info)
        if way not in left:
            return True
        if len(left) == 1:
            return False
        self._left_out.add((way.info.node, way.number))
        text = f"{way.info.name} is not reached at {way.address[0]} any more ({why}); the others carry on"
        self.on_event("interface-lost", text)
        return True

    def forget(self) -> None:
        """A new generation: every way is tried again."""
        self._left_out.clear()

    async def dial(self, way: Way) -> Peer:
        """Connect. Raises OSError, TimeoutError, CkptlessError.

        Of several ways, one that is dead is also found where nobody waits for it any longer.
        """
        if len(self.to(way.info)) == 1:
            return await self._dial(way)
        dialling = asyncio.create_task(self._dial(way))
        self._dialling.add(dialling)
        dialling.add_done_callback(self._dialling.discard)
        try:
            return await asyncio.shield(dialling)
        except asyncio.CancelledError:
            dialling.add_done_callback(_close)
            raise

    async def _dial(self, way: Way) -> Peer:
        source = self._sources[way.number] if self._sources else None
        try:
            return await self._connect(Route(way.address, source, way.info.node))
        except (OSError, TimeoutError) as error:
            if is_silence(error):
                self.lose(way, str(error) or type(error).__name__)
            raise

    async def dial_any(self, info: NodeInfo) -> Peer:
        """Connect over the first way that is not dead. Raises as `dial`."""
        while True:
            way = self.to(info)[0]
            try:
                return await self.dial(way)
            except (OSError, TimeoutError, CkptlessError):
                if way in self.to(info):
                    raise

    async def close(self) -> None:
        """Connect no more."""
        await end_all(self._dialling)


def _close(dialled: "asyncio.Task[Peer]") -> None:
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()
