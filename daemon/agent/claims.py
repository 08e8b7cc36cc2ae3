"""Who is giving what to this agent just now: the same tensors are not taken from two nodes at once."""

import asyncio
from typing import TypeAlias

from ckptless.daemon.agent.holders import Peer

# Shard, step, digest.
What: TypeAlias = tuple[int, int, str]


class Claims:
    """Of each connection one at most. Owned by the agent's event loop."""

    def __init__(self) -> None:
        self._claims: dict[What, tuple[Peer, asyncio.Event]] = {}

    def taken(self, what: What) -> bool:
        """Whether somebody is giving it."""
        return what in self._claims

    async def turn(self, what: What) -> None:
        """Wait until whoever is giving it has come to an end."""
        if (claim := self._claims.get(what)) is not None:
            await claim[1].wait()

    def claim(self, what: What, link: Peer) -> None:
        """It comes over this connection, from here on."""
        self._claims[what] = (link, asyncio.Event())

    def release(self, link: Peer) -> None:
        """Nothing comes over this connection any more."""
        for what, (holder, event) in list(self._claims.items()):
            if holder is link:
                del self._claims[what]
                event.set()
