"""Connections between the daemons of a cluster: one per pair, dialled by the higher node, kept up.

Tells what is known of a peer, not what it means: `on_up`, `on_down` and `on_message`. A daemon that is silent
for `dark_s` counts as down; one that was itself starved of CPU does not accuse anybody for that time.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.config import DaemonConfig, Peer
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.link import Link, serve

logger = logging.getLogger(__name__)

REDIAL_S = (0.05, 0.1, 0.2, 0.5)
DIAL_DEADLINE_S = 2.0


class Mesh:
    """This daemon's links. Owned by the daemon's event loop."""

    def __init__(self, config: DaemonConfig, key: bytes) -> None:
        self._config, self._key = config, key
        self._links: dict[int, Link[p.DaemonMessage]] = {}
        self._heard: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.on_up: Callable[[int], None] = lambda _node: None
        self.on_down: Callable[[int, str], None] = lambda _node, _why: None
        self.on_message: Callable[[int, p.DaemonMessage], None] = lambda _node, _message: None

    async def start(self) -> None:
        """Listen, and dial every lower node. Raises OSError where the port is taken."""
        me = self._config.me
        self._server, _ = await serve(me.address, me.port, self._connected)
        for peer in self._config.peers:
            if peer.node < me.node:
                self._spawn(self._keep_dialling(peer))
        self._spawn(self._beat())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def up(self) -> frozenset[int]:
        """Nodes whose daemon is connected."""
        return frozenset(self._links)

    def send(self, node: int, message: p.DaemonMessage) -> bool:
        """Queue a message; False where the daemon is not connected."""
        link = self._links.get(node)
        if link is not None:
            link.send(message)
        return link is not None

    def send_all(self, message: p.DaemonMessage) -> None:
        """Queue a message for every connected daemon."""
        for link in self._links.values():
            link.send(message)

    async def _keep_dialling(self, peer: Peer) -> None:
        tries = 0
        while True:
            try:
                address = (peer.address, peer.port)
                link: Link[p.DaemonMessage] = await Link.dial(
                    address, self._key, self._config.node, p.DaemonMessage, DIAL_DEADLINE_S
                )
            except (OSError, TimeoutError, CkptlessError) as error:
                if not isinstance(error, OSError):
                    logger.warning("node-%d: %s", peer.node, error)
                await asyncio.sleep(REDIAL_S[min(tries, len(REDIAL_S) - 1)])
                tries += 1
                continue
            tries = 0
            await self._run(link)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._accepted(reader, writer))

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link: Link[p.DaemonMessage] = await Link.accept(
                (reader, writer), self._key, self._config.node, p.DaemonMessage
            )
        except (OSError, TimeoutError, CkptlessError) as error:
            logger.warning("refused a connection from %s: %s", writer.get_extra_info("peername"), error)
            return
        await self._run(link)

    async def _run(self, link: Link[p.DaemonMessage]) -> None:
        """A connected peer, until it is not."""
        loop = asyncio.get_running_loop()
        node = link.node
        old = self._links.pop(node, None)
        if old is not None:
            old.close()
        self._links[node] = link
        self._heard[node] = loop.time()
        self.on_up(node)
        why = "its daemon closed the connection"
        try:
            while True:
                message = await link.receive()
                self._heard[node] = loop.time()
                if not isinstance(message, p.Beat):
                    self.on_message(node, message)
        except (OSError, CkptlessError) as error:
            why = str(error)
        finally:
            link.close()
            if self._links.get(node) is link:
                del self._links[node]
                self.on_down(node, why)

    async def _beat(self) -> None:
        """Say that we live, and close links that are silent for too long."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._config.beat_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            late = loop.time() - due
            if late > self._config.beat_s:
                # We were starved: the silence may be ours.
                due = loop.time()
                self._heard = {node: heard + late for node, heard in self._heard.items()}
            self.send_all(p.Beat())
            for node, link in list(self._links.items()):
                if loop.time() - self._heard[node] > self._config.dark_s:
                    logger.warning("node-%d: silent for %.1f s", node, self._config.dark_s)
                    link.close()

    async def close(self) -> None:
        """Close everything; no callback comes after this."""
        self.on_up = lambda _node: None
        self.on_down = lambda _node, _why: None
        self.on_message = lambda _node, _message: None
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.close()
        if self._server is not None:
            await self._server.wait_closed()
