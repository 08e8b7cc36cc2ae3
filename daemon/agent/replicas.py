"""Agent to agent: pushes this node's records to their holders, holds others', gives and gets state."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ckptless.daemon.agent.memory import SLOTS, round_up
from ckptless.daemon.agent.vault import Held, Vault, digest
from ckptless.daemon.api.errors import CkptlessError, PeerError, ProtocolError
from ckptless.daemon.api.messages import Assignment, NodeInfo, TensorsAt
from ckptless.daemon.control.placement import holders
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.link import Link, serve
from ckptless.daemon.peers.vouch import Vouch

logger = logging.getLogger(__name__)

DIAL_DEADLINE_S = 3.0
FETCH_DEADLINE_S = 60.0
CATCH_UP_DEADLINE_S = 10.0


class Replicas:
    """Owned by the agent's event loop. `on_acked(rank, step)`: every holder has verified the record.

    `domains` are the nodes' failure domains, see JobSpec.
    `vouch` comes from the daemon; nothing is asked of other agents, and none of them is heard, before.
    """

    def __init__(self, node: int, job: str, copies: int, vault: Vault, domains: tuple[str, ...] = ()) -> None:
        self._me, self._job, self._copies, self._vault = node, job, copies, vault
        self._domains = domains
        self.vouch: Vouch | None = None
        self._nodes: tuple[NodeInfo, ...] = ()
        self._generation = 0
        self._unreachable: set[int] = set()
        self._links: dict[int, _Holder] = {}
        self._waiting: dict[tuple[int, int], tuple[p.PutRecord, set[int]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.on_acked: Callable[[int, int], None] = lambda _rank, _step: None
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None
        self._followed = asyncio.Condition()
        self.accepting = True

    async def start(self, address: str) -> int:
        """Serve other agents; the port. Raises OSError."""
        self._server, port = await serve(address, 0, lambda *streams: self._spawn(self._serve(*streams)))
        return port

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -------------------------------------------------------------------------------------- push

    def follow(self, assignment: Assignment) -> None:
        """A new generation: other holders, and nothing of the old one is waited for."""
        self._nodes, self._generation = assignment.nodes, assignment.generation
        self._unreachable.clear()
        self._waiting.clear()
        self._spawn(self._announce())
        for node in [node for node in self._links if all(info.node != node for info in self._nodes)]:
            self._links.pop(node).close()

    def release(self) -> None:
        """Training is over: nobody has to hold anything any more, and may hang up."""
        self._nodes = ()
        self._waiting.clear()

    async def _announce(self) -> None:
        async with self._followed:
            self._followed.notify_all()

    def push(self, record: p.PutRecord) -> None:
        """Send a record to its holders. With nobody to hold it, it counts as held, and that is an event."""
        targets = self._holders()
        if not targets:
            self.on_acked(record.rank, record.step)
            return
        self._waiting[(record.rank, record.step)] = (record, {info.node for info in targets})
        for info in targets:
            self._holder(info).send(record)

    def _holders(self) -> tuple[NodeInfo, ...]:
        return holders(self._nodes, self._me, self._copies, self._unreachable, self._domains)

    def _holder(self, info: NodeInfo) -> "_Holder":
        holder = self._links.get(info.node)
        if holder is None:
            holder = self._links[info.node] = _Holder(info, self._held, self._lost)
            self._spawn(holder.run(self._dial))
        return holder

    def _held(self, node: int, held: p.Held) -> None:
        entry = self._waiting.get((held.rank, held.step))
        if entry is None or held.generation != self._generation:
            return
        entry[1].discard(node)
        if not entry[1]:
            del self._waiting[(held.rank, held.step)]
            self.on_acked(held.rank, held.step)

    def _lost(self, node: int, why: str) -> None:
        """A holder cannot be reached: the next on the ring takes its place for all that waits on it."""
        self._links.pop(node, None)
        if all(info.node != node for info in self._nodes):
            return
        self._unreachable.add(node)
        self.on_event("holder-lost", f"node-{node} cannot hold records any more: {why}")
        if not self._holders():
            self.on_event("unprotected", "no other node can hold this node's records")
        for key, (record, missing) in list(self._waiting.items()):
            if node in missing:
                del self._waiting[key]
                self.push(record)

    # ------------------------------------------------------------------------------------- fetch

    async def fetch_record(self, rank: int, step: int, nodes: Sequence[int]) -> None:
        """Get a record into the vault from the first node that gives a sound one. Raises PeerError."""

        async def ask(link: Link[p.AgentMessage]) -> None:
            link.send(p.GetRecord(rank=rank, step=step))
            reply = await link.receive()
            if not isinstance(reply, p.RecordReply) or not reply.record:
                raise PeerError("it does not hold it")
            self._vault.put_record(rank, step, reply.record, reply.digest)

        await self._from_any(nodes, f"the record of rank {rank}, step {step}", ask)

    async def fetch_tensors(self, step: int, nodes: Sequence[int]) -> None:
        """Get a step's tensors into the vault, verified. Raises PeerError."""

        async def ask(link: Link[p.AgentMessage]) -> None:
            link.send(p.GetTensors(step=step))
            reply = await link.receive()
            if not isinstance(reply, p.TensorsReply) or not reply.digest:
                raise PeerError("it does not hold them")
            region = self._vault.allocate(round_up(reply.nbytes), SLOTS)
            with region.view(0, reply.nbytes) as view:
                await link.receive_bulk(view)
                found = await asyncio.to_thread(digest, view)
            if found != reply.digest:
                raise ProtocolError("what came does not match its digest")
            at = TensorsAt(region=region.number, offset=0, nbytes=reply.nbytes, digest=found)
            self._vault.put_tensors(step, at)

        await self._from_any(nodes, f"the tensors of step {step}", ask)

    async def _dial(self, info: NodeInfo) -> Link[p.AgentMessage]:
        if self.vouch is None:
            raise PeerError("the daemon has not given the job's key yet")
        address, me = (info.address, info.agent_port), (self._job, self._me)
        return await Link.dial(address, me, self.vouch, p.AgentMessage, DIAL_DEADLINE_S)

    async def _from_any(
        self,
        nodes: Sequence[int],
        what: str,
        ask: Callable[[Link[p.AgentMessage]], Coroutine[Any, Any, None]],
    ) -> None:
        tried: list[str] = []
        infos = {info.node: info for info in self._nodes}
        for node in nodes:
            if node == self._me or node not in infos:
                continue
            info = infos[node]
            try:
                link = await self._dial(info)
                try:
                    async with asyncio.timeout(FETCH_DEADLINE_S):
                        await ask(link)
                    return
                finally:
                    link.close()
            except (OSError, TimeoutError, CkptlessError) as error:
                tried.append(f"{info.name}: {error or type(error).__name__}")
                self.on_event("source-failed", f"{what} from {tried[-1]}")
        raise PeerError(f"nobody could give {what} ({'; '.join(tried) or 'no node is said to hold it'})")

    # ------------------------------------------------------------------------------------- serve

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.vouch is None:
            writer.close()
            return
        try:
            link: Link[p.AgentMessage] = await Link.accept(
                (reader, writer), self._node_in, self.vouch, p.AgentMessage
            )
        except (OSError, TimeoutError, CkptlessError) as error:
            # A daemon that asks whether we live connects and hangs up: no reason for a warning.
            logger.debug("a connection that was no agent's: %s", error)
            return
        try:
            while True:
                await self._answer(link, await link.receive())
        except ConnectionError:
            logger.debug("node-%d hung up", link.node)
        except CkptlessError as error:
            self.on_event("peer-refused", f"node-{link.node}: {error}")
        finally:
            link.close()

    def _node_in(self, job: str) -> int:
        if job != self._job:
            raise PeerError(f"this is an agent of job {self._job}, not of {job}")
        return self._me

    async def _answer(self, link: Link[p.AgentMessage], message: p.AgentMessage) -> None:
        match message:
            case p.PutRecord():
                if not await self._takes(message):
                    return
                self._vault.put_record(message.rank, message.step, message.record, message.digest)
                link.send(p.Held(generation=message.generation, rank=message.rank, step=message.step))
            case p.GetRecord():
                held = self._vault.record(message.rank, message.step) or Held(b"", "")
                link.send(p.RecordReply(record=held.record, digest=held.digest))
            case p.GetTensors():
                await self._give_tensors(link, message.step)
            case _:
                raise ProtocolError(f"{type(message).__name__} is no request")

    async def _takes(self, message: p.PutRecord) -> bool:
        """Whether a record may be held: not one of an old generation, and none while this agent is frozen."""
        if message.generation > self._generation:
            # The sender heard of the new generation before this agent did.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP_DEADLINE_S), self._followed:
                    await self._followed.wait_for(lambda: message.generation <= self._generation)
        if message.generation != self._generation:
            text = f"rank {message.rank}, generation {message.generation}, here {self._generation}"
            self.on_event("stale-record", text)
            return False
        return self.accepting

    async def _give_tensors(self, link: Link[p.AgentMessage], step: int) -> None:
        found = self._vault.tensors(step)
        if found is None:
            link.send(p.TensorsReply(nbytes=0, digest=""))
            return
        at, region = found
        link.send(p.TensorsReply(nbytes=at.nbytes, digest=at.digest))
        with region.view(at.offset, at.nbytes) as view:
            await link.send_bulk(view)

    async def close(self) -> None:
        """Close every connection."""
        if self._server is not None:
            self._server.close()
        for holder in list(self._links.values()):
            holder.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Holder:
    """The connection over which one holder gets records; what is sent before it stands is kept."""

    def __init__(
        self, info: NodeInfo, on_held: Callable[[int, p.Held], None], on_lost: Callable[[int, str], None]
    ) -> None:
        self._info = info
        self._on_held, self._on_lost = on_held, on_lost
        self._link: Link[p.AgentMessage] | None = None
        self._early: list[p.PutRecord] = []
        self._closed = False

    def send(self, record: p.PutRecord) -> None:
        if self._link is None:
            self._early.append(record)
        else:
            self._link.send(record)

    async def run(self, dial: Callable[[NodeInfo], Awaitable[Link[p.AgentMessage]]]) -> None:
        why = ""
        try:
            self._link = await dial(self._info)
            for record in self._early:
                self._link.send(record)
            self._early.clear()
            while True:
                message = await self._link.receive()
                if not isinstance(message, p.Held):
                    raise ProtocolError(f"{type(message).__name__} is no answer to a record")
                self._on_held(self._info.node, message)
        except (OSError, TimeoutError, CkptlessError) as error:
            why = str(error) or type(error).__name__
        finally:
            if self._link is not None:
                self._link.close()
        if not self._closed:
            self._on_lost(self._info.node, why)

    def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.close()
