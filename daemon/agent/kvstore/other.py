"""The store of one other agent, as this one is connected to it, or about to be."""

import asyncio

from ckptless.daemon.agent.kvstore.peers import StoreChannel
from ckptless.daemon.agent.kvstore.wire import Item
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import messages as p


class OtherStore:
    """What `StoreExchange` knows of it, and changes."""

    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.link: StoreChannel | None = None
        # Of the attempt to reach it that is under way, if one is: when it is given up, and what is next.
        self.reaching = self.queued = False
        self.until = 0.0
        self.timer: asyncio.Handle | None = None
        self.dialled: StoreChannel | None = None
        self.unsaid: list[Item] = []
        # What went out with the proof, and may not have been taken.
        self.unsure: list[Item] = []
        self.held: list[p.StoreSaid] = []
        self.heard_at = 0.0

    @property
    def is_unsure(self) -> bool:
        """Whether something is on its way of which the other end has not said whether it takes it."""
        return self.dialled is not None and self.dialled.is_proved
