"""Many clients on several nodes see what they could have seen of one server, whatever comes when."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.home import Home
from ckptless.daemon.agent.kvstore.protocol import Request
from ckptless.daemon.agent.kvstore.proxy import Cancel, Done, Proxy, _Waiter, nothing
from ckptless.daemon.agent.kvstore.wire import Drop, Dropped, FromHome, ToHome

from .store_world import World, is_linear

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


def play(seed: int, make: Callable[..., Proxy] = Proxy, make_home: Callable[..., Home] = Home) -> World:
    """A few dozen steps, each by chance: a client's next call, or the next message of a connection."""
    dice = random.Random(seed)
    world = World(nodes=3, clients=4, make=make, make_home=make_home)
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


def is_right(world: World) -> bool:
    """Whether it could have been one server, and whoever does not wait for a key has its answer."""
    ended = all(op.end is not None or isinstance(op.request, protocol.Wait) for op in world.history)
    return ended and is_linear(world.history)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 48))
# A wait was woken between two values of one multi_set, and its node remembered what the second one replaced.
@example(1754854)
def test_every_history_is_one_of_a_single_server(seed: int) -> None:
    assert is_right(play(seed))


class Forgetful(Proxy):
    """Planted: what is recalled is kept."""

    def heard(self, item: FromHome) -> None:
        if isinstance(item, Drop):
            self._send(Dropped(item.key))
        else:
            super().heard(item)


class Hasty(Proxy):
    """Planted: a client's next request does not wait until its set is done."""

    def ask(self, request: Request, done: Done) -> Cancel:
        if isinstance(request, protocol.Set):
            super().ask(request, lambda _answer: None)
            done(b"")
            return nothing
        return super().ask(request, done)


class Unacknowledged(Home):
    """Planted: a change does not wait until what is recalled has been dropped everywhere."""

    def __init__(self, send: Callable[[int, FromHome], None]) -> None:
        def hasten(node: int, item: FromHome) -> None:
            send(node, item)
            if isinstance(item, Drop) and node != 0:
                super(Unacknowledged, self).heard(node, Dropped(item.key))

        super().__init__(hasten)

    def heard(self, node: int, item: ToHome) -> None:
        if node == 0 or not isinstance(item, Dropped):
            super().heard(node, item)


class Generous(Home):
    """Planted: what was recalled may be remembered again while a change of it waits, which then waits on."""

    def _let_keep(self, node: int, keys: protocol.Keys, values: Any) -> tuple[int, ...]:
        recalled, self._recalled = self._recalled, set()
        try:
            return super()._let_keep(node, keys, values)
        finally:
            self._recalled = recalled


class Trusting(Proxy):
    """Planted: of several clients that wait alike, those behind take the answer of the one who has asked."""

    def _wait(self, waiter: _Waiter, *, alone: bool = False) -> None:
        if alone:
            waiter.done(protocol.STOP_WAITING)
        else:
            super()._wait(waiter)


@pytest.mark.parametrize("planted", [Forgetful, Hasty, Trusting])
def test_a_planted_mistake_of_a_proxy_is_found(planted: Callable[..., Proxy]) -> None:
    assert any(not is_right(play(seed, planted)) for seed in range(2000))


@pytest.mark.parametrize("planted", [Unacknowledged, Generous])
def test_a_planted_mistake_of_the_home_is_found(planted: Callable[..., Home]) -> None:
    assert any(not is_right(play(seed, make_home=planted)) for seed in range(2000))
