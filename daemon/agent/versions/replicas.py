"""Agent to agent: replicates this node's records and tensors to their holders, and gets state from others."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptless.daemon.agent.versions.connections import (
    ANY_NETWORK,
    Network,
    Peer,
    SmallConnection,
    TensorConnection,
)
from ckptless.daemon.agent.versions.fetching import TensorsFetch
from ckptless.daemon.agent.versions.serving import Serving
from ckptless.daemon.agent.versions.store import Held, Version, VersionStore
from ckptless.daemon.protocol.errors import CkptlessError, PeerError
from ckptless.daemon.protocol.messages import Assignment, NodeInfo
from ckptless.daemon.protocol.version import Origin
from ckptless.daemon.replication.protection import Item
from ckptless.daemon.replication.re_replication import Holders, Remake, Watermark, remakes, surplus
from ckptless.daemon.transport import messages as p
from ckptless.daemon.transport.bulk import Pace
from ckptless.daemon.transport.credentials import KeyCredentials
from ckptless.daemon.transport.link import Link, Route
from ckptless.daemon.transport.listener import Listener

DIAL_DEADLINE_S = 3.0
# Of a record, which is small.
FETCH_DEADLINE_S = 60.0

# The record of a rank or the tensors of a shard, and the step.
Key: TypeAlias = tuple[Item, int]


@dataclass
class ReplicationTask:
    """Something that holders are given: who has it, and who has not got it yet; then `acked` are called.

    `targets` finds out who is to hold it, of the nodes that can be reached.
    """

    what: p.PutRecord | Version
    targets: Callable[[], Sequence[NodeInfo]]
    acked: list[Callable[[], None]]
    missing: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)


class ReReplication:
    """Replicas that are being made again since their holder is gone: one event when all of them are there."""

    def __init__(self) -> None:
        self._missing: set[Key] = set()
        self._made: set[Key] = set()
        self._since = 0.0
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    def begin(self, key: Key) -> None:
        """It is being given to others."""
        if not self._missing:
            self._made, self._since = set(), time.monotonic()
        self._missing.add(key)

    def end(self, key: Key) -> None:
        """It is held by all who are to hold it."""
        if key in self._missing:
            self._missing.discard(key)
            self._made.add(key)
            self._tell()

    def fail(self, key: Key, why: str) -> None:
        """It cannot be given, if it was to be."""
        if key in self._missing:
            self._missing.discard(key)
            self.on_event("copies-not-remade", f"{_describe({key})}: {why}")
            self._tell()

    def _tell(self) -> None:
        if self._made and not self._missing:
            took_s = time.monotonic() - self._since
            self.on_event("copies-remade", f"{_describe(self._made)}, in {took_s:.2f} s")

    def clear(self) -> None:
        """A new generation, or the end: nothing of this is waited for any more."""
        self._missing.clear()
        self._made.clear()


class Replicas:
    """Owned by the agent's event loop. `on_acked(rank, step)`: every holder has verified the record.

    `domains` are the nodes' failure domains, see JobSpec. `on_compared` and `on_unreachable` are for whoever
    `compare`s. `vouch` comes from the daemon; nothing is asked of other agents, and none of them is heard,
    before.
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
        self._copies, self._domains = copies, domains
        self._to: Holders | None = None
        self.vouch: KeyCredentials | None = None
        self._source, self._pace = network.source, Pace(network.send_rate)
        self.serving = Serving(node, origin, store, self._pace)
        self.serving.on_record = self._saw_commit
        self.integrity = self.serving.integrity
        self._nodes: dict[int, NodeInfo] = {}
        self._generation = 0
        self._unreachable: set[int] = set()
        self._small: dict[int, SmallConnection] = {}
        self._tensors: dict[int, TensorConnection] = {}
        self._waiting: dict[Key, ReplicationTask] = {}
        # Of each rank's record and shard's tensors the newest that its holders have.
        self._newest: dict[Item, tuple[int, ReplicationTask]] = {}
        self._lost_copies = ReReplication()
        self._watermark = Watermark(None)
        self._has_surplus = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._door = Listener(self._came)
        self.on_acked: Callable[[int, int], None] = lambda _rank, _step: None
        self.on_compared: Callable[[p.TwinsCompared], None] = lambda _answer: None
        self.on_unreachable: Callable[[int, str], None] = lambda _node, _why: None
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    async def start(self, address: str) -> int:
        """Serve other agents; the port. Raises OSError."""
        self.serving.on_event = self.integrity.on_event = self._lost_copies.on_event = self.on_event
        return self._door.open(address)

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.vouch is None:
            writer.close()
        else:
            self._spawn(self.serving.serve((reader, writer), self.vouch))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def follow(self, assignment: Assignment) -> None:
        """A new generation: other holders, and nothing of the old one is waited for.

        What they lack of the restored step they are given at once.
        """
        self._nodes = {info.node: info for info in assignment.nodes}
        self._generation = assignment.generation
        self._unreachable.clear()
        self._forget_tasks()
        to = self._to = Holders(assignment, self._copies, self._domains)
        self._watermark = Watermark(assignment.restore_step)
        self._has_surplus = bool(surplus(to, self._me, self._store.items()))
        self._spawn(self.serving.follow(assignment.generation))
        for known in self._connections():
            for node in known.keys() - self._nodes.keys():
                known.pop(node).close()
        for holder in self._tensors.values():
            holder.forget()
        for lost in remakes(to, self._me):
            self._remake(to, lost)

    def _connections(self) -> tuple[dict[int, Any], ...]:
        return self._small, self._tensors

    def release(self) -> None:
        """Training is over: nobody has to hold anything any more, and may hang up."""
        self._nodes, self._to = {}, None
        self._forget_tasks()

    def _forget_tasks(self) -> None:
        self._waiting.clear()
        self._newest.clear()
        self._lost_copies.clear()

    # --------------------------------------------------------------------------------- replicate

    def push(self, record: p.PutRecord) -> None:
        """Send a record to its holders. With nobody to hold it, it counts as held, and that is an event."""
        task = ReplicationTask(record, self._holders, [lambda: self.on_acked(record.rank, record.step)])
        self._push((Item("record", record.rank), record.step), task)
        self._saw_commit(record.step)

    def _holders(self) -> tuple[NodeInfo, ...]:
        return self._to.of_node(self._me, self._unreachable) if self._to is not None else ()

    def push_tensors(self, version: Version, twins: frozenset[int], acked: Callable[[], None]) -> None:
        """Send a shard's tensors to so many others that, with its twins' nodes, there are enough of them."""

        def targets() -> tuple[NodeInfo, ...]:
            return self._to.of_shared(self._me, twins, self._unreachable) if self._to is not None else ()

        self._push((Item("tensors", version.shard), version.step), ReplicationTask(version, targets, [acked]))

    def _remake(self, to: Holders, lost: Remake) -> None:
        """Give to others what this node holds of the restored step, without a rank that commits it."""
        step = to.assignment.restore_step
        assert step is not None
        key: Key = (lost.item, step)
        self._lost_copies.begin(key)
        what = self._held(key)
        if what is None:
            self._lost_copies.fail(key, "this node has lost it, too")
            return
        task = ReplicationTask(
            what,
            lambda: to.targets(lost.item, self._unreachable),
            [lambda: self._lost_copies.end(key)],
            # Who is said to hold it is not asked again.
            held={info.node for info in to.targets(lost.item)} - set(lost.takers),
        )
        self._push(key, task)

    def _held(self, key: Key) -> p.PutRecord | Version | None:
        (kind, number), step = key
        if kind == "tensors":
            found = self._store.tensors(number, step)
            return Version(self._generation, number, step, *found) if found is not None else None
        held = self._store.record(number, step)
        return put_record(self._generation, number, step, held) if held is not None else None

    def _push(self, key: Key, task: ReplicationTask) -> None:
        """To all that are to hold it and have not been sent it."""
        before = self._waiting.pop(key, None)
        if before is not None and before is not task:
            task.acked = before.acked + task.acked
        infos = {info.node: info for info in task.targets() if info.node not in task.held}
        fresh = infos.keys() - task.missing
        task.missing = set(infos)
        if not infos:
            self._all_have(key, task)
            return
        self._waiting[key] = task
        for info in infos.values():
            if info.node not in fresh:
                continue
            if isinstance(task.what, Version):
                self._tensor_connection(info).send(task.what)
            else:
                self._small_connection(info).send(task.what)

    def _all_have(self, key: Key, task: ReplicationTask) -> None:
        item, step = key
        self._waiting.pop(key, None)
        if item not in self._newest or self._newest[item][0] <= step:
            self._newest[item] = step, task
        acked, task.acked = task.acked, []
        for tell in acked:
            tell()

    def _small_connection(self, info: NodeInfo) -> SmallConnection:
        known = self._small.get(info.node)
        if known is None:
            known = self._small[info.node] = SmallConnection(info, self._answered, self._lost)
            self._spawn(known.run(self.dial))
        return known

    def _tensor_connection(self, info: NodeInfo) -> TensorConnection:
        known = self._tensors.get(info.node)
        if known is None:
            known = self._tensors[info.node] = TensorConnection(
                info, self._tensors_held, self._lost, self._is_sound, self._pace
            )
            self._spawn(known.run(self.dial))
        return known

    def compare(self, node: int, message: p.CompareTwins) -> None:
        """Ask another node's twins; its answer goes to `on_compared`."""
        if node in self._nodes:
            self._small_connection(self._nodes[node]).send(message)

    def _answered(self, node: int, answer: p.Held | p.TwinsCompared) -> None:
        if isinstance(answer, p.TwinsCompared):
            self.on_compared(answer)
        elif answer.held and answer.generation == self._generation:
            self._has(node, (Item("record", answer.rank), answer.step))

    def _tensors_held(self, node: int, version: Version) -> None:
        if version.generation == self._generation:
            self._has(node, (Item("tensors", version.shard), version.step))

    def _has(self, node: int, key: Key) -> None:
        task = self._waiting.get(key)
        if task is None:
            return
        task.missing.discard(node)
        task.held.add(node)
        if not task.missing:
            self._all_have(key, task)

    async def _is_sound(self, version: Version) -> bool:
        """Of what a holder refused. Bad here too, nobody can hold it, and nothing waits for it any more."""
        found = self._store.tensors(version.shard, version.step)
        here = found is not None and found[0] == version.at
        if here and await self.integrity.holds(version.shard, version.step):
            return True
        key: Key = (Item("tensors", version.shard), version.step)
        task = self._waiting.get(key)
        if task is not None and task.what == version:
            del self._waiting[key]
            self.on_event("unprotected", f"shard {version.shard}, step {version.step}, is held nowhere else")
            self._lost_copies.fail(key, "what is here is bad")
            for tell in task.acked:
                tell()
        return False

    def _lost(self, node: int, why: str) -> None:
        """A node cannot be reached: the next on the ring takes its place for all that waits on it."""
        for known in self._connections():
            if node in known:
                known.pop(node).close()
        self.on_unreachable(node, why)
        if node not in self._nodes or node in self._unreachable:
            return
        self._unreachable.add(node)
        self.on_event("holder-lost", f"node-{node} cannot hold records any more: {why}")
        if not self._holders():
            self.on_event("unprotected", "no other node can hold this node's records")
        for key, task in list(self._waiting.items()):
            if node in task.missing | task.held:
                task.held.discard(node)
                self._push(key, task)
        for item, (step, task) in list(self._newest.items()):
            if node in task.held and (item, step) not in self._waiting:
                task.held.discard(node)
                self._replace((item, step), task)

    def _replace(self, key: Key, task: ReplicationTask) -> None:
        """It was held by all, one of whom is gone: another gets it, not only the next step."""
        if any(info.node not in task.held for info in task.targets()):
            task.acked = [lambda: self._lost_copies.end(key)]
            self._lost_copies.begin(key)
            self._push(key, task)

    # ------------------------------------------------------------------------ garbage collection

    def _saw_commit(self, step: int) -> None:
        """A rank, here or elsewhere, has committed this step: what that makes superfluous is given back.

        A frozen agent gives nothing back: what it has told of its holdings must stay true.
        """
        moved = self._watermark.saw_commit(step)
        if not (moved and self._has_surplus and self._to is not None and self.serving.accepting):
            return
        before, given = self._store.nbytes, list[str]()
        for item in surplus(self._to, self._me, self._store.items()):
            if self._watermark.passed(self._store.newest(item)):
                self._store.discard(item)
                given.append(f"{item.kind} {item.number}")
        self._has_surplus = bool(surplus(self._to, self._me, self._store.items()))
        if freed := before - self._store.nbytes:
            self.on_event("copies-given-back", f"{', '.join(given)}: {freed} bytes; others hold newer steps")

    # ------------------------------------------------------------------------------------- fetch

    async def fetch_record(self, rank: int, step: int, nodes: Sequence[int]) -> None:
        """Get a record into the store from the first node that gives a sound one. Raises PeerError."""
        what, tried = f"the record of rank {rank}, step {step}", list[str]()
        for info in [self._nodes[node] for node in nodes if node in self._nodes and node != self._me]:
            try:
                self._store.put_record(rank, step, await self._ask_record(info, rank, step))
            except (OSError, TimeoutError, CkptlessError) as error:
                tried.append(f"{info.name}: {error or type(error).__name__}")
                self.on_event("source-failed", f"{what} from {tried[-1]}")
            else:
                return
        raise PeerError(f"nobody could give {what} ({'; '.join(tried) or 'no node is said to hold it'})")

    async def _ask_record(self, info: NodeInfo, rank: int, step: int) -> Held:
        reply = await self._ask(info, p.GetRecord(rank=rank, step=step), FETCH_DEADLINE_S)
        if not isinstance(reply, p.RecordReply) or not reply.record:
            raise PeerError("it does not hold it")
        return Held(reply.record, reply.digest, reply.shard)

    async def fetch_tensors(self, shard: int, step: int, nodes: Sequence[int]) -> None:
        """Get tensors into the store, verified, from all who have the same. Raises PeerError, OSError."""
        infos = [self._nodes[node] for node in nodes if node in self._nodes and node != self._me]
        while True:
            fetch = TensorsFetch((self.origin, shard, step, self._generation), self.dial, self.on_event)
            try:
                await fetch.run(infos, self._store)
            except PeerError:
                if not fetch.others:
                    raise
                infos = fetch.others
            else:
                return

    async def knock(self, info: NodeInfo) -> None:
        """Returns where another agent of the job answers. Raises as `dial` does."""
        (await self.dial(info)).close()

    async def ask_save(self, info: NodeInfo, ask: p.SaveAsk) -> p.SaveReply:
        """What another agent answers to it. Raises CkptlessError, OSError, TimeoutError."""
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
        if self.vouch is None:
            raise PeerError("the daemon has not given the job's key yet")
        route = Route((info.address, info.agent_port), self._source, info.node)
        return await Link.dial(
            route, (self.origin.job, self._me), self.vouch, p.AgentMessage, DIAL_DEADLINE_S
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._door.close()
        for holder in [*self._small.values(), *self._tensors.values()]:
            holder.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def put_record(generation: int, rank: int, step: int, held: Held) -> p.PutRecord:
    """What a holder is sent."""
    return p.PutRecord(
        generation=generation,
        rank=rank,
        shard=held.shard,
        step=step,
        record=held.record,
        digest=held.digest,
    )


def _describe(keys: set[Key]) -> str:
    steps = ", ".join(map(str, sorted({step for _, step in keys})))
    parts: list[str] = []
    for what, of in (("tensors", "shard"), ("record", "rank")):
        numbers = sorted({item.number for item, _ in keys if item.kind == what})
        if numbers:
            parts.append(f"{what} of {of} {', '.join(map(str, numbers))}")
    return f"step {steps}: {'; '.join(parts)}"
