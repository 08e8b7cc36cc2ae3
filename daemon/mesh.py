"""Connections between the daemons of one job: those that are wanted, dialled by the higher node, and kept up.

Tells what becomes of a connection, and what comes over it; not what it means, which is `peering`'s to know.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection

from ckptless.daemon.api.errors import CkptlessError, ProtocolError
from ckptless.daemon.config import Peer
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.link import GreetingCutError, Link, Route
from ckptless.daemon.peers.vouch import Vouch
from ckptless.daemon.roster import Roster

logger = logging.getLogger(__name__)

REDIAL_S = (0.05, 0.1, 0.2, 0.5)
DIAL_DEADLINE_S = 2.0
SALT_BYTES = 16


class Mesh:
    """This daemon's links to others of the roster. Owned by the daemon's event loop."""

    def __init__(self, job: str, launch: str, roster: Roster, vouch: Vouch) -> None:
        # `name` is what a connection is for: this run of that name, and no other.
        self.name = f"{job}/{launch}"
        self._job, self._roster, self._vouch = job, roster, vouch
        self._links: dict[int, Link[p.DaemonMessage]] = {}
        self._why: dict[int, str] = {}
        self._dialling: dict[int, asyncio.Task[None]] = {}
        self._wanted: frozenset[int] = frozenset()
        self._peers = roster.by_node
        self.on_up: Callable[[int], None] = lambda _node: None
        self.on_down: Callable[[int, str], None] = lambda _node, _why: None
        self.on_message: Callable[[int, p.DaemonMessage], None] = lambda _node, _message: None

    def want(self, nodes: frozenset[int]) -> None:
        """Keep dialling the lower ones of `nodes`; the higher ones dial this one, and `adopt` takes them.

        Others are dialled no more; a connection that is there stays.
        """
        self._wanted = nodes
        for node in nodes - self._dialling.keys():
            if node < self._roster.me:
                task = asyncio.create_task(self._keep_dialling(self._peers[node]))
                self._dialling[node] = task
                task.add_done_callback(lambda _done, node=node: self._dialling.pop(node, None))  # type: ignore[misc]

    @property
    def up(self) -> Collection[int]:
        """Nodes whose daemon is connected."""
        return self._links.keys()

    def send(self, node: int, message: p.DaemonMessage) -> bool:
        """Queue a message; False where the daemon is not connected."""
        link = self._links.get(node)
        if link is not None:
            link.send(message)
        return link is not None

    def hang_up(self, node: int, why: str) -> None:
        """End a connection, for this reason."""
        link = self._links.get(node)
        if link is not None:
            self._why[node] = why
            link.close()

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
        tries, said = 0, ""
        while peer.node in self._wanted:
            if peer.node in self._links:
                # It has dialled, or an earlier connection is still there.
                await asyncio.sleep(REDIAL_S[-1])
                continue
            try:
                route, me = Route((peer.address, peer.port), node=peer.node), (self.name, self._roster.me)
                link: Link[p.DaemonMessage] = await Link.dial(
                    route, me, self._vouch, p.DaemonMessage, DIAL_DEADLINE_S
                )
            except (OSError, TimeoutError, CkptlessError) as error:
                if not isinstance(error, OSError | GreetingCutError) and str(error) != said:
                    said = str(error)
                    logger.warning("job %s: node-%d: %s", self._job, peer.node, said)
                await asyncio.sleep(REDIAL_S[min(tries, len(REDIAL_S) - 1)])
                tries += 1
                continue
            tries, said = 0, ""
            await self._run(link)

    async def adopt(self, link: Link[p.DaemonMessage]) -> None:
        """A higher node has dialled: serve it until the connection ends. Raises ProtocolError."""
        if link.node not in self._peers or link.node <= self._roster.me:
            link.close()
            raise ProtocolError(f"node-{link.node} is not one that dials node-{self._roster.me}")
        await self._run(link)

    async def _run(self, link: Link[p.DaemonMessage]) -> None:
        """A connected peer, until it is not."""
        node = link.node
        old = self._links.pop(node, None)
        if old is not None:
            old.close()
        self._links[node] = link
        self._why.pop(node, None)
        self.on_up(node)
        why = "its daemon closed the connection"
        try:
            while True:
                self.on_message(node, await link.receive())
        except (OSError, CkptlessError) as error:
            why = self._why.pop(node, str(error))
        except Exception:
            # A bug of ours: it is told, there will be a new connection, and the other jobs never notice.
            why = "a message of it could not be dealt with: see this daemon's log"
            logger.exception("job %s: node-%d: %s", self._job, node, why)
        finally:
            link.close()
            if self._links.get(node) is link:
                del self._links[node]
                self.on_down(node, why)

    async def close(self) -> None:
        """Close everything; no callback comes after this."""
        self.on_up = lambda _node: None
        self.on_down = lambda _node, _why: None
        self.on_message = lambda _node, _message: None
        dialling = list(self._dialling.values())
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        for link in list(self._links.values()):
            link.close()
