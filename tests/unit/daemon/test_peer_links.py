"""Connections between daemons, whatever comes over them."""

import asyncio
from typing import Any, cast

import pytest

from ckptless.daemon.ckptlessd.peer_links import PeerLinks
from ckptless.daemon.ckptlessd.peering import Peering, Roster
from ckptless.daemon.protocol.model import NO_RUN
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.settings.config import Peer
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import Link


class OneMessage:
    """A connection of node 1's daemon that brings one message, and then nothing for good."""

    node = 1

    def __init__(self) -> None:
        self.closed = False
        self._left = [p.Rows(job="j", records=())]

    async def receive(self) -> p.DaemonMessage:
        if self._left:
            return self._left.pop()
        await asyncio.Event().wait()
        raise AssertionError

    def close(self) -> None:
        self.closed = True


class Failing:
    """A job that falls over every message."""

    def __init__(self) -> None:
        self.downs: list[tuple[int, str]] = []

    def start(self) -> None:
        pass

    def linked(self, node: int) -> None:
        pass

    def unlinked(self, node: int, why: str) -> None:
        self.downs.append((node, why))

    def hear(self, _node: int, _message: p.DaemonMessage) -> None:
        raise KeyError("a bug")


def test_a_message_that_cannot_be_dealt_with_ends_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> tuple[list[tuple[int, str]], bool]:
        peers = tuple(Peer(node=n, name=f"n{n}", address="127.0.0.1", port=1) for n in range(2))
        links = PeerLinks(("j", NO_RUN), Roster(0, peers), KeyCredentials(b"k" * 32))
        peering = Failing()
        links.start(cast("Peering", peering))
        link = OneMessage()
        async with asyncio.timeout(10):
            await links.adopt(cast("Link[Any]", link))
        await links.close()
        return peering.downs, link.closed

    downs, closed = asyncio.run(body())
    assert closed
    ((node, why),) = downs
    assert node == 1
    assert "see this daemon's log" in why
    assert "KeyError: 'a bug'" in caplog.text
