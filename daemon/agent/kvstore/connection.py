"""One end of the connection between an agent's proxy and the home of a generation's keys."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import msgspec

from ckptless.daemon.agent.kvstore import wire
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.link import Link

Peer: TypeAlias = Link[p.AgentMessage]
Heard = TypeVar("Heard", wire.ToHome, wire.FromHome)
# A body, and what a message says beside it.
LIMIT = wire.MAX_BODY_NBYTES + 4096


async def refuse(link: Peer, generation: int, patience_s: float) -> None:
    """Tell an end of an older generation which one it is here; it is the one that hangs up.

    If this end did, while something is unread, the kernel might not deliver the message.
    """
    link.limit = LIMIT
    link.send(p.StoreStale(generation=generation))
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(patience_s):
            while True:
                await link.receive()


class Connection(Generic[Heard]):
    """One client's connection: words of one turn of the event loop go out together, in order, or never.

    `hear(item)` takes what the other end says, and may raise ProtocolError, by which the connection ends. An
    end that says nothing for `silence_s`, while `expects()`, is taken for lost. `messages` counts those sent.
    """

    def __init__(
        self,
        hear: Callable[[Heard], None],
        expects: Callable[[], bool],
        decoder: "msgspec.msgpack.Decoder[tuple[Heard, ...]]",
        silence_s: float,
    ) -> None:
        self._hear: Callable[[Heard], None] = hear
        self._decoder: msgspec.msgpack.Decoder[tuple[Heard, ...]] = decoder
        self._expects, self._silence_s = expects, silence_s
        self.messages = 0
        self._unsaid: list[wire.Item] = []
        self._link: Peer | None = None
        self._over = self._flushing = False
        self._heard_at = 0.0

    def say(self, item: wire.Item) -> None:
        """Soon, with what else is said; before the connection is there, when it is."""
        if self._over:
            return
        self._unsaid.append(item)
        if self._link is not None and not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        items, self._unsaid = self._unsaid, []
        if self._link is not None:
            for body in wire.encode(items):
                self.messages += 1
                self._link.send(p.StoreSaid(body=body))

    async def run(self, link: Peer) -> None:
        """Pass on what both ends say until the other one has left the generation.

        Raises ConnectionError, ProtocolError, and TimeoutError where it is silent. Closes the connection.
        """
        loop = asyncio.get_running_loop()
        self._link, self._heard_at = link, loop.time()
        link.limit = LIMIT
        self._flush()
        watch = asyncio.create_task(self._watch(link))
        try:
            # no deadline: `_watch` ends it when it is silent
            while not isinstance(message := await link.receive(), p.StoreStale):
                self._heard_at = loop.time()
                self._take(link, message)
        except ConnectionError as error:
            if watch.done():
                raise TimeoutError(f"has said nothing for {self._silence_s:g} s") from error
            raise
        finally:
            self._over, self._link = True, None
            watch.cancel()
            link.close()

    def _take(self, link: Peer, message: p.AgentMessage) -> None:
        match message:
            case p.StoreSaid(body=body):
                if not self._over:
                    for item in wire.decode(body, self._decoder):
                        self._hear(item)
            case p.StorePing():
                link.send(p.StorePong())
            case p.StorePong():
                pass
            case _:
                raise ProtocolError(f"{type(message).__name__} is none of the store's")

    async def _watch(self, link: Peer) -> None:
        """Ask an end that is to say something whether it is there; hang up when it does not answer."""
        loop = asyncio.get_running_loop()
        while loop.time() - self._heard_at <= self._silence_s:
            await asyncio.sleep(self._silence_s / 4)
            if self._over or self._expects():
                link.send(p.StorePing())
            else:
                self._heard_at = loop.time()
        link.close()

    def leave(self, generation: int) -> None:
        """Tell the other end that this one is in a newer generation; that hangs up, see `refuse`."""
        self._over = True
        self._unsaid.clear()
        if self._link is not None:
            self._link.send(p.StoreStale(generation=generation))
