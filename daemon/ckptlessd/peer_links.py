"""Connections between the daemons of one job: those that are wanted, dialled by the higher node, and kept up.

They tell the job's `Peering` what becomes of a connection, and what comes over it; not what that means. The
key that the job's agents know each other by is passed on here, too: masked for each connection.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection

from ckptless.daemon.ckptlessd.membership.watch import Answer
from ckptless.daemon.ckptlessd.peering import Peering, Roster
from ckptless.daemon.protocol.errors import CkptlessError, ProtocolError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.settings.config import Peer
from ckptless.daemon.transport.credentials import Credentials
from ckptless.daemon.transport.link import GreetingCutError, Link, Route
from ckptless.daemon.transport.tasks import Tasks, end_all

logger = logging.getLogger(__name__)

REDIAL_S = (0.05, 0.1, 0.2, 0.5)
DIAL_DEADLINE_S = 2.0
SALT_BYTES = 16
# A look at a silent node takes so long, where nobody says otherwise.
LOOK_S = 0.5
# Messages that go the same way wait so long for each other.
FLUSH_S = 0.005


class PeerLinks:
    """The links of this daemon to others of the roster. Owned by the daemon's event loop.

    `key` is the job's, once it is known here; `on_key` hears of it.
    """

    def __init__(
        self, run: tuple[str, str], roster: Roster, credentials: Credentials, look_s: float = LOOK_S
    ) -> None:
        self._job, launch = run
        # `name` is what a connection is for: this run of that name, and no other.
        self.name = f"{self._job}/{launch}"
        self._roster, self._credentials, self._look_s = roster, credentials, look_s
        self._peering: Peering | None = None
        self._links: dict[int, Link[p.DaemonMessage]] = {}
        self._why: dict[int, str] = {}
        self._dialling: set[int] = set()
        self._tasks = Tasks()
        self._wanted: frozenset[int] = frozenset()
        self._peers = roster.by_node
        self.key: bytes | None = None
        self.on_key: Callable[[bytes], None] = lambda _key: None

    def start(self, peering: Peering) -> None:
        """Begin to look for the other daemons."""
        self._peering = peering
        peering.start()

    # ------------------------------------------------------------------------ Links, for Peering

    @property
    def up(self) -> Collection[int]:
        """Nodes whose daemon is connected."""
        return self._links.keys()

    def want(self, nodes: frozenset[int]) -> None:
        """Keep dialling the lower ones of `nodes`; the higher ones dial this one, and `adopt` takes them.

        Others are dialled no more; a connection that is there stays.
        """
        self._wanted = nodes
        for node in nodes - self._dialling:
            if node < self._roster.me:
                self._dialling.add(node)
                self._tasks.spawn(self._keep_dialling(self._peers[node]))

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

    def look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        """See whether anything listens there, the node's agent or its daemon."""
        self._tasks.spawn(self._look(node, address, agent=agent))

    async def _look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        answer = await _knock(address, self._look_s)
        if not agent and answer in ("open", "refused"):
            answer = "lives"
        if self._peering is not None:
            self._peering.looked(node, answer)

    def flush_soon(self) -> None:
        """Call `Peering.flush` in a few milliseconds."""
        asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        if self._peering is not None:
            self._peering.flush()

    # ----------------------------------------------------------------------------------- the key

    def learn_key(self, key: bytes) -> None:
        """Take the job's key, and pass it on. Two leaders may each have made one: the smaller stays."""
        if self.key is not None and self.key <= key:
            return
        self.key = key
        self.on_key(key)
        for link in self._links.values():
            self._send_key(link, key)

    def _send_key(self, link: Link[p.DaemonMessage], key: bytes) -> None:
        salt = secrets.token_bytes(SALT_BYTES)
        link.send(p.JobKey(job=self._job, salt=salt, masked=link.mask(salt, key)))

    # ------------------------------------------------------------------------------- connections

    async def _keep_dialling(self, peer: Peer) -> None:
        try:
            await self._dial(peer)
        finally:
            self._dialling.discard(peer.node)

    async def _dial(self, peer: Peer) -> None:
        route, me = Route((peer.address, peer.port), node=peer.node), (self.name, self._roster.me)
        tries, said = 0, ""
        while peer.node in self._wanted:
            if peer.node in self._links:
                # It has dialled, or an earlier connection is still there.
                await asyncio.sleep(REDIAL_S[-1])
                continue
            try:
                link: Link[p.DaemonMessage] = await Link.dial(
                    route, me, self._credentials, p.DaemonMessage, DIAL_DEADLINE_S
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
        if self.key is not None:
            self._send_key(link, self.key)
        if self._peering is not None:
            self._peering.linked(node)
        why = "its daemon closed the connection"
        try:
            while True:
                self._hear(link, await link.receive())
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
                if self._peering is not None:
                    logger.info("job %s: node-%d: %s", self._job, node, why)
                    self._peering.unlinked(node, why)

    def _hear(self, link: Link[p.DaemonMessage], message: p.DaemonMessage) -> None:
        if isinstance(message, p.PeerMessage) and message.job != self._job:
            raise ProtocolError(f"a message of job {message.job!r} over a connection of {self._job!r}")
        if isinstance(message, p.JobKey):
            self.learn_key(link.unmask(message.salt, message.masked))
        elif self._peering is not None:
            self._peering.hear(link.node, message)

    async def close(self) -> None:
        """Close everything; nothing is told to anybody after this."""
        self._peering = None
        self.on_key = lambda _key: None
        await end_all(self._tasks)
        for link in list(self._links.values()):
            link.close()


async def _knock(address: tuple[str, int], deadline_s: float) -> Answer:
    """Whether something listens there, or the machine says that nothing does, or nothing answers at all."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(deadline_s):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        # If this daemon was starved itself, the answer may have come before the alarm.
        return "silent" if loop.time() - begun < 2 * deadline_s else "unsure"
    except OSError:
        return "silent"
    writer.close()
    return "open"
