"""The store of another agent, as a test plays it: what it hears, and whatever it is made to say."""

import asyncio
import socket
from typing import Any

from ckptless.daemon.agent.kvstore.peers import StoreChannel, StorePeers
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.door import Door
from ckptless.daemon.peers.handshake import Opening
from ckptless.daemon.peers.vouch import KeyVouch


class PlayedStore:
    """Node `number` of job "job"; takes one channel at a time, which it has dialled or which has come."""

    def __init__(self, number: int, key: bytes, *, ready: bool = True) -> None:
        self.peers = StorePeers("job", number, None, lambda: KeyVouch(key))
        self.peers.taker = self
        self.channel: StoreChannel | None = None
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._ready = ready
        self.door = Door(self.no_streams, self.take)

    @staticmethod
    def no_streams(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        """Nobody else connects."""
        raise AssertionError("a connection that is not the store's")

    def take(self, sock: socket.socket, opening: Opening) -> None:
        """A connection has come."""
        self.peers.take(sock, opening)

    def dial(self, info: NodeInfo) -> None:
        """Begin to connect."""
        self.channel = self.peers.dial(info, self)

    def came(self, channel: StoreChannel) -> None:
        self.channel = channel
        self.events.put_nowait(("came", None))

    def proved(self, channel: StoreChannel) -> None:
        if self._ready and channel is self.channel:
            channel.send(p.StoreReady())
        self.events.put_nowait(("proved", None))

    def heard(self, _channel: StoreChannel, message: p.StoreMessage) -> None:
        self.events.put_nowait(("heard", message))

    def ended(self, _channel: StoreChannel, error: Exception) -> None:
        self.events.put_nowait(("ended", error))

    def send(self, message: p.StoreMessage) -> None:
        """To the other end."""
        assert self.channel is not None
        self.channel.send(message)

    async def until(self, kind: str) -> Any:
        """What the next event of that kind brings. Raises what the channel ended by, if it did before."""
        while True:
            found, what = await self.events.get()
            if found == kind:
                return what
            if found == "ended":
                raise what

    async def close(self) -> None:
        """Hang up, and listen no more."""
        if self.channel is not None:
            self.channel.close()
        await self.door.close()
