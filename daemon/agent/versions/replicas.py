"""Agent to agent: replicates this node's records and tensors to their holders, and gets state from others."""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from ckptless.daemon.agent.core.replication import Key, Replication
from ckptless.daemon.agent.versions.connections import (
    ANY_NETWORK,
    Network,
    Peer,
    SmallConnection,
    TensorConnection,
)
from ckptless.daemon.agent.versions.fetching import TensorsFetch
from ckptless.daemon.agent.versions.serving import Serving
from ckptless.daemon.agent.versions.store import HeldRecord, Version, VersionStore
from ckptless.daemon.agent.versions.ways import Way, Ways
from ckptless.daemon.protocol.errors import CkptlessError, PeerError
from ckptless.daemon.protocol.messages import Assignment, NodeInfo
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.version import Origin
from ckptless.daemon.replication.protection import Item
from ckptless.daemon.transport.bulk import SendRate
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import Link, Route
from ckptless.daemon.transport.listener import Listener
from ckptless.daemon.transport.tasks import Tasks, end_all

DIAL_DEADLINE_S = 3.0
T = TypeVar("T")
# Of a record, which is small.
FETCH_DEADLINE_S = 60.0


class Replicas:
    """Owned by the agent's event loop. `on_acked(rank, step)`: every holder has verified the record.

    `domains` are the nodes' failure domains, see JobSpec. `on_compared` and `on_unreachable` are for whoever
    `compare`s. `credentials` come from the daemon; nothing is asked of other agents, and none of them is
    heard, before.
    """

    def __init__(
        self,
        node: int,
        origin: Origin,
        copies: int,
        store: VersionStore,
        domains: tuple[str, ...] = (),
        network: Network = ANY_NETWORK,
    ) -> None:
        self._me, self.origin, self._store = node, origin, store
        self.core: Replication[p.PutRecord | Version] = Replication(node, copies, domains, self)
        self.credentials: KeyCredentials | None = None
        self._pace = SendRate(network.send_rate)
        self._ways = Ways(network.sources, self._connect)
        self.serving = Serving(node, origin, store, self._pace, self.core, self._ways)
        self.integrity = self.serving.integrity
        self._small: dict[int, SmallConnection] = {}
        self._tensors: dict[int, TensorConnection] = {}
        self._tasks = Tasks()
        # Each with the way that it is over.
        self._over: dict[int, Way] = {}
        self._listeners: list[Listener] = []
        self.interfaces: tuple[tuple[str, int], ...] = ()
        self.on_acked: Callable[[int, int], None] = lambda _rank, _step: None
        self.on_compared: Callable[[p.TwinsCompared], None] = lambda _answer: None
        self.on_unreachable: Callable[[int, str], None] = lambda _node, _why: None
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    async def start(self, address: str, *others: str) -> int:
        """Serve other agents at these addresses; the port at the first, see `interfaces`. Raises OSError."""
        self.serving.on_event = self.integrity.on_event = self._ways.on_event = self.on_event
        port, *more = [self._listen(here) for here in (address, *others)]
        self.interfaces = tuple(zip(others, more, strict=True))
        return port

    def _listen(self, address: str) -> int:
        listener = Listener(self._came)
        self._listeners.append(listener)
        return listener.open(address)

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.credentials is None:
            writer.close()
        else:
            self._tasks.spawn(self.serving.serve((reader, writer), self.credentials))

    def follow(self, assignment: Assignment) -> None:
        """A new generation: other holders, and nothing of the old one is waited for.

        What they lack of the restored step they are given at once.
        """
        for known in self._connections():
            for node in known.keys() - {info.node for info in assignment.nodes}:
                known.pop(node).close()
        for holder in self._tensors.values():
            holder.forget()
        self._ways.forget()
        self.core.follow(assignment)
        self._tasks.spawn(self.serving.follow(assignment.generation))

    def _connections(self) -> tuple[dict[int, Any], ...]:
        return self._small, self._tensors

    # --------------------------------------------------------------------------------- replicate

    def push(self, record: p.PutRecord) -> None:
        """Send a record to its holders. With nobody to hold it, it counts as held."""
        key = (Item("record", record.rank), record.step)
        self.core.push_record(key, record, lambda: self.on_acked(record.rank, record.step))

    def push_tensors(self, version: Version, twins: frozenset[int], acked: Callable[[], None]) -> None:
        """Send a shard's tensors to so many others that, with its twins' nodes, there are enough of them."""
        self.core.push_tensors((Item("tensors", version.shard), version.step), version, twins, acked)

    def send(self, info: NodeInfo, what: p.PutRecord | Version) -> None:
        """Send it to a holder."""
        if isinstance(what, Version):
            self._tensor_connection(info).send(what)
        else:
            self._small_connection(info).send(what)

    def held(self, key: Key) -> p.PutRecord | Version | None:
        """Return what is held here, as it is sent."""
        (kind, number), step = key
        generation = self.core.generation
        if kind == "tensors":
            found = self._store.tensors(number, step)
            return Version(generation, number, step, *found) if found is not None else None
        held = self._store.record(number, step)
        return put_record(generation, number, step, held) if held is not None else None

    def items(self) -> Collection[Item]:
        """Return all that takes memory here."""
        return self._store.items()

    def newest(self, item: Item) -> int | None:
        """Return the newest step of an item that is held here."""
        return self._store.newest(item)

    def give_back(self, items: Sequence[Item]) -> None:
        """Hold nothing of these any more."""
        before = self._store.nbytes
        for item in items:
            self._store.discard(item)
        if freed := before - self._store.nbytes:
            given = ", ".join(f"{item.kind} {item.number}" for item in items)
            self.event("copies-given-back", f"{given}: {freed} bytes; others hold newer steps")

    def forget_former(self) -> None:
        """Hold nothing of the number of ranks before any more."""
        before = self._store.nbytes
        if self._store.forget_former():
            freed = before - self._store.nbytes
            self.event("copies-given-back", f"of the number of ranks before: {freed} bytes")

    def event(self, kind: str, text: str) -> None:
        """Tell the ledger and the log."""
        self.on_event(kind, text)

    def now(self) -> float:
        """Return the time, in seconds."""
        return time.monotonic()

    def _small_connection(self, info: NodeInfo) -> SmallConnection:
        known = self._small.get(info.node)
        if known is None:
            known = self._small[info.node] = SmallConnection(info, self._answered, self._lost)
            self._tasks.spawn(known.run(self._dial_as_others))
        return known

    def _tensor_connection(self, info: NodeInfo) -> TensorConnection:
        known = self._tensors.get(info.node)
        if known is None:
            known = self._tensors[info.node] = TensorConnection(
                info, self._tensors_held, self._lost, self._is_sound, self._pace
            )
            self._tasks.spawn(known.run(self._dial_as_others))
        return known

    async def _dial_as_others(self, info: NodeInfo) -> Peer:
        """Connect for what is given to a holder, all of it over one way. Raises as `dial`."""
        way = self._over[info.node] = self._ways.to(info)[0]
        return await self._ways.dial(way)

    def compare(self, node: int, message: p.CompareTwins) -> None:
        """Ask another node's twins; its answer goes to `on_compared`."""
        if node in self.core.nodes:
            self._small_connection(self.core.nodes[node]).send(message)

    def _answered(self, node: int, answer: p.Held | p.TwinsCompared) -> None:
        if isinstance(answer, p.TwinsCompared):
            self.on_compared(answer)
        elif answer.held:
            self.core.has(node, (Item("record", answer.rank), answer.step), answer.generation)

    def _tensors_held(self, node: int, version: Version) -> None:
        self.core.has(node, (Item("tensors", version.shard), version.step), version.generation)

    async def _is_sound(self, version: Version) -> bool:
        """Return whether a version that a holder has refused is sound here."""
        found = self._store.tensors(version.shard, version.step)
        here = found is not None and found[0] == version.at
        if here and await self.integrity.holds(version.shard, version.step):
            return True
        self.core.unsound((Item("tensors", version.shard), version.step), version)
        return False

    def _lost(self, node: int, why: str) -> None:
        """A node cannot be reached: the next on the ring takes its place for all that waits on it.

        Unless it was an interface that is dead, and there is another.
        """
        ended = [known.pop(node) for known in self._connections() if node in known]
        for one in ended:
            one.close()
        self.on_unreachable(node, why)
        way = self._over.pop(node, None)
        if way is not None and any(one.is_silent for one in ended) and self._ways.lose(way, why):
            self.core.again(node)
        else:
            self.core.lost(node, why)

    # ------------------------------------------------------------------------------------- fetch

    async def fetch_record(self, rank: int, step: int, nodes: Sequence[int]) -> None:
        """Get a record into the store from the first node that gives a sound one. Raises PeerError."""

        async def put(info: NodeInfo) -> None:
            wanted = p.GetRecord(cut=self._store.cut, rank=rank, step=step)
            self._store.put_record(rank, step, await self.ask_record(info, wanted))

        await self.first_of(nodes, f"the record of rank {rank}, step {step}", put)

    async def first_of(
        self, nodes: Sequence[int], what: str, get: Callable[[NodeInfo], Coroutine[Any, Any, T]]
    ) -> T:
        """Return what the first of these nodes gives that can. Raises PeerError."""
        tried = list[str]()
        for info in [self.core.nodes[node] for node in nodes if node in self.core.nodes and node != self._me]:
            try:
                return await get(info)
            except (OSError, TimeoutError, CkptlessError) as error:
                tried.append(f"{info.name}: {error or type(error).__name__}")
                self.on_event("source-failed", f"{what} from {tried[-1]}")
        raise PeerError(f"nobody could give {what} ({'; '.join(tried) or 'no node is said to hold it'})")

    async def ask_record(self, info: NodeInfo, wanted: p.GetRecord) -> HeldRecord:
        """Return a record that another agent has. Raises CkptlessError, OSError, TimeoutError."""
        reply = await self._ask(info, wanted, FETCH_DEADLINE_S)
        if not isinstance(reply, p.RecordReply) or not reply.record:
            raise PeerError("it does not hold it")
        return HeldRecord(reply.record, reply.digest, reply.shard)

    async def fetch_tensors(self, shard: int, step: int, nodes: Sequence[int]) -> None:
        """Get tensors into the store, verified, from all who have the same. Raises PeerError, OSError."""
        infos = [self.core.nodes[node] for node in nodes if node in self.core.nodes and node != self._me]
        while True:
            wanted = (self.origin, shard, step, self.core.generation)
            fetch = TensorsFetch(wanted, self._ways, self.on_event, self._store.cut)
            try:
                await fetch.run(infos, self._store)
            except PeerError:
                if not fetch.others:
                    raise
                infos = fetch.others
            else:
                return

    async def knock(self, info: NodeInfo) -> None:
        """See that another agent of the job answers. Raises as `dial` does."""
        (await self.dial(info)).close()

    async def ask_save(self, info: NodeInfo, ask: p.SaveAsk) -> p.SaveReply:
        """Return what another agent answers to it. Raises CkptlessError, OSError, TimeoutError."""
        reply = await self._ask(info, ask, DIAL_DEADLINE_S)
        if not isinstance(reply, p.SaveReply):
            raise PeerError(f"{type(reply).__name__} is no answer to SaveAsk")
        return reply

    async def _ask(self, info: NodeInfo, question: p.AgentMessage, deadline_s: float) -> p.AgentMessage:
        link = await self.dial(info)
        try:
            async with asyncio.timeout(deadline_s):
                link.send(question)
                return await link.receive()
        finally:
            link.close()

    async def dial(self, info: NodeInfo) -> Peer:
        """A connection to another agent. Raises OSError, TimeoutError, CkptlessError."""
        return await self._ways.dial_any(info)

    async def _connect(self, route: Route) -> Peer:
        if self.credentials is None:
            raise PeerError("the daemon has not given the job's key yet")
        return await Link.dial(
            route, (self.origin.job, self._me), self.credentials, p.AgentMessage, DIAL_DEADLINE_S
        )

    async def close(self) -> None:
        """Close every connection."""
        for listener in self._listeners:
            await listener.close()
        for holder in [*self._small.values(), *self._tensors.values()]:
            holder.close()
        await end_all(self._tasks)
        # What they were waiting for goes on without them, up to here.
        await self._ways.close()


def put_record(generation: int, rank: int, step: int, held: HeldRecord) -> p.PutRecord:
    """Return the message by which a holder is given a record."""
    return p.PutRecord(
        generation=generation,
        rank=rank,
        shard=held.shard,
        step=step,
        record=held.record,
        digest=held.digest,
    )
