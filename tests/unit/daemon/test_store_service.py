"""Stores of several nodes over real connections: who is asked, who is refused, and who is lost."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from ckptless.daemon.agent.kvstore import connection, protocol, wire
from ckptless.daemon.agent.kvstore.connection import Peer
from ckptless.daemon.agent.kvstore.service import home_of
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import Link
from ckptless.daemon.transport.listener import Listener

from .facades import KEY, Facade, Facades
from .store_client import Client

# The home of generation 1 where there are three nodes with ranks; that of 2 is node 2, and that of 3 node 0.
HOME = 1


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
    """Return what it gives, or the name of what it raises."""
    try:
        return await call
    except (ConnectionError, TimeoutError) as error:
        return type(error).__name__


def kinds(facade: Facade) -> list[str]:
    return [kind for kind, _text in facade.events]


def said(*items: wire.Item) -> p.StoreSaid:
    return p.StoreSaid(body=wire.encode(items)[0])


async def dial(facade: Facade, number: int, generation: int) -> Peer:
    """Connect to a facade as node `number`, by the job's key, for the store."""
    at = (facade.info.address, facade.info.agent_port)
    link: Peer = await Link.dial(at, ("job", number), KeyCredentials(KEY), p.AgentMessage, 10.0)
    link.send(p.StoreJoin(generation=generation))
    return link


async def heard(link: Peer, kind: type[p.AgentMessage]) -> Any:
    """The next message of a kind."""
    while not isinstance(message := await link.receive(), kind):
        pass
    return message


class PlayedAgent:
    """Listens in place of an agent; what others say to it is in `link`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._listener = Listener(lambda *streams: self._came.put_nowait(streams))
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        self.port = self._listener.open("127.0.0.1")

    async def came(self) -> Any:
        return await self._came.get()

    async def link(self) -> Peer:
        link: Peer = await Link.accept(
            await self.came(), lambda _job: self._number, KeyCredentials(KEY), p.AgentMessage
        )
        assert isinstance(await link.receive(), p.StoreJoin)
        return link

    async def close(self) -> None:
        await self._listener.close()


def test_the_home_is_the_same_for_all_and_another_one_next_time() -> None:
    async def work() -> None:
        facades = Facades(4)
        homes = [home_of(facades.assignment(generation, [3, 0, 2])) for generation in range(1, 7)]
        assert homes == [2, 3, 0, 2, 3, 0]

    play(work)


def test_each_agent_has_one_connection_and_asks_once() -> None:
    async def work() -> None:
        keys = [b"default_pg/0//cpu//0/%d" % rank for rank in range(5)]
        async with Facades(5) as facades:
            for generation in (1, 2):
                facades.follow(generation)
                clients = [await Client.connect(facade.port) for facade in facades for _ in range(2)]
                await asyncio.gather(*(c.set(keys[n % 5], b"%d" % (n % 5)) for n, c in enumerate(clients)))
                await asyncio.gather(*(client.wait(*keys) for client in clients))
                (home,) = [facade.store.home for facade in facades if facade.store.home is not None]
                asked = home.asked
                # What a wait has brought is not asked for again.
                found = await asyncio.gather(*(client.multi_get(keys) for client in clients))
                assert found == [[b"0", b"1", b"2", b"3", b"4"]] * 10
                assert asked == home.asked
                assert sum(facade.store.handshakes for facade in facades) == 4 * generation
            assert not any(facade.events for facade in facades)

    play(work)


def test_what_is_remembered_is_recalled_before_it_changes() -> None:
    async def work() -> None:
        async with Facades(3) as facades:
            a, b, c = [await Client.connect(facade.port) for facade in facades]
            await a.set(b"k", b"old")
            assert [await client.get(b"k") for client in (a, b, c)] == [b"old"] * 3
            await c.set(b"k", b"new")
            assert [await client.get(b"k") for client in (a, b, c)] == [b"new"] * 3
            assert [await client.add(b"n", 1) for client in (a, b, c)] == [1, 2, 3]

    play(work)


def test_a_newer_generation_waits_and_an_older_one_is_refused() -> None:
    async def work() -> None:
        async with Facades(3) as facades:
            zero, one, two = facades
            await (await Client.connect(zero.port)).set(b"k", b"of generation 1")
            # Node 2 is the home of generation 2, and has not heard of it.
            one.store.follow(facades.assignment(2), None)
            early = await Client.connect(one.port)
            setting = asyncio.create_task(early.set(b"k", b"of generation 2"))
            # Node 1 is not generation 1's home any more: its keys are gone, not seen.
            late = await Client.connect(two.port)
            assert await outcome(late.get(b"k")) == "ConnectionResetError"
            assert not setting.done()
            two.store.follow(facades.assignment(2), None)
            await setting
            assert await early.get(b"k") == b"of generation 2"
            link = await dial(two, 0, generation=1)
            assert await heard(link, p.StoreStale) == p.StoreStale(generation=2)
            link.close()
            assert two.events == [("stale-store", "of node-0, generation 1, here 2")]
            assert not zero.events
            assert not one.events

    play(work)


def test_a_home_that_follows_late_is_waited_for() -> None:
    """However long: it says that it is there."""

    async def work() -> None:
        async with Facades(2, silence_s=0.4) as facades:
            facades[1].store.follow(facades.assignment(2), None)
            client = await Client.connect(facades[1].port)
            setting = asyncio.create_task(client.set(b"k", b"v"))
            await asyncio.sleep(1.5)
            assert not setting.done()
            facades[0].store.follow(facades.assignment(2), None)
            await setting

    play(work)


@pytest.mark.parametrize("fenced", [True, False])
def test_no_rank_reads_what_another_generation_has_set(fenced: bool) -> None:
    """Where the home does not look at the generation of who comes, the same stories find that some do."""
    wrong: list[str] = []

    async def act(facades: Facades, dice: random.Random, generations: list[int]) -> None:
        node = dice.randrange(2)
        if dice.random() < 0.4:
            generations[node] += 1
            facades[node].store.follow(facades.assignment(generations[node]), None)
            return
        generation = generations[node]
        client = await Client.connect(facades[node].port)
        if dice.random() < 0.5:
            client.set_soon(b"k", b"%d" % generation)
        try:
            async with asyncio.timeout(0.05):
                value = await client.get(b"k")
        except (ConnectionError, TimeoutError):
            value = b""
        if value not in (b"", b"%d" % generation):
            wrong.append(f"a rank of generation {generation} reads {value!r}")
        await client.close()

    async def work() -> None:
        async with Facades(2) as facades:
            if not fenced:
                for facade in facades:
                    facade.replicas.serving.on_store = unfenced(facade)
            for seed in range(10):
                dice = random.Random(seed)
                generations = [2 + 20 * seed] * 2
                facades.follow(generations[0])
                for _ in range(15):
                    await act(facades, dice, generations)

    def unfenced(facade: Facade) -> Any:
        return lambda link, _join: facade.store.serve(link, p.StoreJoin(generation=facade.store._generation))

    play(work)
    assert bool(wrong) != fenced


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


async def lose_the_home_before_it_is_asked(facades: Facades, _clients: list[Client]) -> None:
    await facades[HOME].close()


async def lose_the_home_while_a_wait_goes_on(facades: Facades, clients: list[Client]) -> None:
    waits = [asyncio.create_task(outcome(client.wait(b"k"))) for client in (clients[0], clients[2])]
    home = facades[HOME].store.home
    assert home is not None
    await until(lambda: home.asked == 2)
    await facades[HOME].close()
    assert await asyncio.gather(*waits) == ["ConnectionResetError"] * 2
    assert kinds(facades[0]) == ["store-peer-lost"]


async def lose_the_home_of_what_is_remembered(facades: Facades, clients: list[Client]) -> None:
    """Node 0 has remembered a key, which nobody could recall any more."""
    await clients[1].set(b"k", b"v")
    assert await clients[0].get(b"k") == b"v"
    await facades[HOME].close()
    await until(lambda: facades[0].store.server._proxy._lost)
    assert await outcome(clients[0].get(b"k")) == "ConnectionResetError"


@pytest.mark.parametrize(
    "lose",
    [
        lose_the_home_before_it_is_asked,
        lose_the_home_while_a_wait_goes_on,
        lose_the_home_of_what_is_remembered,
    ],
)
def test_a_lost_home_ends_those_who_need_it_and_the_next_generation_forms(
    lose: Callable[[Facades, list[Client]], Awaitable[None]],
) -> None:
    async def work() -> None:
        async with Facades(3, silence_s=3) as facades:
            clients = [await Client.connect(facade.port) for facade in facades]
            await lose(facades, clients)
            one = await Client.connect(facades[0].port)
            assert await outcome(one.get(b"k")) == "ConnectionResetError"
            facades.follow(2, [0, 2])
            left = [await Client.connect(facades[node].port) for node in (0, 2)]
            await left[0].set(b"after", b"1")
            assert await left[1].get(b"after") == b"1"

    play(work)


def test_what_a_lost_node_remembers_stays_as_it_is() -> None:
    async def work() -> None:
        async with Facades(3, silence_s=3) as facades:
            clients = [await Client.connect(facade.port) for facade in facades]
            await clients[1].set(b"k", b"v")
            assert await clients[0].get(b"k") == b"v"
            await facades[0].close()
            home = facades[HOME].store.home
            assert home is not None
            await until(lambda: home._lost)
            clients[2].set_soon(b"k", b"other")
            assert await outcome(clients[2].get(b"k")) == "ConnectionResetError"
            # Nobody is lost but who wanted that.
            assert await clients[1].get(b"k") == b"v"
            await (await Client.connect(facades[2].port)).set(b"n", b"1")

    play(work)


@pytest.mark.parametrize("point", ["connected", "joined", "asked"])
def test_a_home_that_falls_silent_ends_a_wait(point: str) -> None:
    """As a node that loses power: nothing is closed, and nothing is answered any more."""

    async def work() -> None:
        async with Facades(2, silence_s=1.0) as facades:
            me, other = facades[1], facades[0]
            await until(lambda: me.store._joined)
            played = PlayedAgent(0)
            other.info = replace(other.info, agent_port=played.port)
            me.store.follow(facades.assignment(2), None)
            client = await Client.connect(me.port)
            waiting = asyncio.create_task(outcome(client.wait(b"k")))
            held: list[Any] = []
            if point == "connected":
                held.append(await played.came())
            else:
                link = await played.link()
                held.append(link)
                if point == "asked":
                    await heard(link, p.StoreSaid)
            assert await waiting == "ConnectionResetError"
            assert kinds(me) == ["store-peer-lost"]
            for one in held:
                (one[1] if isinstance(one, tuple) else one).close()
            await played.close()

    play(work)


def test_a_node_that_does_not_drop_what_it_remembers_is_lost() -> None:
    async def work() -> None:
        async with Facades(3, silence_s=1.0) as facades:
            await facades[2].close()
            link = await dial_as(facades, 2, HOME)
            client = await Client.connect(facades[HOME].port)
            await client.set(b"k", b"v")
            link.send(said(wire.Ask(1, protocol.MultiGet((b"k",)))))
            await heard(link, p.StoreSaid)
            client.set_soon(b"k", b"other")
            assert await outcome(client.num_keys()) == "ConnectionResetError"
            assert kinds(facades[HOME]) == ["store-peer-lost"]
            link.close()

    play(work)


async def dial_as(facades: Facades, number: int, to: int) -> Peer:
    """Connect for generation 1 in place of an agent that has been closed."""
    store = facades[to].store
    await until(lambda: number not in store._joined or store._joined[number]._over)
    store._joined.pop(number, None)
    assert store.home is not None
    store.home._lost.discard(number)
    return await dial(facades[to], number, generation=1)


BAD: dict[str, p.AgentMessage] = {
    "no msgpack": p.StoreSaid(body=b"\xc1"),
    "no items": p.StoreSaid(body=b"\x01"),
    "what the home says": said(wire.Told(7, wire.Refusal("x", hostile=False))),
    "a drop that nobody asked for": said(wire.Dropped(b"k")),
    "one number twice": said(
        *[wire.Ask(1, protocol.Wait((b"not there",))), wire.Ask(1, protocol.Wait((b"not there",)))]
    ),
    "a message of another edge": p.SaveReply(newest=None),
}


@pytest.mark.parametrize("name", BAD)
def test_an_agent_that_talks_nonsense_is_hung_up_on_alone(name: str) -> None:
    async def work() -> None:
        async with Facades(3) as facades:
            await facades[2].close()
            link = await dial_as(facades, 2, HOME)
            one, two = [await Client.connect(facades[node].port) for node in (0, 1)]
            waiting = asyncio.create_task(one.wait(b"k"))
            link.send(BAD[name])
            with pytest.raises(ConnectionError):
                await heard(link, p.StoreStale)
            link.close()
            assert kinds(facades[HOME]) == ["peer-refused"]
            await two.set(b"k", b"v")
            await waiting

    play(work)


ANSWERS: dict[str, p.AgentMessage] = {
    "what an agent says": said(wire.Ask(1, protocol.NumKeys())),
    "an answer to nothing": said(wire.Told(7, wire.Refusal("x", hostile=False))),
    "no values": said(wire.Told(1, wire.Reply())),
    "too many values": said(wire.Told(1, wire.Reply(values=(b"", b"")))),
    "a value to keep that is none": said(wire.Told(1, wire.Reply(values=(None,), keep=(0,)))),
    "a place to keep that is none": said(wire.Told(1, wire.Reply(values=(b"",), keep=(1,)))),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_home_that_talks_nonsense_is_lost(name: str) -> None:
    async def work() -> None:
        async with Facades(2) as facades:
            me, other = facades[1], facades[0]
            await until(lambda: me.store._joined)
            played = PlayedAgent(0)
            other.info = replace(other.info, agent_port=played.port)
            me.store.follow(facades.assignment(2), None)
            client = await Client.connect(me.port)
            getting = asyncio.create_task(outcome(client.get(b"k")))
            link = await played.link()
            await heard(link, p.StoreSaid)
            link.send(ANSWERS[name])
            assert await getting == "ConnectionResetError"
            assert kinds(me) == ["peer-refused", "store-peer-lost"]
            link.close()
            await played.close()

    play(work)


@pytest.mark.parametrize("number", [0, 1, 7], ids=["anew", "the home itself", "none of the job's"])
def test_who_may_not_join_is_refused(number: int) -> None:
    async def work() -> None:
        async with Facades(3) as facades:
            client = await Client.connect(facades[0].port)
            await client.set(b"k", b"v")
            link = await dial(facades[HOME], number, generation=1)
            with pytest.raises(ConnectionError):
                await heard(link, p.StoreStale)
            link.close()
            assert kinds(facades[HOME]) == ["peer-refused"]
            assert await client.get(b"k") == b"v"

    play(work)


def test_large_values_and_answers_pass() -> None:
    async def work() -> None:
        async with Facades(2) as facades:
            a, b = [await Client.connect(facade.port) for facade in facades]
            value = bytes(range(256)) * (40 << 10)
            await a.set(b"large", value)
            assert await b.get(b"large") == value
            assert await b.multi_get([b"large"] * 3) == [value] * 3
            assert connection.LIMIT > protocol.MAX_REPLY_NBYTES

    play(work)
