"""Connections between the daemons of one job: one per pair, dialled by the higher node, kept up.

Tells what is known of a peer, not what it means: `on_up`, `on_down(node, why, quiet_s)` and `on_message`. A
daemon that is silent for `dark_s` counts as down; one that was itself starved of CPU does not accuse anybody
for that time.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from ckptless.daemon.api.errors import CkptlessError, ProtocolError
from ckptless.daemon.config import Peer, Timers
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.link import GreetingCutError, Link
from ckptless.daemon.peers.vouch import Vouch
from ckptless.daemon.roster import Roster

logger = logging.getLogger(__name__)

REDIAL_S = (0.05, 0.1, 0.2, 0.5)
DIAL_DEADLINE_S = 2.0
SALT_BYTES = 16


class Mesh:
    """This daemon's links to the others of the roster. Owned by the daemon's event loop."""

    def __init__(self, job: str, roster: Roster, vouch: Vouch, timers: Timers) -> None:
        self._job, self._roster, self._vouch, self._timers = job, roster, vouch, timers
        self._links: dict[int, Link[p.DaemonMessage]] = {}
        self._heard: dict[int, float] = {}
        self._silent: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_up: Callable[[int], None] = lambda _node: None
        self.on_down: Callable[[int, str, float], None] = lambda _node, _why, _quiet_s: None
        self.on_message: Callable[[int, p.DaemonMessage], None] = lambda _node, _message: None

    def start(self) -> None:
        """Dial every lower node; the higher ones dial this one, and `adopt` takes them."""
        for peer in self._roster.peers:
            if peer.node < self._roster.me:
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

    def send_key(self, node: int, key: bytes) -> None:
        """Give a daemon the job's key, which nobody on the way can read."""
        link = self._links.get(node)
        if link is not None:
            salt = secrets.token_bytes(SALT_BYTES)
            link.send(p.JobKey(job=self._job, salt=salt, masked=link.mask(salt, key)))

    def unmask(self, node: int, message: p.JobKey) -> bytes:
        """What `send_key` sent. Raises ProtocolError."""
        link = self._links.get(node)
        if link is None:
            raise ProtocolError("a key over a connection that is gone")
        return link.unmask(message.salt, message.masked)

    async def _keep_dialling(self, peer: Peer) -> None:
        tries = 0
        while True:
            try:
                address, me = (peer.address, peer.port), (self._job, self._roster.me)
                link: Link[p.DaemonMessage] = await Link.dial(
                    address, me, self._vouch, p.DaemonMessage, DIAL_DEADLINE_S
                )
            except (OSError, TimeoutError, CkptlessError) as error:
                if not isinstance(error, OSError | GreetingCutError):
                    logger.warning("node-%d: %s", peer.node, error)
                await asyncio.sleep(REDIAL_S[min(tries, len(REDIAL_S) - 1)])
                tries += 1
                continue
            tries = 0
            await self._run(link)

    async def adopt(self, link: Link[p.DaemonMessage]) -> None:
        """A higher node has dialled: serve it until the connection ends. Raises ProtocolError."""
        if all(peer.node != link.node or peer.node <= self._roster.me for peer in self._roster.peers):
            link.close()
            raise ProtocolError(f"node-{link.node} is not one that dials node-{self._roster.me}")
        await self._run(link)

    async def _run(self, link: Link[p.DaemonMessage]) -> None:
        """A connected peer, until it is not."""
        loop = asyncio.get_running_loop()
        node = link.node
        old = self._links.pop(node, None)
        if old is not None:
            old.close()
        self._links[node] = link
        self._silent.discard(node)
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
            if node in self._silent:
                why = f"its daemon was silent for {self._timers.dark_s:.1f} s"
        finally:
            link.close()
            if self._links.get(node) is link:
                del self._links[node]
                self.on_down(node, why, loop.time() - self._heard[node])

    async def _beat(self) -> None:
        """Say that we live, and close links that are silent for too long."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._timers.beat_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            late = loop.time() - due
            if late > self._timers.beat_s:
                # We were starved: the silence may be ours.
                due = loop.time()
                self._heard = {node: heard + late for node, heard in self._heard.items()}
            self.send_all(p.Beat())
            for node, link in list(self._links.items()):
                if loop.time() - self._heard[node] > self._timers.dark_s:
                    self._silent.add(node)
                    link.close()

    async def close(self) -> None:
        """Close everything; no callback comes after this."""
        self.on_up = lambda _node: None
        self.on_down = lambda _node, _why, _quiet_s: None
        self.on_message = lambda _node, _message: None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.close()
