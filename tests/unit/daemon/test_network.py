"""Copies keep to the chosen network and the chosen rate: real vaults, servers and sockets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ckptless.daemon.agent.versions.connections import Network
from ckptless.daemon.agent.versions.store import Version
from ckptless.daemon.transport.bulk import CHUNK_S

from .vaults import Nodes, payload_of, until

STEP, NBYTES = 7, 4_000_000
# Beside what may go at once, 50 ms' worth: clocks.
TOLERANCE = 1.02


async def push(nodes: Nodes) -> float:
    """Shard 0 to all others; how long it took, in seconds."""
    acked: list[float] = []
    found = nodes[0].vault.tensors(0, STEP)
    assert found is not None
    nodes.follow(nodes.assignment([0], None, generation=1))
    begin = time.monotonic()
    nodes[0].replicas.push_tensors(
        Version(1, 0, STEP, *found), frozenset({0}), lambda: acked.append(time.monotonic())
    )
    await until(lambda: acked)
    return acked[0] - begin


def test_a_limit_holds_for_all_holders_together() -> None:
    """Two copies of 4 MB never go faster than the rate, and four times the rate is much faster."""

    async def play(rate: float) -> float:
        async with Nodes(3, network=Network(send_rate=rate)) as nodes:
            nodes[0].hold(0, STEP, payload_of(0, STEP, NBYTES))
            took_s = await push(nodes)
            assert all(nodes[n].payload(0, STEP) == payload_of(0, STEP, NBYTES) for n in (1, 2))
            return took_s

    # Of some, as the machine may have other things to do.
    slow_s, *fast_s = (asyncio.run(play(rate)) for rate in (8e6, 32e6, 32e6, 32e6))
    for took_s, rate in ((slow_s, 8e6), *((each_s, 32e6) for each_s in fast_s)):
        assert rate * (took_s + CHUNK_S) * TOLERANCE >= 2 * NBYTES
    assert min(fast_s) < slow_s * 0.6


def test_a_newcomer_is_given_its_state_under_the_same_limit() -> None:
    rate = 16e6

    async def play() -> None:
        async with Nodes(2, network=Network(send_rate=rate)) as nodes:
            nodes[1].hold(0, STEP, payload_of(0, STEP, NBYTES))
            nodes.follow(nodes.assignment([0], STEP))
            begin = time.monotonic()
            await nodes[0].replicas.fetch_tensors(0, STEP, [1])
            took_s = time.monotonic() - begin
            assert rate * (took_s + CHUNK_S) * TOLERANCE >= NBYTES
            assert nodes[0].payload(0, STEP) == payload_of(0, STEP, NBYTES)

    asyncio.run(play())


def test_connections_go_to_and_come_from_the_chosen_addresses() -> None:
    """Node n on 127.9.8.n: who is connected to whom is what the kernel says."""
    hosts = {number: f"127.9.8.{number + 1}" for number in range(3)}

    async def play() -> None:
        async with Nodes(3, hosts=hosts) as nodes:
            seen: list[tuple[str, str]] = []
            for node in nodes.values():
                note(node.replicas.serving, seen)
            nodes[0].hold(0, STEP, payload_of(0, STEP, 1000))
            await push(nodes)
            assert set(seen) == {(hosts[0], hosts[1]), (hosts[0], hosts[2])}
            del seen[:]
            await nodes[2].replicas.fetch_record(0, STEP, [0])
            assert seen == [(hosts[2], hosts[0])]

    asyncio.run(play())


def note(serving: Any, seen: list[tuple[str, str]]) -> None:
    """Write down each connection that comes: from where, to where."""
    serve = serving.serve

    def noted(streams: tuple[Any, asyncio.StreamWriter], credentials: Any) -> Any:
        ends = (streams[1].get_extra_info(name)[0] for name in ("peername", "sockname"))
        seen.append((next(ends), next(ends)))
        return serve(streams, credentials)

    serving.serve = noted


def test_an_address_that_is_not_of_this_node_is_told_of() -> None:
    """Taken away after the start, for instance: the holder is lost, with what the kernel says."""

    async def play() -> None:
        async with Nodes(2, copies=1, network=Network(sources=("192.0.2.1",))) as nodes:
            nodes[0].hold(0, STEP, payload_of(0, STEP, 1000))
            await push(nodes)
            (text,) = nodes[0].told("holder-lost")
            assert "192.0.2.1" in text

    asyncio.run(play())
