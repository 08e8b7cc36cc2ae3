"""Batches between nodes: what this one gives, gets, begins and keeps for others; put together."""

from collections.abc import Callable
from functools import partial

from ckptless.daemon.agent.replicas import Replicas
from ckptless.daemon.agent.ring_borrowing import Borrowing
from ckptless.daemon.agent.ring_foresight import Foresight
from ckptless.daemon.agent.ring_lending import lend
from ckptless.daemon.agent.ring_service import RingService
from ckptless.daemon.agent.ring_standby_service import Standby
from ckptless.daemon.agent.vault import Vault
from ckptless.daemon.api.messages import Assignment


class RingPeers:
    """Owned by the agent's event loop. `tell(kind, text)` hears how it went."""

    def __init__(
        self, me: int, vault: Vault, replicas: Replicas, rings: RingService, tell: Callable[[str, str], None]
    ) -> None:
        self._assignment: Assignment | None = None
        self.standby = Standby(me, replicas.dial, rings.nodes, vault, tell)
        self.borrowing = Borrowing(me, replicas.dial, rings, tell)
        self.foresight = Foresight(vault, rings, self.standby.behind, lambda: self._assignment)
        rings.on_dropped = self.standby.changed
        replicas.serving.on_batches = partial(lend, rings, self.standby)
        replicas.serving.on_lost = self.foresight.lost

    def follow(self, assignment: Assignment) -> None:
        """A new generation; the vault has followed it."""
        self._assignment = assignment
        self.borrowing.follow(assignment)
        self.standby.follow(assignment)

    async def close(self) -> None:
        """Stop what is under way, and give all memory back."""
        await self.borrowing.close()
        self.foresight.close()
        await self.standby.close()
