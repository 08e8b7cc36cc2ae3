"""Stores of several nodes over real connections: who is asked, who is refused, and who is lost."""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent))

from facades import KEY, Facade, Facades
from played_store import PlayedStore
from store_client import Client

from ckptless.daemon.agent.kvstore import protocol, wire
from ckptless.daemon.agent.kvstore.answers import Refusal
from ckptless.daemon.agent.kvstore.home import Homes
from ckptless.daemon.api.messages import Place
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.door import Door


def key_of(node: int) -> bytes:
    """What rank `node` sets, the only one of its node."""
    return b"default_pg/0//cpu//0/%d" % node


def play(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def to_its_end() -> None:
        try:
            async with asyncio.timeout(60):
                await work()
        finally:
            for client in Client.every:
                await client.close()
            Client.every.clear()

    asyncio.run(to_its_end())


async def until(what: Callable[[], object]) -> None:
    """Fails where it stays false."""
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110  what is waited for tells nobody
            await asyncio.sleep(0.01)


async def outcome(call: Awaitable[Any]) -> Any:
    """What it gives, or the name of what it raises."""
    try:
        return await call
    except (ConnectionError, TimeoutError) as error:
        return type(error).__name__


async def stranger(facades: Facades, number: int, to: int) -> PlayedStore:
    """A connection by the job's key, for the store, of who says that it is node `number`."""
    played = PlayedStore(number, KEY, ready=False)
    played.dial(facades[to].info)
    assert isinstance(await played.until("heard"), p.StoreReady)
    return played


def said(generation: int, *items: wire.Item) -> p.StoreSaid:
    return p.StoreSaid(generation=generation, body=wire.encode(items)[0])


def test_all_at_once_make_one_connection_of_each_pair() -> None:
    async def work() -> None:
        async with Facades(5) as facades:
            for generation in (1, 2):
                if generation == 2:
                    facades.follow(2)
                clients = [await Client.connect(facade.port) for facade in facades]
                await asyncio.gather(*(c.set(key_of(n), b"%d" % n) for n, c in enumerate(clients)))
                keys = [key_of(n) for n in range(5)]
                await asyncio.gather(*(client.wait(*keys) for client in clients))
                found = await asyncio.gather(*(client.multi_get(keys) for client in clients))
                assert found == [[b"0", b"1", b"2", b"3", b"4"]] * 5
                # What a wait has brought is not asked for again.
                asked = [facade.store.server._node.asked for facade in facades]
                assert await clients[0].multi_get(keys) == found[0]
                assert asked == [facade.store.server._node.asked for facade in facades]
                links = [
                    {n: other.link for n, other in facade.store.exchange._others.items() if other.link}
                    for facade in facades
                ]
                assert all(len(theirs) == 4 for theirs in links)
                if generation == 1:
                    before = links
                # They outlive the generation.
                assert links == before
            assert not any(facade.events for facade in facades)

    play(work)


def test_a_rank_asks_nobody_for_what_its_node_keeps() -> None:
    async def work() -> None:
        async with Facades(3) as facades:
            client = await Client.connect(facades[1].port)
            client.set_soon(key_of(1), b"v")
            await client.wait(key_of(1))
            assert await client.get(key_of(1)) == b"v"
            assert all(facade.store.exchange.handshakes == 0 for facade in facades)

    play(work)


def test_what_is_remembered_is_called_back_before_it_changes() -> None:
    async def work() -> None:
        async with Facades(3) as facades:
            a, b, c = [await Client.connect(facade.port) for facade in facades]
            await a.set(key_of(1), b"old")
            assert [await client.get(key_of(1)) for client in (a, b, c)] == [b"old"] * 3
            await c.set(key_of(1), b"new")
            assert [await client.get(key_of(1)) for client in (a, b, c)] == [b"new"] * 3
            assert [await client.add(b"n", 1) for client in (a, b, c)] == [1, 2, 3]

    play(work)


def test_a_newer_generation_is_held_and_an_older_one_refused() -> None:
    async def work() -> None:
        async with Facades(2) as facades:
            first, second = facades
            old = await Client.connect(first.port)
            await old.set(key_of(1), b"of generation 1")
            first.store.follow(facades.assignment(2), None)
            assert await outcome(old.get(key_of(1))) == "ConnectionResetError"
            new = await Client.connect(first.port)
            new.set_soon(key_of(1), b"of generation 2")
            await until(lambda: first.store.exchange.messages >= 2 and held(second, 0))
            # The other node is still in generation 1, and what it has there is not seen from the new one.
            late = await Client.connect(second.port)
            assert await late.get(key_of(1)) == b"of generation 1"
            late.set_soon(key_of(0), b"of generation 1")
            await until(lambda: first.events)
            assert first.events[0] == ("stale-store", "of node-1, generation 1, here 2")
            assert await outcome(late.num_keys()) == "ConnectionResetError"
            second.store.follow(facades.assignment(2), None)
            assert await new.get(key_of(1)) == b"of generation 2"
            assert await new.get(key_of(0)) == b""

    play(work)


def held(facade: Facade, number: int) -> int:
    return len(facade.store.exchange._others[number].held)


def test_a_key_of_another_generation_is_refused() -> None:
    async def work() -> None:
        async with Facades(2) as facades:
            facades.follow(2)
            for call in ("get", "wait"):
                client = await Client.connect(facades[0].port)
                asked = getattr(client, call)(b"ckptless/1/0//0/1")
                assert await outcome(asked) == "ConnectionResetError"
            assert facades[0].store.server.refused == 2

    play(work)


async def lose_before_it_is_asked(facades: Facades, _clients: list[Client]) -> None:
    await facades[1].close()


async def lose_while_a_wait_goes_on(facades: Facades, clients: list[Client]) -> None:
    waits = [asyncio.create_task(outcome(client.wait(key_of(1)))) for client in (clients[0], clients[2])]
    await until(lambda: len(facades[1].store.server._node._owner._state._waiting) == 1)
    await until(lambda: facades[1].store.server._node.asked == 2)
    await facades[1].close()
    assert await asyncio.gather(*waits) == ["ConnectionResetError"] * 2


async def lose_after_it_was_remembered(facades: Facades, clients: list[Client]) -> None:
    """Node 1 has a key of node 0, and will never drop it: it stays as it is."""
    await clients[0].set(key_of(0), b"v")
    assert await clients[1].get(key_of(0)) == b"v"
    await facades[1].close()
    clients[0].set_soon(key_of(0), b"other")
    assert await outcome(clients[0].get(key_of(0))) == "ConnectionResetError"


async def lose_what_was_remembered(facades: Facades, clients: list[Client]) -> None:
    """Node 0 has remembered a key of node 1's, which nobody could call back any more."""
    await clients[1].set(key_of(1), b"v")
    assert await clients[0].get(key_of(1)) == b"v"
    await facades[1].close()
    await until(lambda: facades[0].store.exchange._others[1].link is None)
    assert await outcome(clients[0].get(key_of(1))) == "ConnectionResetError"


@pytest.mark.parametrize(
    "lose",
    [
        lose_before_it_is_asked,
        lose_while_a_wait_goes_on,
        lose_after_it_was_remembered,
        lose_what_was_remembered,
    ],
)
def test_a_lost_node_ends_those_who_need_it_and_the_next_generation_forms(
    lose: Callable[[Facades, list[Client]], Awaitable[None]],
) -> None:
    async def work() -> None:
        async with Facades(3, silence_s=5) as facades:
            clients = [await Client.connect(facade.port) for facade in facades]
            await lose(facades, clients)
            one = await Client.connect(facades[0].port)
            assert await outcome(one.get(key_of(1))) == "ConnectionResetError"
            facades.follow(2, [0, 2])
            left = [await Client.connect(facades[node].port) for node in (0, 2)]
            await left[0].set(b"after", b"1")
            assert await left[1].get(b"after") == b"1"

    play(work)


async def until_silent(played: PlayedStore, point: str) -> None:
    """From here on nothing that comes is read."""
    await played.until("came")
    if point != "answered":
        assert isinstance(await played.until("heard"), p.StoreSaid)
    assert played.channel is not None
    asyncio.get_running_loop().remove_reader(played.channel._fd)


@pytest.mark.parametrize("point", ["connected", "answered", "asked", "ready"])
def test_an_owner_that_falls_silent_ends_a_wait(point: str) -> None:
    """As a node that loses power: nothing is closed, and nothing is answered any more."""

    async def work() -> None:
        async with Facades(2, silence_s=1.0) as facades:
            me, other = facades
            played = PlayedStore(1, KEY, ready=point == "ready")
            taken: list[socket.socket] = []
            if point == "connected":
                played.door = Door(played.no_streams, lambda sock, _opening: taken.append(sock))
            port = played.door.open("127.0.0.1")
            other.info = msgspec.structs.replace(other.info, agent_port=port)
            me.store.follow(facades.assignment(2), None)
            client = await Client.connect(me.port)
            waiting = asyncio.create_task(outcome(client.wait(key_of(1))))
            if point == "connected":
                await until(lambda: taken)
            else:
                await until_silent(played, point)
            assert await waiting == "ConnectionResetError"
            assert [kind for kind, _text in me.events] == ["store-peer-lost"]
            await played.close()
            for sock in taken:
                sock.close()

    play(work)


BAD: dict[str, Any] = {
    "no msgpack": p.StoreSaid(generation=1, body=b"\xc1"),
    "no items": p.StoreSaid(generation=1, body=b"\x01"),
    "an answer to nothing": said(1, wire.Told(7, Refusal("x", hostile=False))),
    "a drop that nobody asked for": said(1, wire.Dropped(b"k")),
    "a key of another's": said(1, wire.Ask(1, protocol.Set(key_of(1), b"v"))),
    "one number twice": said(
        1, *[wire.Ask(1, protocol.Wait((key_of(0),))), wire.Ask(1, protocol.Wait((key_of(0),)))]
    ),
    "a message of another edge": p.SaveAsk(generation=1),
}


@pytest.mark.parametrize("name", BAD)
def test_an_agent_that_talks_nonsense_is_hung_up_on_alone(name: str) -> None:
    async def work() -> None:
        async with Facades(3) as facades:
            one, two = [await Client.connect(facades[node].port) for node in (0, 1)]
            waiting = asyncio.create_task(one.wait(key_of(1)))
            link = await stranger(facades, 2, to=0)
            link.send(BAD[name])
            assert isinstance(await link.until("ended"), ConnectionError)
            await link.close()
            assert [kind for kind, _text in facades[0].events] == ["peer-refused"]
            await two.set(key_of(1), b"v")
            await waiting

    play(work)


def test_what_a_newer_generation_says_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptless.daemon.agent.kvstore.exchange.MAX_HELD_NBYTES", 1000)

    async def work() -> None:
        async with Facades(3) as facades:
            link = await stranger(facades, 2, to=0)
            for number in range(20):
                link.send(said(9, wire.Ask(number, protocol.Set(key_of(0), bytes(100)))))
            assert isinstance(await link.until("ended"), ConnectionError)
            await link.close()
            assert held(facades[0], 2) == 0

    play(work)


@pytest.mark.parametrize("lost", [0, 1, 7], ids=["root", "between", "leaf"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not-asked"])
def test_what_all_tell_all_ends_with_any_node_of_the_tree(lost: int, asked: bool) -> None:
    """Nodes 4, 5 and 6 have only node 1 to ask, and node 1 asks node 0: each hears of it all the same."""

    def keys(generation: int) -> list[bytes]:
        return [b"ckptless/%d/0//0/%d" % (generation, rank) for rank in range(8)]

    async def meet(client: Client, rank: int, generation: int) -> list[bytes]:
        client.set_soon(keys(generation)[rank], b"of %d" % rank)
        await client.wait(*keys(generation))
        return await client.multi_get(keys(generation))

    async def work() -> None:
        async with Facades(8) as facades:
            clients = [await Client.connect(facade.port) for facade in facades]
            waiting = [
                asyncio.create_task(outcome(meet(client, rank, 1)))
                for rank, client in enumerate(clients)
                if rank != lost
            ]
            if asked:
                await until(lambda: facades[lost].store.server._node.asked)
            await facades[lost].close()
            assert await asyncio.gather(*waiting) == ["ConnectionResetError"] * 7
            # Its ranks are with node 2 from now on.
            nodes = [2 if facade.number == lost else facade.number for facade in facades]
            assignment = replace(
                facades.assignment(2, sorted(set(nodes))),
                places=tuple(Place(node=node, slot=0) for node in nodes),
            )
            for node in sorted(set(nodes)):
                facades[node].store.follow(assignment, None)
            again = [await Client.connect(facades[node].port) for node in nodes]
            found = await asyncio.gather(*(meet(client, rank, 2) for rank, client in enumerate(again)))
            assert found == [[b"of %d" % rank for rank in range(8)]] * 8

    play(work)


def test_homes_are_those_of_who_writes_or_dealt_out() -> None:
    homes = Homes([3, 3, 5, 5], generation=2)
    assert [homes.of(key_of(rank)) for rank in range(4)] == [3, 3, 5, 5]
    assert [homes.of(b"ckptless/2/0//0/%d" % rank) for rank in range(4)] == [3, 3, 5, 5]
    assert [homes.of(b"ckptless/2/rank/%d/told" % rank) for rank in range(4)] == [3, 3, 5, 5]
    # The third of a group is not the third of all.
    assert len({homes.of(b"default_pg/0//%d//cpu//0/0" % group) for group in range(40)}) == 2
    assert homes.of(key_of(4)) in (3, 5)
    with pytest.raises(ValueError, match="without a node"):
        Homes([])
