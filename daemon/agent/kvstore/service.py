"""The key-value store as an agent has it: its ranks' end, and the keys' home, or the way to it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from ckptless.daemon.agent.kvstore import wire
from ckptless.daemon.agent.kvstore.connection import Connection, Peer, refuse
from ckptless.daemon.agent.kvstore.home import Home
from ckptless.daemon.agent.kvstore.proxy import Proxy
from ckptless.daemon.agent.kvstore.server import StoreServer
from ckptless.daemon.agent.nccl.ids import NcclIds
from ckptless.daemon.protocol.errors import CkptlessError, ProtocolError
from ckptless.daemon.protocol.messages import Assignment, NodeInfo
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.transport.tasks import Tasks, end_all

# Numeric, and one that every resolver knows: torch looks the name of its store up each time it connects.
ADDRESS = "127.0.0.1"
# Between two tries to reach the home, which may not have heard of the job's key yet: at first, and at most.
AGAIN_S, MOST_AGAIN_S = 0.1, 2.0


def home_of(assignment: Assignment) -> int:
    """Return the node whose agent keeps the generation's keys: the same at every agent, then another."""
    nodes = sorted({place.node for place in assignment.places})
    return nodes[assignment.generation % len(nodes)]


class StoreService:
    """Owned by the agent's event loop. `dial` connects to another agent; `serve` takes one that has come.

    A connection between agents is of one generation. An agent that is silent for `silence_s`, while something
    is expected of it, is lost for the rest of it: clients that need it are hung up on. `handshakes` counts
    the connections that this agent has made.
    """

    def __init__(self, node: int, dial: Callable[[NodeInfo], Awaitable[Peer]], silence_s: float) -> None:
        self._me, self._dial, self._silence_s = node, dial, silence_s
        self.server = StoreServer()
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None
        self._generation = 0
        self._followed = asyncio.Event()
        self._nodes: frozenset[int] = frozenset()
        # Where it is here: the keys, and who has connected to use them.
        self.home: Home | None = None
        self._joined: dict[int, Connection[wire.ToHome]] = {}
        # Where it is not.
        self.way: Connection[wire.FromHome] | None = None
        self._task: asyncio.Task[None] | None = None
        self._tasks = Tasks()
        self.handshakes = 0

    async def start(self, on_event: Callable[[str, str], None]) -> tuple[str, int]:
        """Listen for this node's ranks; return where. Raises OSError."""
        self.on_event = on_event
        return ADDRESS, await self.server.start(ADDRESS)

    def follow(self, assignment: Assignment, ids: NcclIds | None) -> None:
        """Begin a new generation: no key of the old one, and nobody who waits for one, is left."""
        self._leave(assignment.generation)
        self._generation = assignment.generation
        infos = {info.node: info for info in assignment.nodes}
        self._nodes = frozenset(infos)
        node = home_of(assignment)
        if self._me in self._nodes:
            self.server.cut(ids, self._be_home() if node == self._me else self._go_to(infos[node]))
        else:
            self.server.cut(ids, self._have_none())
        self._followed.set()
        self._followed = asyncio.Event()

    def _leave(self, generation: int) -> None:
        for connection in self._joined.values():
            connection.leave(generation)
        if self._task is not None:
            self._task.cancel()
        self.home = self.way = self._task = None
        self._joined = {}

    def _have_none(self) -> Proxy:
        """This node has come since the generation began: its ranks, spares, are of none yet."""
        proxy = Proxy(self._generation, lambda _item: None)
        proxy.lost("this node is none of the generation's")
        return proxy

    # ----------------------------------------------------------------------------------- the home

    def _be_home(self) -> Proxy:
        joined: dict[int, Connection[wire.ToHome]] = {}

        def tell(node: int, item: wire.FromHome) -> None:
            if node == self._me:
                proxy.heard(item)
            elif node in joined:
                joined[node].say(item)

        home = Home(tell)
        proxy = Proxy(self._generation, partial(home.heard, self._me))
        self.home, self._joined = home, joined
        return proxy

    async def serve(self, link: Peer, join: p.StoreJoin) -> None:
        """Serve another agent's ranks to the end of the connection or the generation.

        One of an older generation is refused, one of a newer waits until this agent has followed: agents do
        not hear of it in the same instant. Raises ConnectionError, ProtocolError.
        """
        while join.generation > self._generation:
            # It is read no further until then, but hears that somebody is here.
            link.send(p.StorePong())
            followed = self._followed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s / 4):
                    await link.drain()
                    await followed.wait()
        if join.generation < self._generation:
            text = f"of node-{link.node}, generation {join.generation}, here {self._generation}"
            self.on_event("stale-store", text)
            await refuse(link, self._generation, self._silence_s)
            return
        home, node = self.home, link.node
        if home is None or node not in self._nodes or node == self._me or node in self._joined:
            raise ProtocolError("it connects to a store that is not here, or anew")
        connection = self._joined[node] = Connection(
            partial(home.heard, node), partial(home.waits_for, node), wire.TO_HOME, self._silence_s
        )
        why = "has left"
        try:
            await connection.run(link)
        except OSError as error:
            why = str(error)
        finally:
            if home is self.home:
                if home.waits_for(node):
                    self._tell_lost(node, why)
                home.lost(node)

    # ----------------------------------------------------------------------------- the way to it

    def _go_to(self, info: NodeInfo) -> Proxy:
        proxy = Proxy(self._generation, lambda item: way.say(item))
        way: Connection[wire.FromHome] = Connection(
            proxy.heard, lambda: proxy.expects, wire.FROM_HOME, self._silence_s
        )
        self.way = way
        self._task = self._tasks.spawn(self._use_home(info, proxy, way))
        return proxy

    async def _use_home(self, info: NodeInfo, proxy: Proxy, way: "Connection[wire.FromHome]") -> None:
        generation, why = self._generation, "is in a newer generation"
        try:
            link = await self._reach(info, proxy)
            self.handshakes += 1
            link.send(p.StoreJoin(generation=generation))
            await way.run(link)
        except (OSError, TimeoutError, CkptlessError) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, ProtocolError):
                self.on_event("peer-refused", f"node-{info.node}: {why}")
            if proxy.expects:
                self._tell_lost(info.node, why)
        finally:
            proxy.lost(f"node-{info.node}, which keeps the keys, {why}")

    async def _reach(self, info: NodeInfo, proxy: Proxy) -> Peer:
        """Connect to the home, for as long as nobody has waited for it too long. Raises as `dial` does."""
        loop = asyncio.get_running_loop()
        waited_since, again_s = loop.time(), AGAIN_S
        while True:
            try:
                return await self._dial(info)
            except (OSError, TimeoutError, CkptlessError):
                if not proxy.expects:
                    waited_since = loop.time()
                elif loop.time() - waited_since > self._silence_s:
                    raise
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, MOST_AGAIN_S)

    def _tell_lost(self, node: int, why: str) -> None:
        self.on_event("store-peer-lost", f"node-{node} {why}: clients that need it are hung up on")

    async def close(self) -> None:
        """Hang up on everybody."""
        await self.server.close()
        await end_all(self._tasks)
