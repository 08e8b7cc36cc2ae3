"""Many clients on several nodes' stores see what they could have seen of one server, whatever comes when."""

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.answers import DONE, Done, nothing
from ckptless.daemon.agent.kvstore.cache import Cache
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.agent.kvstore.node import Cancel, StoreNode
from ckptless.daemon.agent.kvstore.protocol import Request
from ckptless.daemon.agent.kvstore.wire import Drop, Dropped, Item

sys.path.insert(0, str(Path(__file__).parent))

from store_world import World, is_linear

KEYS = (b"a", b"b", b"default_pg/0//cpu//0/1")
VALUES = (b"1", b"2", b"x")


def any_request(dice: random.Random) -> Request:
    key, value = dice.choice(KEYS), dice.choice(VALUES)
    requests: list[Request] = [
        protocol.Set(key, value),
        protocol.Get(key),
        protocol.Get(key),
        protocol.MultiGet(tuple(dice.choices(KEYS, k=2))),
        protocol.MultiSet(((key, value), (dice.choice(KEYS), b"m"))),
        protocol.Append(key, value),
        protocol.Add(b"n", 1),
        protocol.CompareSet(key, dice.choice((*VALUES, b"")), value),
        protocol.Delete(key),
        protocol.Wait((key,)),
        protocol.Wait(KEYS),
        protocol.Check((key,)),
        protocol.QueuePush(b"q", value),
        protocol.QueuePop(b"q"),
    ]
    return dice.choice(requests)


def play(seed: int, make: Callable[..., StoreNode] = StoreNode) -> World:
    """A few dozen steps, each by chance: a client's next call, or the next message of a connection."""
    dice = random.Random(seed)
    world = World(nodes=3, clients=4, make=make)
    for _ in range(60):
        pairs = world.ready()
        idle = [client for client, op in enumerate(world.current) if op is None]
        if idle and (not pairs or dice.random() < 0.35) and len(world.history) < 22:
            world.call(dice.choice(idle), any_request(dice))
        elif pairs:
            world.deliver(dice.choice(pairs))
        for client, op in enumerate(world.current):
            if op is not None and isinstance(op.request, protocol.Wait) and dice.random() < 0.02:
                op.cancel()
                world.current[client] = None
    world.settle()
    return world


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 48))
def test_every_history_is_one_of_a_single_server(seed: int) -> None:
    world = play(seed)
    assert is_linear(world.history)
    for op in world.history:
        assert op.end is not None or isinstance(op.request, protocol.Wait)


class _Forgetful(Cache):
    """Planted: what is called back is kept."""

    def drop(self, owner: int, key: bytes) -> None:
        pass


class Uncalled(StoreNode):
    def __init__(self, me: int, homes: Homes, send: Callable[..., None]) -> None:
        super().__init__(me, homes, send)
        self._cache = _Forgetful()


class Hasty(StoreNode):
    """Planted: a client's next request does not wait until its set is done."""

    def ask(self, request: Request, done: Done) -> Cancel:
        if isinstance(request, protocol.Set):
            super().ask(request, lambda _answer: None)
            done(DONE)
            return nothing
        return super().ask(request, done)


class Unacknowledged(StoreNode):
    """Planted: a change does not wait until what is called back has been dropped everywhere."""

    def __init__(self, me: int, homes: Homes, send: Callable[..., None]) -> None:
        super().__init__(me, homes, send)
        self._owner._drop = self._call_back

    def _call_back(self, node: int, key: bytes) -> None:
        self._send(node, Drop(key))
        self._owner.dropped(node, key)

    def heard(self, node: int, item: Item) -> None:
        if not isinstance(item, Dropped):
            super().heard(node, item)


class Stale(StoreNode):
    """Planted: what several clients ask alike is answered alike, whatever has changed since."""

    _stamp = 0


@pytest.mark.parametrize("planted", [Uncalled, Hasty, Unacknowledged, Stale])
def test_a_planted_mistake_is_found(planted: Callable[..., StoreNode]) -> None:
    assert any(not is_linear(play(seed, planted).history) for seed in range(2000))
