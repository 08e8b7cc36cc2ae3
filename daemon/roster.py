"""Pure: which nodes a job has."""

from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def by_node(self) -> dict[int, Peer]:
        """Where each one's daemon listens."""
        return {peer.node: peer for peer in self.peers}
