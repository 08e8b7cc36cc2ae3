"""Holders that take a connection and then say nothing: told of, and done without. Real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from ckptless.daemon.agent.versions import connections, serving
from ckptless.daemon.agent.versions.connections import Peer
from ckptless.daemon.agent.versions.store import Version, digest
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import (
    Link,
)

from .served import closed, serve
from .vaults import DEADLINE_S, HOST, JOB, Nodes, payload_of, until

STEP, NBYTES = 7, 3 * version.PAGE_NBYTES
# Of the tests' own; what is shipped is in seconds.
SHORT_S = 0.3
SHIPPED_S, SHIPPED_LATER_S = connections.ANSWER_DEADLINE_S, serving.LATER_S


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_DEADLINE_S", SHORT_S)
    monkeypatch.setattr(serving, "LATER_S", SHORT_S / 6)


def test_the_shipped_deadlines_fit_each_other() -> None:
    """Who takes its time says so several times before it is given up."""
    assert SHIPPED_LATER_S * 4 < SHIPPED_S
    assert serving.CATCH_UP_DEADLINE_S < SHIPPED_S


@asynccontextmanager
async def silent(nodes: Nodes, number: int, heard: Callable[[Peer, Any], None]) -> AsyncIterator[None]:
    """In place of a node's server one that shakes hands, and hands what it hears to `heard`."""

    async def listen(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        link: Peer = await Link.accept(streams, lambda _job: number, KeyCredentials(b"key"), p.AgentMessage)
        try:
            while True:
                heard(link, message := await link.receive())
                if isinstance(message, p.PutTensors):
                    await link.receive_bulk(memoryview(bytearray(NBYTES)))
        except ConnectionError:
            """The other end is done with it."""
        finally:
            link.close()

    tasks: list[asyncio.Task[None]] = []
    server, port = await serve(HOST, 0, lambda *pair: tasks.append(asyncio.create_task(listen(pair))))
    nodes[number].info = structs.replace(nodes[number].info, agent_port=port)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what is closed goes with the loop's next round


def held(nodes: Nodes, number: int = 0) -> Version:
    found = nodes[number].vault.tensors(0, STEP)
    assert found is not None
    return Version(1, 0, STEP, *found)


def nothing(_link: Peer, _message: Any) -> None:
    """It says nothing."""


def wants(link: Peer, message: Any) -> None:
    """It wants what it is offered, and does not say what has become of it."""
    if isinstance(message, p.OfferTensors):
        link.send(p.TensorsAnswer(answer="wanted"))


@pytest.mark.parametrize("heard", [nothing, wants], ids=["to an offer", "to the tensors"])
def test_who_does_not_answer_is_replaced(heard: Callable[[Peer, Any], None]) -> None:
    async def play() -> None:
        async with Nodes(3, copies=1) as nodes, silent(nodes, 1, heard):
            nodes[0].hold(0, STEP, payload_of(0, STEP, NBYTES))
            nodes.follow(nodes.assignment([0], None, generation=1))
            acked: list[int] = []
            nodes[0].replicas.push_tensors(held(nodes), frozenset({0}), lambda: acked.append(1))
            await until(lambda: acked)
            assert nodes[2].payload(0, STEP) == payload_of(0, STEP, NBYTES)
            (text,) = nodes[0].told("holder-lost")
            assert text.startswith("node-1 ")
            assert text.endswith("it has not answered for 0 s")

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def test_a_record_that_is_not_answered_goes_to_another() -> None:
    async def play() -> None:
        async with Nodes(3, copies=1) as nodes, silent(nodes, 1, nothing):
            nodes.follow(nodes.assignment([0], None, generation=1))
            acked: list[int] = []
            nodes[0].replicas.on_acked = lambda _rank, step: acked.append(step)
            for step in (STEP, STEP + 1):
                data = f"step {step}".encode()
                nodes[0].replicas.push(
                    p.PutRecord(generation=1, rank=0, shard=0, step=step, record=data, digest=digest(data))
                )
            await until(lambda: len(acked) == 2)
            assert nodes[2].vault.record(0, STEP + 1) is not None
            assert len(nodes[0].told("holder-lost")) == 1

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def test_a_holder_with_nothing_to_answer_may_be_silent_for_long() -> None:
    """Records are answered, refused ones too; after that there is no deadline."""

    async def play() -> None:
        async with Nodes(2, copies=1) as nodes:
            nodes.follow(nodes.assignment([0], None, generation=1))
            acked: list[int] = []
            nodes[0].replicas.on_acked = lambda _rank, step: acked.append(step)

            def push(step: int) -> None:
                data = b"a record"
                nodes[0].replicas.push(
                    p.PutRecord(generation=1, rank=0, shard=0, step=step, record=data, digest=digest(data))
                )

            push(1)
            await until(lambda: acked == [1])
            # Frozen, as between two generations: nothing is taken, and that is an answer.
            nodes[1].replicas.core.accepting = False
            push(2)
            await asyncio.sleep(3 * SHORT_S)
            assert acked == [1]
            assert nodes[0].told("holder-lost") == []

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def offer(nodes: Nodes) -> p.OfferTensors:
    """Of what node 0 holds."""
    one = held(nodes)
    with one.region.view(one.at.offset, version.PAGE_NBYTES) as view:
        return p.OfferTensors(generation=1, header=bytes(view))


async def connect(nodes: Nodes, me: int) -> Peer:
    info = nodes[1].info
    address = (info.address, info.agent_port)
    return await Link.dial(address, (JOB, me), KeyCredentials(b"key"), p.AgentMessage, DEADLINE_S)


async def answers(link: Peer) -> list[str]:
    """Up to the first that is one."""
    found: list[str] = []
    while not found or found[-1] == "later":
        message = await link.receive()
        assert isinstance(message, p.TensorsAnswer)
        found.append(message.answer)
    return found


def test_who_has_to_wait_for_another_hears_so_and_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has said that it gives them, and does not."""
    monkeypatch.setattr(serving, "PUT_DEADLINE_S", 4 * SHORT_S)

    async def play() -> None:
        async with Nodes(3) as nodes:
            nodes[0].hold(0, STEP, payload_of(0, STEP, NBYTES))
            nodes.follow(nodes.assignment([0], None, generation=1))
            first, second = await connect(nodes, 0), await connect(nodes, 2)
            first.send(offer(nodes))
            assert await answers(first) == ["wanted"]
            second.send(offer(nodes))
            *before, last = await answers(second)
            assert last == "wanted"
            assert len(before) > 1
            for link in (first, second):
                link.close()
                await closed(link)

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def test_who_waits_is_told_when_the_other_is_done() -> None:
    """At once, and not only when the other says something else."""

    async def play() -> None:
        async with Nodes(3) as nodes:
            for number in (0, 2):
                nodes[number].hold(0, STEP, payload_of(0, STEP, NBYTES))
            nodes.follow(nodes.assignment([0], None, generation=1))
            at = held(nodes).at
            first, second = await connect(nodes, 0), await connect(nodes, 2)
            first.send(offer(nodes))
            assert await answers(first) == ["wanted"]
            second.send(offer(nodes))
            with held(nodes).region.view(at.offset + version.PAGE_NBYTES, NBYTES) as view:
                first.send(p.PutTensors())
                await first.send_bulk(view)
            assert (await answers(first))[-1] == "held"
            assert (await answers(second))[-1] == "held"
            for link in (first, second):
                link.close()
                await closed(link)

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
