"""Which nodes a job has, and who may speak for it; where that is known from differs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptless.daemon.api.errors import PeerError
from ckptless.daemon.api.messages import AgentHello
from ckptless.daemon.config import Peer


@dataclass(frozen=True)
class Roster:
    """A job's nodes, numbered for good when it started; `me` is this daemon's."""

    me: int
    peers: tuple[Peer, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """All numbers."""
        return tuple(peer.node for peer in self.peers)


class Registry(Protocol):
    """Says which jobs there are."""

    async def admit(self, hello: AgentHello, uid: int) -> Roster:
        """The roster of an agent's job. Raises PeerError where `uid` may not speak for that job here."""


class FixedRegistry:
    """Local mode: one roster, for any job of the user who started the daemon."""

    def __init__(self, me: int, peers: Sequence[Peer]) -> None:
        self._roster = Roster(me, tuple(peers))

    async def admit(self, hello: AgentHello, uid: int) -> Roster:
        """See `Registry`."""
        if uid != os.getuid():
            raise PeerError(f"uid {uid} may not use this daemon")
        if hello.info.node != self._roster.me:
            raise PeerError(f"the agent says that this is node {hello.info.node}, not {self._roster.me}")
        return self._roster
