"""Somebody who passes handshakes on, or plays old ones again: he gets no connection, and stands for no node.

He has no key. But whoever listens on a port that an ended agent or daemon has left can pass what is said
there on to one that lives; and the owner of a job, or who hears the network, has whole connections recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, cast
from unittest.mock import Mock

import pytest

from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.ckptlessd.peer_links import PeerLinks
from ckptless.daemon.ckptlessd.peering import Peering, Roster
from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.messages import NodeInfo
from ckptless.daemon.protocol.model import NO_RUN
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.membership import Beat
from ckptless.daemon.protocol.version import Origin
from ckptless.daemon.settings.config import Peer
from ckptless.daemon.transport.credentials import Credentials, KeyCredentials, MungeCredentials
from ckptless.daemon.transport.link import (
    Link,
)
from tests.unit.daemon.served import serve

from .fake_munge import Cell, FakeMunge

HOST, JOB, KEY = "127.0.0.1", "4711", b"k" * 32
DEADLINE_S = 30.0


class Relay:
    """Listens, passes everything on to another port, and keeps what whoever dialled has said."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.port = 0
        self.said: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._both_ways(reader, writer)))

    async def _both_ways(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection(HOST, self._to)
        try:
            await asyncio.gather(self._pass(reader, onward, self.said), self._pass(there, writer, []))
        finally:
            onward.close()
            writer.close()

    @staticmethod
    async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: list[bytes]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                kept.append(data)
                sink.write(data)
        sink.close()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._came, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def to_its_end() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work
        for _ in range(20):  # transports that were closed end a little later
            await asyncio.sleep(0.001)

    asyncio.run(to_its_end())


@pytest.mark.parametrize("answers", [1, 3])
def test_an_agent_that_is_gone_does_not_answer_by_another(answers: int) -> None:
    """Node 2's agent is gone. What node 1 says to its port comes back to node 1, or goes to node 3.

    By such answers an agent without a daemon would hear nodes that it is cut off from, and not end its ranks.
    """

    async def work() -> None:
        agents = {node: Replicas(node, Origin(JOB), 1, VersionStore()) for node in (1, 3)}
        ports = {}
        for node, agent in agents.items():
            agent.credentials = KeyCredentials(KEY)
            ports[node] = await agent.start(HOST)
        try:
            await agents[1].knock(NodeInfo(node=3, name="n3", address=HOST, agent_port=ports[3]))
            async with Relay(ports[answers]).open() as relay:
                gone = NodeInfo(node=2, name="n2", address=HOST, agent_port=relay.port)
                with pytest.raises(PeerError, match=f"node-{answers} answers in place of node-2"):
                    await agents[1].knock(gone)
        finally:
            for agent in agents.values():
                await agent.close()

    run(work())


@pytest.mark.parametrize("answers", [0, 2])
def test_nor_does_a_daemon(answers: int, caplog: pytest.LogCaptureFixture) -> None:
    """Node 1's daemon is away; whoever has its port passes node 2's words on to node 0, or back to it."""
    credentials = KeyCredentials(KEY)
    accepted: list[Any] = []

    async def work() -> None:
        def came(*streams: Any) -> None:
            accepted.append(
                asyncio.create_task(Link.accept(streams, lambda _: answers, credentials, p.DaemonMessage))
            )

        server, port = await serve(HOST, 0, came)
        async with Relay(port).open() as relay:
            peers = tuple(Peer(node=n, name=f"n{n}", address=HOST, port=relay.port) for n in range(3))
            mesh = PeerLinks((JOB, NO_RUN), Roster(2, peers), credentials)
            ups: list[int] = []
            mesh.start(cast(Peering, Mock(linked=ups.append)))
            mesh.want(frozenset({1}))
            while len(accepted) < 2 and not ups:  # noqa: ASYNC110  # it dials again and again
                await asyncio.sleep(0.01)
            await mesh.close()
            assert ups == []
            assert caplog.text.count(f"node-1: node-{answers} answers in place of node-1") == 1
        server.close()
        for made in await asyncio.gather(*accepted, return_exceptions=True):
            assert isinstance(made, Exception)

    run(work())


@pytest.mark.parametrize("munge", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_a_whole_connection_that_was_recorded_is_not_taken_again(munge: bool, same: bool) -> None:
    """Greeting, proof and messages, also by who made them himself; to the same node, or to another one."""
    cell = Cell()

    def credentials() -> Credentials:
        return MungeCredentials(FakeMunge(cell)) if munge else KeyCredentials(KEY)

    async def work() -> None:
        made: asyncio.Queue[Any] = asyncio.Queue()
        there = [credentials()]

        async def accept(streams: Any) -> None:
            try:
                link: Link[p.DaemonMessage] = await Link.accept(
                    streams, lambda _: 1, there[0], p.DaemonMessage
                )
                made.put_nowait((link, await link.receive()))
            except (PeerError, ConnectionError) as error:
                made.put_nowait(error)

        tasks = []
        server, port = await serve(
            HOST, 0, lambda *streams: tasks.append(asyncio.create_task(accept(streams)))
        )
        async with Relay(port).open() as relay:
            dialled: Link[p.DaemonMessage] = await Link.dial(
                (HOST, relay.port), (JOB, 0), credentials(), p.DaemonMessage, DEADLINE_S
            )
            dialled.send(Beat())
            link, heard = await made.get()
            assert heard == Beat()
            if not same:
                there[0] = credentials()
            _, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"".join(relay.said))
            assert isinstance(await made.get(), PeerError)
            for one in (dialled, link, writer):
                one.close()
        server.close()
        await asyncio.gather(*tasks)

    run(work())
