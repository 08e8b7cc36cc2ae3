"""Begins the next batch of ranks whose node seems lost, or the one after those that are kept, before anybody
asks for it.

Until a new node has their records some tenths of a second pass, in which the producers of the others have
nothing to do. Who holds a rank's record knows where it stands, and sees its node's connection end. If the
node is not lost, or the batch is not the one, it was made in vain, and goes.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ckptless.daemon.agent.ring_lending import Guest, Inviting
from ckptless.daemon.agent.vault import Vault
from ckptless.daemon.api.errors import PeerError
from ckptless.daemon.api.feed import Feed
from ckptless.daemon.api.messages import Assignment

# So long it is kept for whoever asks.
KEPT_S = 20.0


class Foresight:
    """Owned by the agent's event loop. `assignment()` is the newest one; `behind` gives the first batch from
    one on that is not kept here, see `ring_standby`.
    """

    def __init__(
        self,
        vault: Vault,
        rings: Inviting,
        behind: Callable[[Feed], Feed],
        assignment: Callable[[], Assignment | None],
    ) -> None:
        self._vault, self._rings, self._behind, self._assignment = vault, rings, behind, assignment
        self._guests: dict[Guest, asyncio.TimerHandle] = {}

    def lost(self, node: int) -> None:
        """An agent that gave this one its ranks' records has hung up."""
        assignment = self._assignment()
        for rank, place in enumerate(assignment.places if assignment is not None else ()):
            held = self._vault.newest_record(rank) if place.node == node else None
            for feed in held.feeds if held is not None else ():
                # Of a ring that is not here nobody will be given anything.
                with suppress(PeerError):
                    guest = self._rings.invite(self._behind(feed), 1)
                    loop = asyncio.get_running_loop()
                    self._guests[guest] = loop.call_later(KEPT_S, self._let_go, guest)

    def _let_go(self, guest: Guest) -> None:
        del self._guests[guest]
        guest.close()

    def close(self) -> None:
        """Nobody asks any more."""
        for guest, timer in list(self._guests.items()):
            timer.cancel()
            self._let_go(guest)
