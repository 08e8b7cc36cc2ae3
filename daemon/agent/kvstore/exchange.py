"""What the stores of two agents say to each other: over one connection, made when there is something to say.

Each end may dial. When both do in the same moment, that of the lower node stays. What is to be said goes out
with the proof of the one who dials, and is taken with its answer, or not at all. A connection outlives the
generations in which both nodes are: each message has its generation. One of an older generation is refused,
one of a newer is held until this agent has followed, since agents do not hear of it in the same instant.

A connection that ends, or an agent that is silent while something is expected of it, is lost for the rest of
the generation: the clients that need it are hung up on.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

from ckptless.daemon.agent.kvstore import wire
from ckptless.daemon.agent.kvstore.node import StoreNode
from ckptless.daemon.agent.kvstore.other import OtherStore
from ckptless.daemon.agent.kvstore.peers import StoreChannel
from ckptless.daemon.agent.kvstore.wire import Item
from ckptless.daemon.api.errors import CkptlessError, ProtocolError
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.channel import Handler
from ckptless.daemon.peers.door import most_unproved
from ckptless.daemon.peers.link import GreetingCutError

logger = logging.getLogger(__name__)

# Of what a newer generation says: until this agent follows, or the connection is given up.
MAX_HELD_NBYTES = 512 << 20
# How long to wait before it is tried again where the other end is not ready, or has its own.
AGAIN_S = 0.1
# At one time, by one agent: all agents of a job may begin in the same moment.
MOST_DIALS = 4
Dial: TypeAlias = Callable[[NodeInfo, Handler[p.StoreMessage]], StoreChannel]


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
        self._others: dict[int, OtherStore] = {}
        # Who is to be reached, and how many are.
        self._queue: deque[int] = deque()
        self._reaching = 0
        # Others have made them; what comes of them is not known yet.
        # In the order in which they came; of these, too, the oldest gives way.
        self._coming: dict[StoreChannel, None] = {}
        self._most_coming = most_unproved()
        self._talking: set[int] = set()
        self._flushing: asyncio.Handle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    def follow(self, generation: int, infos: Mapping[int, NodeInfo], node: StoreNode) -> None:
        """A new generation, between these agents. What was to be said in the old one is said no more."""
        self._generation, self._node = generation, node
        for number, other in list(self._others.items()):
            other.unsaid.clear()
            other.unsure.clear()
            if infos.get(number) != other.info:
                self._forget(number)
        for number, info in infos.items():
            if number != self._me and number not in self._others:
                self._others[number] = OtherStore(info)
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
        self._talking.add(node)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        # Each begins with the next one, so that not all dial the same one, nor two each other.
        count = max(self._others, default=0) + 1
        talking = sorted(self._talking, key=lambda number: (number - self._me) % count)
        self._talking.clear()
        for number in talking:
            other = self._others.get(number)
            if other is None or not other.unsaid:
                continue
            if other.link is not None:
                self._say(other, other.link)
            elif not other.reaching and not other.queued:
                other.queued = True
                self._queue.append(number)
        self._reach_next()
        self._look_soon()

    def _say(self, other: OtherStore, link: StoreChannel) -> None:
        """What is to be said, but not before what is on its way has been taken, or not."""
        if other.is_unsure and link is not other.dialled:
            return
        items, other.unsaid = other.unsaid, []
        for body in wire.encode(items):
            self.messages += 1
            link.send(p.StoreSaid(generation=self._generation, body=body))

    # ----------------------------------------------------------------------------- to reach others
    #
    # An attempt goes on until there is a connection, this one or the other end's, or `silence_s` are over.

    def _reach_next(self) -> None:
        while self._queue and self._reaching < MOST_DIALS and not self._closed:
            number = self._queue.popleft()
            other = self._others.get(number)
            if other is None or not other.queued:
                continue
            other.queued = False
            if other.link is None and other.unsaid:
                self._reaching += 1
                other.reaching = True
                other.until = asyncio.get_running_loop().time() + self._silence_s
                self._dial_now(number, other)

    def _dial_now(self, number: int, other: OtherStore) -> None:
        loop = asyncio.get_running_loop()
        other.timer = loop.call_at(other.until, self._give_up, number, other)
        try:
            other.dialled = self._dial(other.info, self)
        except (OSError, CkptlessError) as error:
            # Not at once: who asks may be in the middle of something.
            other.timer.cancel()
            other.timer = loop.call_soon(self._failed, number, other, error)

    def _again(self, number: int, other: OtherStore) -> None:
        """A little later: the other end is not ready, or makes its own."""
        self._hang_up(other)
        loop = asyncio.get_running_loop()
        other.timer = loop.call_at(min(loop.time() + AGAIN_S, other.until), self._dial_again, number, other)

    def _dial_again(self, number: int, other: OtherStore) -> None:
        if asyncio.get_running_loop().time() >= other.until:
            self._give_up(number, other)
        else:
            self._dial_now(number, other)

    def _give_up(self, number: int, other: OtherStore) -> None:
        self._failed(number, other, TimeoutError(f"it has not answered for {self._silence_s:g} s"))

    def _failed(self, number: int, other: OtherStore, error: Exception) -> None:
        """It cannot be reached; what may or may not have been taken is lost with the connection."""
        lost = other.link is None or other.is_unsure
        self._reached(other)
        if lost:
            self._lose(number, other, f"cannot be reached: {error or type(error).__name__}")

    @staticmethod
    def _hang_up(other: OtherStore) -> None:
        if other.timer is not None:
            other.timer.cancel()
            other.timer = None
        if other.dialled is not None:
            other.dialled.close()
            other.dialled = None

    def _reached(self, other: OtherStore, *, keep: bool = False) -> None:
        """The attempt is over, `keep`: and its connection is taken."""
        if keep:
            other.dialled = None
        self._hang_up(other)
        if other.reaching:
            other.reaching = False
            self._reaching -= 1
            if self._queue:
                asyncio.get_running_loop().call_soon(self._reach_next)

    def _attach(self, other: OtherStore, link: StoreChannel) -> None:
        other.link, other.heard_at = link, asyncio.get_running_loop().time()
        if other.unsaid:
            self._say(other, link)

    def _take_answer(self, number: int, other: OtherStore, message: p.StoreMessage) -> None:
        """Of the end that was dialled: whether this is the connection that stays."""
        channel = other.dialled
        assert channel is not None
        if isinstance(message, p.StoreReady):
            if other.link is not None:
                raise ProtocolError("it has connected anew")
            other.unsure = []
            self._reached(other, keep=True)
            self._attach(other, channel)
            return
        if not isinstance(message, p.StoreYield):
            raise ProtocolError(f"{type(message).__name__} is no answer to an opening")
        other.unsaid[:0] = other.unsure
        other.unsure = []
        if other.link is None:
            # Its own is on its way. Or it has not noticed yet that the one before has ended.
            self._again(number, other)
            return
        self._reached(other)
        if other.unsaid:
            self._say(other, other.link)

    # --------------------------------------------------------------------------------- connections

    def came(self, channel: StoreChannel) -> None:
        """Another agent has connected; it has not proved yet which one."""
        if self._closed:
            channel.close()
            return
        if len(self._coming) >= self._most_coming:
            oldest = next(iter(self._coming))
            del self._coming[oldest]
            oldest.close()
        self._coming[channel] = None

    def proved(self, channel: StoreChannel) -> None:
        """See `Handler`."""
        other = self._others.get(channel.node)
        if other is None or channel is not other.dialled:
            self.adopt(channel)
        elif other.link is not None:
            self._reached(other)
        else:
            # With the proof goes what is to be said: it is taken with `StoreReady`, or not at all.
            self.handshakes += 1
            other.unsure = list(other.unsaid)
            self._say(other, channel)

    def adopt(self, channel: StoreChannel) -> None:
        """A connection that another agent has made, which is who it says: take it, or not."""
        number = channel.node
        other = self._others.get(number)
        # Else it has heard of a generation that this agent has not heard of, or the other way round.
        if other is None or (self._me < number and (other.reaching or other.link is not None)):
            channel.refuse(p.StoreYield())
            return
        self._coming.pop(channel, None)
        if other.link is not None:
            self._lose(number, other, "has connected anew")
        if other.reaching and not other.is_unsure:
            self._reached(other)
        channel.send(p.StoreReady())
        self._attach(other, channel)

    def heard(self, channel: StoreChannel, message: p.StoreMessage) -> None:
        """See `Handler`."""
        number = channel.node
        other = self._others.get(number)
        if other is not None and channel is other.link:
            other.heard_at = asyncio.get_running_loop().time()
            self._heard(number, other, message)
        elif other is not None and channel is other.dialled:
            self._take_answer(number, other, message)

    def ended(self, channel: StoreChannel, error: Exception) -> None:
        """See `Handler`."""
        self._coming.pop(channel, None)
        number = channel.node
        other = self._others.get(number)
        if other is None or channel not in (other.link, other.dialled):
            logger.debug("a connection for the store that came to nothing: %s", error)
        elif channel is other.link:
            if isinstance(error, CkptlessError):
                self.on_event("peer-refused", f"node-{number}: {error}")
            self._lose(number, other, "has hung up" if isinstance(error, OSError) else str(error))
        elif not channel.is_proved and isinstance(error, GreetingCutError | TimeoutError):
            # It has not been given the job's key yet, or has a lot to do.
            self._again(number, other)
        else:
            self._failed(number, other, error)

    def _heard(self, number: int, other: OtherStore, message: p.StoreMessage) -> None:
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

    def _lose(self, number: int, other: OtherStore, why: str) -> None:
        """Whatever waits for it is told."""
        link, other.link = other.link, None
        if link is not None:
            link.close()
        if other.is_unsure:
            self._reached(other)
        expected = bool(other.unsaid or other.unsure)
        other.unsaid.clear()
        other.unsure.clear()
        other.held.clear()
        if self._node is None or self._closed:
            return
        if expected or self._node.waits_for(number):
            self.on_event("store-peer-lost", f"node-{number} {why}: clients that need it are hung up on")
        self._node.lost(number)

    def _forget(self, number: int) -> None:
        other = self._others.pop(number)
        self._reached(other)
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

    def close(self) -> None:
        """Hang up on everybody."""
        self._closed = True
        for handle in (self._flushing, self._looking):
            if handle is not None:
                handle.cancel()
        for number in list(self._others):
            self._forget(number)
        for channel in self._coming:
            channel.close()
        self._coming.clear()
