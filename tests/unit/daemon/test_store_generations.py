"""Nothing of one generation is read in another, whenever each node follows and each message comes."""

import asyncio
import random
from collections import deque
from functools import partial
from typing import Any

import pytest

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.answers import Answer, Reply
from ckptless.daemon.agent.kvstore.exchange import StoreExchange
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.agent.kvstore.node import Cancel, StoreNode
from ckptless.daemon.api.errors import PeerError, ProtocolError
from ckptless.daemon.api.messages import NodeInfo
from ckptless.daemon.peers import messages as p

NODES = 3
LAST = 3
INFOS = {n: NodeInfo(node=n, name=f"n{n}", address="", agent_port=n + 1) for n in range(NODES)}
KEYS = tuple(b"default_pg/0//cpu//0/%d" % n for n in range(NODES))


class Wire:
    """One end of a connection: what is sent lies in `queue` until the test delivers it."""

    def __init__(self) -> None:
        self.queue: deque[p.StoreMessage] = deque()

    def send(self, message: p.StoreMessage) -> None:
        self.queue.append(message)

    def close(self) -> None:
        pass


def nobody(_info: NodeInfo, _handler: object) -> Any:
    raise PeerError("all are connected")


class Nodes:
    """A few exchanges, each connected to each."""

    def __init__(self, dice: random.Random, *, fenced: bool = True) -> None:
        self._dice, self._fenced = dice, fenced
        self.exchanges = [StoreExchange(n, nobody, 60.0) for n in range(NODES)]
        self.stores: list[StoreNode] = []
        self.generations = [0] * NODES
        self.wires = {(a, b): Wire() for a in range(NODES) for b in range(NODES) if a != b}
        self.wrong: list[str] = []
        self.answered = 0
        self._waits: list[Cancel] = []
        for n in range(NODES):
            self.stores.append(StoreNode(n, Homes(range(NODES)), lambda _node, _item: None))
            self.follow(n)
        for (a, b), wire in self.wires.items():
            self.exchanges[a]._others[b].link = wire  # type: ignore[assignment]

    def follow(self, node: int) -> None:
        generation = self.generations[node] = self.generations[node] + 1
        exchange = self.exchanges[node]
        said = generation if self._fenced else LAST
        send = partial(exchange.send, said)
        self.stores[node] = StoreNode(node, Homes(range(NODES)), send)
        exchange.follow(said, INFOS, self.stores[node])

    def act(self) -> None:
        """Anything that may happen next."""
        dice = self._dice
        kind = dice.random()
        node = dice.randrange(NODES)
        if kind < 0.1 and self.generations[node] < LAST:
            self.follow(node)
        elif kind < 0.2 and self._waits:
            # Also one of an old generation, whose client is only now found to be gone.
            self._waits.pop(dice.randrange(len(self._waits)))()
        elif kind < 0.55:
            self.call(node)
        else:
            ready = [pair for pair, wire in self.wires.items() if wire.queue]
            if ready:
                self.deliver(dice.choice(ready))

    def deliver(self, pair: tuple[int, int]) -> None:
        source, target = pair
        exchange = self.exchanges[target]
        try:
            exchange._heard(source, exchange._others[source], self.wires[pair].queue.popleft())
        except ProtocolError:
            # Without a fence numbers of two generations meet, too.
            assert not self._fenced

    def call(self, node: int) -> None:
        generation = self.generations[node]
        key = self._dice.choice(KEYS)

        def done(answer: Answer) -> None:
            self.answered += 1
            values = answer.values if isinstance(answer, Reply) else ()
            for value in values:
                if value is not None and value != b"%d" % generation:
                    self.wrong.append(f"a rank of generation {generation} reads {value!r}")

        store = self.stores[node]
        if self._dice.random() < 0.4:
            store.ask(protocol.Set(key, b"%d" % generation), done)
        elif self._dice.random() < 0.5:
            store.ask(protocol.Get(key), done)
        else:

            def get(_waited: Answer) -> None:
                store.ask(protocol.Get(key), done)

            self._waits.append(store.ask(protocol.Wait((key,)), get))


async def play(seed: int, *, fenced: bool) -> Nodes:
    nodes = Nodes(random.Random(seed), fenced=fenced)
    for _ in range(80):
        nodes.act()
        await asyncio.sleep(0)
    for exchange in nodes.exchanges:
        exchange.close()
    return nodes


@pytest.mark.parametrize(("fenced", "stories"), [(True, 1000), (False, 30)])
def test_no_rank_reads_what_another_generation_has_set(fenced: bool, stories: int) -> None:
    """Without numbers of generations the same stories find that some do."""

    async def play_all() -> tuple[list[str], int]:
        wrong, answered = [], 0
        for seed in range(stories):
            nodes = await play(seed, fenced=fenced)
            wrong += nodes.wrong
            answered += nodes.answered
        return wrong, answered

    wrong, answered = asyncio.run(play_all())
    assert answered > 5 * stories
    assert bool(wrong) != fenced
