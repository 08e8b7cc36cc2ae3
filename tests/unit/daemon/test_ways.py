"""Copies go over several interfaces at once, over those that are left when one is dead. Real sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from ckptless.daemon.agent.versions import connections, serving, shares
from ckptless.daemon.agent.versions.connections import Network
from ckptless.daemon.agent.versions.serving import Serving
from ckptless.daemon.agent.versions.store import Version
from ckptless.daemon.agent.versions.ways import Way, Ways
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.bulk import CHUNK_S
from ckptless.daemon.transport.link import Link, Route

from .vaults import Nodes, payload_of, until

PAGE = version.PAGE_NBYTES
NBYTES = 40 * PAGE + 77
Hosts: TypeAlias = dict[int, str | tuple[str, ...]]
HOSTS: Hosts = {n: (f"127.9.8.{n + 1}", f"127.9.9.{n + 1}") for n in range(3)}
FIRST, SECOND = (tuple(str(HOSTS[n][i]) for n in range(3)) for i in range(2))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEAST_NBYTES", PAGE)
    monkeypatch.setattr(shares, "MOST_NBYTES", PAGE)
    monkeypatch.setattr(serving, "SPREAD_NBYTES", PAGE)


def nodes_of(hosts: Hosts = HOSTS, rate: float = 0) -> Nodes:
    return Nodes(2, copies=1, hosts=hosts, network=Network(send_rate=rate))


async def push(nodes: Nodes, step: int = 7, payload: bytes = b"", generation: int | None = 1) -> None:
    """Shard 0 from node 0 to node 1; None: in the generation that there is."""
    if generation is not None:
        nodes.follow(nodes.assignment([0], None, generation=generation))
    now = nodes[0].replicas.core.generation
    nodes[0].hold(0, step, payload or payload_of(0, step, NBYTES), generation=now)
    acked: list[int] = []
    found = nodes[0].vault.tensors(0, step)
    assert found is not None
    here = Version(now, 0, step, *found)
    nodes[0].replicas.push_tensors(here, frozenset({0}), lambda: acked.append(step))
    await until(lambda: acked)


def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many pieces were asked for at each address."""
    counts: Counter[str] = Counter()
    give = Serving._give_chunks

    async def given(self: Serving, link: Any, wanted: p.GetChunks) -> None:
        counts[link._writer.get_extra_info("sockname")[0]] += 1
        await give(self, link, wanted)

    monkeypatch.setattr(Serving, "_give_chunks", given)
    return counts


def dead(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[Route]:
    """Nobody gets there: a connection takes its whole deadline. The routes that were tried."""
    tried: list[Route] = []
    dial = Link.dial.__func__  # type: ignore[attr-defined]

    async def dialled(cls: Any, route: Route, *words: Any) -> Any:
        if route.address[0] in addresses:
            tried.append(route)
            await asyncio.sleep(0.05)
            raise TimeoutError("no answer")
        return await dial(cls, route, *words)

    monkeypatch.setattr(Link, "dial", classmethod(dialled))
    return tried


def play(test: Callable[[Nodes], Any], hosts: Hosts = HOSTS, rate: float = 0) -> None:
    async def whole() -> None:
        async with nodes_of(hosts, rate) as nodes:
            await test(nodes)

    asyncio.run(whole())


def test_a_version_goes_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = asked(monkeypatch)

    async def test(nodes: Nodes) -> None:
        await push(nodes)
        assert nodes[1].payload(0, 7) == payload_of(0, 7, NBYTES)
        assert set(counts) == {FIRST[0], SECOND[0]}
        assert sum(counts.values()) == 41, "each piece once"
        assert not nodes[0].events
        assert not nodes[1].events

    play(test)


@pytest.mark.parametrize("number", [0, 1])
def test_with_one_interface_at_one_end_all_is_as_ever(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    counts = asked(monkeypatch)

    async def test(nodes: Nodes) -> None:
        await push(nodes)
        assert nodes[1].payload(0, 7) == payload_of(0, 7, NBYTES)
        assert not counts

    play(test, HOSTS | {number: FIRST[number]})


def test_the_limit_is_of_all_together() -> None:
    rate, nbytes = 8e6, 4_000_000

    async def test(nodes: Nodes) -> None:
        begin = time.monotonic()
        await push(nodes, payload=payload_of(0, 7, nbytes))
        assert rate * (time.monotonic() - begin + CHUNK_S) * 1.02 >= nbytes

    play(test, rate=rate)


def test_what_is_there_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = asked(monkeypatch)
    first = payload_of(0, 7, NBYTES)
    second = first[: 30 * PAGE] + payload_of(0, 8, NBYTES)[30 * PAGE :]

    async def test(nodes: Nodes) -> None:
        await push(nodes, 7, first)
        counts.clear()
        await push(nodes, 8, second, None)
        assert nodes[1].payload(0, 8) == second
        assert sum(counts.values()) == 11
        # What is spoilt is found when it is taken over; all of it is sent then.
        nodes[1].spoil(0, 8, version.header_nbytes(NBYTES, PAGE) + 3)
        counts.clear()
        await push(nodes, 9, second, None)
        assert nodes[1].payload(0, 9) == second
        assert sum(counts.values()) >= 11
        assert nodes[1].told("bad-version")

    play(test)


@pytest.mark.parametrize("gone", [FIRST[1], SECOND[1]])
def test_a_holders_dead_interface_is_told_of_once(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    """Also the first one, over which the holder is spoken to."""
    dead(monkeypatch, gone)

    async def test(nodes: Nodes) -> None:
        for step in (7, 8, 9):
            await push(nodes, step, generation=1 if step == 7 else None)
            assert nodes[1].payload(0, step) == payload_of(0, step, NBYTES)
        told = nodes[0].told("interface-lost")
        assert told == (
            [f"n1 is not reached at {gone} any more (no answer); the others carry on"]
            if gone == FIRST[1]
            else []
        )
        assert not nodes[0].told("holder-lost")

    play(test)


@pytest.mark.parametrize("gone", [FIRST[0], SECOND[0]])
def test_an_interface_to_the_giver_is_dead(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    counts, tried = asked(monkeypatch), dead(monkeypatch, gone)

    async def test(nodes: Nodes) -> None:
        await push(nodes)
        await until(lambda: nodes[1].told("interface-lost"))
        await push(nodes, 8, generation=None)
        assert nodes[1].payload(0, 8) == payload_of(0, 8, NBYTES)
        assert len(nodes[1].told("interface-lost")) == 1
        assert gone in nodes[1].told("interface-lost")[0]
        assert len(tried) == 1
        assert gone not in counts
        # Tried again in the next generation.
        await push(nodes, 9, generation=2)
        await until(lambda: len(tried) > 1)

    play(test)


def test_one_that_dies_on_the_way_leaves_its_part_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    give, stuck = Serving._give_chunks, asyncio.Event()
    monkeypatch.setattr(shares, "SLOW_S", 0.1)

    async def stalls(self: Serving, link: Any, wanted: p.GetChunks) -> None:
        if link._writer.get_extra_info("sockname")[0] == SECOND[0]:
            stuck.set()
            await asyncio.sleep(60)
        await give(self, link, wanted)

    monkeypatch.setattr(Serving, "_give_chunks", stalls)

    async def test(nodes: Nodes) -> None:
        await push(nodes)
        assert stuck.is_set()
        assert nodes[1].payload(0, 7) == payload_of(0, 7, NBYTES)
        (told,) = nodes[1].told("interface-lost")
        assert SECOND[0] in told
        assert "slower" in told

    play(test)


def test_a_holder_that_falls_silent_is_spoken_to_over_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_DEADLINE_S", 0.3)
    consider = Serving._consider

    async def silent(self: Serving, link: Any, offer: p.OfferTensors) -> None:
        if link._writer.get_extra_info("sockname")[0] == FIRST[1]:
            await asyncio.sleep(60)
        await consider(self, link, offer)

    monkeypatch.setattr(Serving, "_consider", silent)

    async def test(nodes: Nodes) -> None:
        await push(nodes)
        assert nodes[1].payload(0, 7) == payload_of(0, 7, NBYTES)
        (told,) = nodes[0].told("interface-lost")
        assert FIRST[1] in told
        assert not nodes[0].told("holder-lost")

    play(test)


def test_where_all_are_dead_the_holder_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    dead(monkeypatch, FIRST[1], SECOND[1])

    async def test(nodes: Nodes) -> None:
        await push(nodes)  # nobody is left to hold it
        assert len(nodes[0].told("interface-lost")) == 1
        assert len(nodes[0].told("holder-lost")) == 1

    play(test)


def test_a_newcomer_fetches_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = asked(monkeypatch)

    async def test(nodes: Nodes) -> None:
        nodes[1].hold(0, 7, payload_of(0, 7, NBYTES))
        nodes.follow(nodes.assignment([0], 7))
        await nodes[0].replicas.fetch_tensors(0, 7, [1])
        assert nodes[0].payload(0, 7) == payload_of(0, 7, NBYTES)
        assert set(counts) == {FIRST[1], SECOND[1]}

    play(test)


def test_ways() -> None:
    async def never(_route: Route) -> Any:
        raise AssertionError

    info = m.NodeInfo(node=1, name="n1", address="a", agent_port=1, interfaces=(("b", 2), ("c", 3)))
    assert [way.address for way in Ways((), never).to(info)] == [("a", 1)]
    ways = Ways(("x", "y"), never)
    events: list[tuple[str, str]] = []
    ways.on_event = lambda kind, text: events.append((kind, text))
    first, second = ways.to(info)
    assert (first.address, second.address) == (("a", 1), ("b", 2))
    assert ways.lose(second, "why")
    assert ways.lose(second, "again")
    assert ways.to(info) == (first,)
    assert not ways.lose(first, "the last")
    assert len(events) == 1
    ways.forget()
    assert ways.to(info) == (first, second)
    assert ways.to(m.NodeInfo(node=2, name="n2", address="d", agent_port=4)) == (
        Way(m.NodeInfo(node=2, name="n2", address="d", agent_port=4)),
    )
