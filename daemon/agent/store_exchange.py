"""What the stores of two agents say to each other: over one connection, made when there is something to say.

Each end may dial. When both do in the same moment, that of the lower node stays. A connection outlives the
generations in which both nodes are: each message has its generation. One of an older generation is refused,
one of a newer is held until this agent has followed, since agents do not hear of it in the same instant.

A connection that ends, or an agent that is silent while something is expected of it, is lost for the rest of
the generation: the clients that need it are hung up on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeAlias

from ckptless.daemon.agent import store_wire as wire
from ckptless.daemon.agent.holders import Peer
from ckptless.daemon.agent.store_node import StoreNode
from ckptless.daemon.agent.store_wire import Item
from ckptless.daemon.api.errors import CkptlessError, ProtocolError
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.link import GreetingCutError

logger = logging.getLogger(__name__)

# Of what a newer generation says: until this agent follows, or the connection is given up.
MAX_HELD_NBYTES = 512 << 20
# How long to wait before it is tried again where the other end is not ready, or has its own.
AGAIN_S = 0.1
# At one time, by one agent: all agents of a job may begin in the same moment.
MOST_DIALS = 4
Dial: TypeAlias = Callable[[NodeInfo], Awaitable[Peer]]


class _Other:
    """One other agent, as this one is connected to it."""

    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.link: Peer | None = None
        self.linked = asyncio.Event()
        self.dialling: asyncio.Task[None] | None = None
        self.begun = False
        self.unsaid: list[Item] = []
        self.held: list[p.StoreSaid] = []
        self.heard_at = 0.0


class StoreExchange:
    """Owned by the agent's event loop.

    `silence_s`: an agent that says nothing for so long, while something is expected of it, is lost; and so
    long it is tried to reach one. `handshakes` and `messages` count what this agent has made and sent.
    """

    def __init__(self, me: int, dial: Dial, silence_s: float) -> None:
        self._me, self._dial, self._silence_s = me, dial, silence_s
        self.handshakes = self.messages = 0
        self._generation = 0
        self._node: StoreNode | None = None
        self._others: dict[int, _Other] = {}
        self._dials = asyncio.Semaphore(MOST_DIALS)
        self._flushing: asyncio.Handle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    def follow(self, generation: int, infos: Mapping[int, NodeInfo], node: StoreNode) -> None:
        """A new generation, between these agents. What was to be said in the old one is said no more."""
        self._generation, self._node = generation, node
        for number, other in list(self._others.items()):
            other.unsaid.clear()
            if infos.get(number) != other.info:
                self._forget(number)
        for number, info in infos.items():
            if number != self._me and number not in self._others:
                self._others[number] = _Other(info)
        for number, other in list(self._others.items()):
            held, other.held = other.held, []
            try:
                for said in held:
                    self._take(number, said)
            except ProtocolError as error:
                self.on_event("peer-refused", f"node-{number}: {error}")
                self._lose(number, other, str(error))

    def send(self, generation: int, node: int, item: Item) -> None:
        """Soon, with what else goes there: in order, or the other agent is lost.

        What the store of an old generation has to say, to take something back, is not said any more.
        """
        other = self._others.get(node)
        if other is None or generation != self._generation or self._closed:
            return
        other.unsaid.append(item)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        # Each begins with the next one, so that not all dial the same one, nor two each other.
        count = max(self._others, default=0) + 1
        for number, other in sorted(self._others.items(), key=lambda pair: (pair[0] - self._me) % count):
            if not other.unsaid:
                continue
            if other.link is not None:
                self._say(other, other.link)
            elif other.dialling is None:
                other.dialling = self._spawn(self._reach(number, other))
        self._look_soon()

    def _say(self, other: _Other, link: Peer) -> None:
        items, other.unsaid = other.unsaid, []
        for body in wire.encode(items):
            self.messages += 1
            link.send(p.StoreSaid(generation=self._generation, body=body))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -------------------------------------------------------------------------------- connections

    async def _reach(self, number: int, other: _Other) -> None:
        """Dial, until there is a connection, this one or the other end's; then hear it to its end."""
        try:
            async with self._dials:
                other.begun = other.link is None
                async with asyncio.timeout(self._silence_s):
                    link = await self._open(other)
        except (OSError, TimeoutError, CkptlessError) as error:
            other.dialling, other.begun = None, False
            if other.link is None:
                self._lose(number, other, f"cannot be reached: {error or type(error).__name__}")
            return
        other.dialling, other.begun = None, False
        if link is not None:
            await self._hear(number, other, link)

    async def _open(self, other: _Other) -> Peer | None:
        """A connection that the other end takes; None once there is one that it has made."""
        while other.link is None:
            try:
                link = await self._dial(other.info)
            except (GreetingCutError, TimeoutError):
                # It has not been given the job's key yet, or has a lot to do.
                await asyncio.sleep(AGAIN_S)
                continue
            self.handshakes += 1
            try:
                link.send(p.StoreOpen())
                answer = await link.receive()
                if isinstance(answer, p.StoreReady) and other.link is None:
                    self._attach(other, link)
                    return link
                if not isinstance(answer, p.StoreReady | p.StoreYield):
                    raise ProtocolError(f"{type(answer).__name__} is no answer to StoreOpen")
            except BaseException:
                link.close()
                raise
            link.close()
            # Its own is on its way. Or it has not noticed yet that the one before has ended.
            try:
                async with asyncio.timeout(AGAIN_S):
                    await other.linked.wait()
            except TimeoutError:
                continue
        return None

    def _attach(self, other: _Other, link: Peer) -> None:
        link.allow(wire.MAX_BODY_NBYTES + 4096)
        other.link, other.heard_at = link, asyncio.get_running_loop().time()
        other.linked.set()
        if other.unsaid:
            self._say(other, link)

    async def adopt(self, link: Peer) -> None:
        """A connection that another agent has made for this: take it, and hear it to its end.

        Raises ConnectionError at the end, ProtocolError.
        """
        number = link.node
        other = self._others.get(number)
        if other is None:
            # It has heard of a generation that this agent has not heard of, or the other way round.
            link.send(p.StoreYield())
            return
        mine_stays = self._me < number and (other.begun or other.link is not None)
        if mine_stays:
            link.send(p.StoreYield())
            return
        if other.link is not None:
            self._lose(number, other, "has connected anew")
        link.send(p.StoreReady())
        self._attach(other, link)
        await self._hear(number, other, link)

    async def _hear(self, number: int, other: _Other, link: Peer) -> None:
        """To its end, of which nobody else has to hear."""
        why = ""
        try:
            while True:
                message = await link.receive()
                other.heard_at = asyncio.get_running_loop().time()
                self._heard(number, other, message)
        except ConnectionError:
            why = "has hung up"
        except (CkptlessError, OSError) as error:
            why = str(error)
            self.on_event("peer-refused", f"node-{number}: {error}")
        finally:
            link.close()
            if other.link is link:
                self._lose(number, other, why)

    def _heard(self, number: int, other: _Other, message: p.AgentMessage) -> None:
        match message:
            case p.StoreSaid():
                self._take(number, message)
            case p.StoreStale(generation=generation):
                if generation > self._generation and self._node is not None:
                    self._node.lost(number)
            case p.StorePing():
                assert other.link is not None
                other.link.send(p.StorePong())
            case p.StorePong():
                pass
            case _:
                raise ProtocolError(f"{type(message).__name__} is none of the store's")

    def _take(self, number: int, said: p.StoreSaid) -> None:
        other = self._others[number]
        if said.generation > self._generation:
            if sum(len(held.body) for held in other.held) + len(said.body) > MAX_HELD_NBYTES:
                raise ProtocolError(f"more than {MAX_HELD_NBYTES} bytes of a generation not known here yet")
            other.held.append(said)
            return
        items = wire.decode(said.body)
        if said.generation < self._generation:
            if wire.asks(items):
                text = f"of node-{number}, generation {said.generation}, here {self._generation}"
                self.on_event("stale-store", text)
                if other.link is not None:
                    other.link.send(p.StoreStale(generation=self._generation))
            return
        assert self._node is not None
        for item in items:
            self._node.heard(number, item)

    def _lose(self, number: int, other: _Other, why: str) -> None:
        """Whatever waits for it is told."""
        link, other.link = other.link, None
        other.linked.clear()
        if link is not None:
            link.close()
        expected = bool(other.unsaid)
        other.unsaid.clear()
        other.held.clear()
        if self._node is None or self._closed:
            return
        if expected or self._node.waits_for(number):
            self.on_event("store-peer-lost", f"node-{number} {why}: clients that need it are hung up on")
        self._node.lost(number)

    def _forget(self, number: int) -> None:
        other = self._others.pop(number)
        if other.dialling is not None:
            other.dialling.cancel()
        if other.link is not None:
            other.link.close()
            other.link = None

    # ------------------------------------------------------------------------------------ silence

    def _look_soon(self) -> None:
        if self._looking is None and not self._closed:
            self._looking = asyncio.get_running_loop().call_later(self._silence_s / 4, self._look)

    def _look(self) -> None:
        """Who is to say something, and is silent, is asked, and then given up."""
        self._looking = None
        now = asyncio.get_running_loop().time()
        expecting = False
        for number, other in list(self._others.items()):
            if other.link is None or self._node is None:
                continue
            if not self._node.waits_for(number):
                other.heard_at = now
                continue
            expecting = True
            if now - other.heard_at > self._silence_s:
                self._lose(number, other, f"has said nothing for {self._silence_s:g} s")
            else:
                other.link.send(p.StorePing())
        if expecting:
            self._look_soon()

    async def close(self) -> None:
        """Hang up on everybody."""
        self._closed = True
        for handle in (self._flushing, self._looking):
            if handle is not None:
                handle.cancel()
        for number in list(self._others):
            self._forget(number)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
