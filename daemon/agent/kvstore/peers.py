"""Connections between the stores of two agents: how they are dialled, and taken."""

import logging
import socket
from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from ckptless.daemon.agent.kvstore import wire
from ckptless.daemon.api.errors import CkptlessError, PeerError
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import handshake
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.channel import Channel, Ends, Handler
from ckptless.daemon.peers.keyed import Keyed
from ckptless.daemon.peers.link import Route
from ckptless.daemon.peers.vouch import KeyVouch

logger = logging.getLogger(__name__)

StoreChannel: TypeAlias = Channel[p.StoreMessage]
# A body, and what a message says beside it.
LIMIT = wire.MAX_BODY_NBYTES + 4096
DECODER: msgspec.msgpack.Decoder[p.StoreMessage] = msgspec.msgpack.Decoder(p.StoreMessage)


class Taker(Handler[p.StoreMessage], Protocol):
    """Who owns the channels of other agents that have come."""

    def came(self, channel: StoreChannel) -> None:
        """It has not proved yet who it is. What else comes of it the handler hears."""


class StorePeers:
    """Of node `node` of a job; `key`: None as long as the daemon has not given it.

    `source`: the address of this node that connections come from; None: as the kernel likes.
    """

    def __init__(self, job: str, node: int, source: str | None, key: Callable[[], KeyVouch | None]) -> None:
        self._job, self._me, self._source, self._key = job, node, source, key
        self.taker: Taker | None = None

    def dial(self, info: NodeInfo, handler: Handler[p.StoreMessage]) -> StoreChannel:
        """Begin to connect to another agent. Raises OSError, PeerError."""
        key = self._key()
        if key is None:
            raise PeerError("the daemon has not given the job's key yet")
        mine = handshake.opening(self._job, self._me, store=True)
        ends = Ends(Keyed(key.bind, mine, info.node, LIMIT), handler, DECODER)
        return Channel.dial(Route((info.address, info.agent_port), self._source), ends)

    def take(self, sock: socket.socket, theirs: handshake.Opening) -> None:
        """A connection that another agent has opened for the store; without a word where it is not for us."""
        key = self._key()
        try:
            if key is None or self.taker is None or theirs.job != self._job:
                raise PeerError(f"no store of job {theirs.job} is here yet")
            mine = handshake.opening(self._job, self._me, store=True)
            keyed = Keyed(key.bind, mine, theirs.node, LIMIT, theirs)
            channel: StoreChannel = Channel.accept(sock, Ends(keyed, self.taker, DECODER))
        except (OSError, CkptlessError) as error:
            logger.debug("a connection that was no store's: %s", error)
            sock.close()
        else:
            self.taker.came(channel)
