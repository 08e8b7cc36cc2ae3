"""However the stores of agents connect and fail: what one says, another hears in order and once, or not."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest

from ckptless.daemon.agent.kvstore import protocol, wire
from ckptless.daemon.agent.kvstore.exchange import StoreExchange
from ckptless.daemon.agent.kvstore.peers import StoreChannel
from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.channel import Handler
from ckptless.daemon.peers.link import GreetingCutError

NODES = 3
LAST = 3
INFOS = {n: NodeInfo(node=n, name=f"n{n}", address="", agent_port=n + 1) for n in range(NODES)}
Event = str | p.StoreMessage


class End:
    """One end of a connection; what it has sent lies in `sent` until the test delivers it."""

    def __init__(self, me: int, node: int, handler: Any) -> None:
        self.me, self.node, self.handler = me, node, handler
        self.sent: deque[Event] = deque()
        self.other: End | None = None
        self.is_proved = self.closed = self.refused = False

    def send(self, message: p.StoreMessage) -> None:
        assert self.is_proved, "it may not be sent to before it has proved who it is"
        if not self.closed:
            self.sent.append(message)

    def refuse(self, message: p.StoreMessage) -> None:
        self.send(message)
        self.refused = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.sent.append("end")

    def end(self, error: Exception) -> None:
        if not self.closed:
            self.close()
            self.handler.ended(self, error)


class Told:
    """In place of a node's store: what it has heard, by generation and node."""

    def __init__(self, heard: dict[int, list[int]]) -> None:
        self._heard = heard
        self.lost_ones: set[int] = set()

    def heard(self, node: int, item: wire.Item) -> None:
        assert isinstance(item, wire.Ask)
        self._heard.setdefault(node, []).append(item.number)

    def lost(self, node: int) -> None:
        self.lost_ones.add(node)

    def waits_for(self, _node: int) -> bool:
        return False


class World:
    """A few exchanges; connections deliver in order in each direction, when the test says."""

    def __init__(self, dice: random.Random, make: Callable[..., StoreExchange], faults: float) -> None:
        self.dice, self.faults = dice, faults
        self.ends: list[End] = []
        self.exchanges = [make(n, self._dialler(n), 600.0) for n in range(NODES)]
        self.generations = [0] * NODES
        self.stores: dict[tuple[int, int], Told] = {}
        self.heard: dict[tuple[int, int], dict[int, list[int]]] = {}
        self.said: dict[tuple[int, int, int], list[int]] = {}
        for n in range(NODES):
            self.follow(n)

    def _dialler(self, me: int) -> Callable[[NodeInfo, Handler[p.StoreMessage]], StoreChannel]:
        def dial(info: NodeInfo, handler: Handler[p.StoreMessage]) -> StoreChannel:
            end = End(me, info.node, handler)
            end.sent.append("opening")
            self.ends.append(end)
            return cast(StoreChannel, end)

        return dial

    def follow(self, node: int) -> None:
        generation = self.generations[node] = self.generations[node] + 1
        heard = self.heard[node, generation] = {}
        store = self.stores[node, generation] = Told(heard)
        self.exchanges[node].follow(generation, INFOS, store)  # type: ignore[arg-type]

    def say(self, node: int, to: int) -> None:
        generation = self.generations[node]
        said = self.said.setdefault((node, generation, to), [])
        said.append(len(said))
        item = wire.Ask(said[-1], protocol.NumKeys())
        self.exchanges[node].send(generation, to, item)

    def ready(self) -> list[End]:
        return [end for end in self.ends if end.sent]

    def deliver(self, end: End) -> None:
        """The next of what it has sent."""
        event = end.sent.popleft()
        other = end.other
        if event == "opening":
            self._open(end)
        elif other is None:
            pass  # it hung up before anybody had taken the connection
        elif event == "end":
            cut = GreetingCutError("cut") if not other.is_proved else ConnectionResetError("end")
            other.end(cut)
        elif not other.closed and not other.refused:
            self._hear(other, event)

    def _open(self, end: End) -> None:
        if self.dice.random() < 0.1:
            end.end(GreetingCutError("no key is there yet"))
            return
        exchange = self.exchanges[end.node]
        accepted = End(end.node, end.me, exchange)
        accepted.other, end.other = end, accepted
        accepted.sent.append("answer")
        self.ends.append(accepted)
        exchange.came(cast(StoreChannel, accepted))

    @staticmethod
    def _hear(end: End, event: Event) -> None:
        if event in ("answer", "proof"):
            end.is_proved = True
            if event == "answer":
                end.sent.append("proof")
            end.handler.proved(end)
            return
        try:
            end.handler.heard(end, event)
        except CkptlessError as error:
            end.end(error)

    def break_one(self) -> None:
        """A connection: what is on its way is lost."""
        alive = [end for end in self.ends if end.other is not None and not end.closed]
        if alive:
            end = self.dice.choice(alive)
            for one in (end, end.other):
                assert one is not None
                one.sent.clear()
                one.sent.append("end")

    async def act(self) -> None:
        """Anything that may happen next; then what the loop has to do."""
        dice = self.dice
        kind = dice.random()
        node = dice.randrange(NODES)
        if kind < self.faults:
            self.break_one()
        elif kind < 0.06 and self.generations[node] < LAST:
            self.follow(node)
        elif kind < 0.4:
            self.say(node, dice.choice([n for n in range(NODES) if n != node]))
        elif ends := self.ready():
            self.deliver(dice.choice(ends))
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """All follow, and all that is on its way comes."""
        for node in range(NODES):
            while self.generations[node] < LAST:
                self.follow(node)
        for node in range(NODES):
            for other in range(NODES):
                if other != node:
                    self.say(node, other)
        for _ in range(4000):
            for end in self.ready():
                self.deliver(end)
            await asyncio.sleep(0)
            if not self.ready() and not any(
                o.reaching or o.queued or o.unsaid for e in self.exchanges for o in e._others.values()
            ):
                return
        raise AssertionError("it does not come to rest")

    def wrong(self) -> list[str]:
        """What was heard that was not said so, and what was not heard though nobody was lost."""
        found = []
        if not self.faults:
            lost = [(node, self.stores[node, LAST].lost_ones) for node in range(NODES)]
            found += [f"node {node} has lost {ones}" for node, ones in lost if ones]
        for (node, generation, to), said in self.said.items():
            heard = self.heard.get((to, generation), {}).get(node, [])
            gone = any(
                other in store.lost_ones
                for other, store in (
                    (to, self.stores[node, generation]),
                    (node, self.stores[to, generation]),
                )
            )
            if heard != sorted(set(heard)):
                found.append(f"node {to} heard {heard} of node {node}")
            if generation == LAST and not gone and heard != said:
                found.append(f"node {to} heard {heard} of node {node}, which said {said}")
        for exchange in self.exchanges:
            for number, other in exchange._others.items():
                mine = cast(End | None, other.link)
                theirs = self.exchanges[number]._others[exchange._me].link
                if (mine and mine.other) is not cast(End | None, theirs):
                    found.append(f"nodes {exchange._me} and {number} have not the same connection")
        return found


async def play(seed: int, make: Callable[..., StoreExchange], faults: float) -> list[str]:
    world = World(random.Random(seed), make, faults)
    for _ in range(120):
        await world.act()
    await world.settle()
    found = world.wrong()
    for exchange in world.exchanges:
        exchange.close()
    assert all(end.closed for end in world.ends if end.other is None or not end.refused)
    return found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried in the next turn of the loop."""
    monkeypatch.setattr("ckptless.daemon.agent.kvstore.exchange.AGAIN_S", 0.0)


@pytest.mark.parametrize("faults", [0.0, 0.03])
def test_what_is_said_is_heard(faults: float) -> None:
    async def play_all() -> list[tuple[int, list[str]]]:
        return [(seed, found) for seed in range(700) if (found := await play(seed, StoreExchange, faults))]

    assert asyncio.run(play_all()) == []


class Forgetful(StoreExchange):
    """Planted: what a node that yields has not taken is not said again."""

    def _take_answer(self, number: int, other: Any, message: p.StoreMessage) -> None:
        other.unsure = []
        super()._take_answer(number, other, message)


class Repeating(StoreExchange):
    """Planted: what has been taken is said again."""

    def _take_answer(self, number: int, other: Any, message: p.StoreMessage) -> None:
        if isinstance(message, p.StoreReady):
            other.unsaid[:0] = other.unsure
        super()._take_answer(number, other, message)


class Hasty(StoreExchange):
    """Planted: what comes after something that may not have been taken is said before it."""

    def _say(self, other: Any, link: Any) -> None:
        dialled, other.dialled = other.dialled, None
        super()._say(other, link)
        other.dialled = dialled


class Taking(StoreExchange):
    """Planted: nobody yields."""

    def adopt(self, channel: StoreChannel) -> None:
        me, self._me = self._me, NODES
        super().adopt(channel)
        self._me = me


@pytest.mark.parametrize("planted", [Forgetful, Repeating, Hasty, Taking])
def test_a_planted_mistake_is_found(planted: Callable[..., StoreExchange]) -> None:
    async def found() -> bool:
        for seed in range(300):
            try:
                if await play(seed, planted, 0.0):
                    return True
            except AssertionError:
                return True
        return False

    assert asyncio.run(found())
