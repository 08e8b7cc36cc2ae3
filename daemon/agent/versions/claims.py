"""Who is giving what to this agent just now: the same tensors are not taken from two nodes at once."""

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptless.daemon.agent.versions.holders import Peer

# Shard, step, digest.
What: TypeAlias = tuple[int, int, str]


# From the answer that something is wanted until it begins to come; then others may give it.
CLAIM_DEADLINE_S = 15.0


@dataclass
class _Claim:
    link: Peer
    expiry: asyncio.TimerHandle
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Claims:
    """Of each connection one at most. Owned by the agent's event loop."""

    def __init__(self) -> None:
        self._claims: dict[What, _Claim] = {}

    def taken(self, what: What) -> bool:
        """Whether somebody is giving it."""
        return what in self._claims

    async def turn(self, what: What) -> None:
        """Wait until whoever is giving it has come to an end, or has not begun in time."""
        if (claim := self._claims.get(what)) is not None:
            # no deadline: CLAIM_DEADLINE_S, then that of the transfer
            await claim.over.wait()

    def claim(self, what: What, link: Peer) -> None:
        """It comes over this connection, from here on."""
        loop = asyncio.get_running_loop()
        self._claims[what] = _Claim(link, loop.call_later(CLAIM_DEADLINE_S, self.release, link))

    def begin(self, link: Peer) -> None:
        """It has begun to come: a transfer has a deadline of its own."""
        for claim in self._claims.values():
            if claim.link is link:
                claim.expiry.cancel()

    def release(self, link: Peer) -> None:
        """Nothing comes over this connection any more."""
        for what, claim in list(self._claims.items()):
            if claim.link is link:
                del self._claims[what]
                claim.expiry.cancel()
                claim.over.set()
