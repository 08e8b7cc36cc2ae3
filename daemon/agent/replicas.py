"""Agent to agent: pushes this node's records and tensors to their holders, and gets state from others."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ckptless.daemon.agent.holders import Holder, Peer, RecordHolder, TensorHolder, Version
from ckptless.daemon.agent.serving import Serving, receive_tensors
from ckptless.daemon.agent.vault import Held, Vault
from ckptless.daemon.agent.verifier import Told
from ckptless.daemon.api.errors import BadVersionError, CkptlessError, PeerError
from ckptless.daemon.api.messages import Assignment, NodeInfo, TensorsAt
from ckptless.daemon.control.placement import holders, shard_holders
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bulk import Pace
from ckptless.daemon.peers.link import Link, serve
from ckptless.daemon.peers.vouch import Vouch

DIAL_DEADLINE_S = 3.0
FETCH_DEADLINE_S = 60.0


class _Pushed:
    """Something that holders are given: who of them has not got it yet; then `acked` is called."""

    def __init__(self, what: p.PutRecord | Version, targets: set[int], acked: Callable[[], None]) -> None:
        self.what, self.missing, self.acked = what, targets, acked


class Replicas:
    """Owned by the agent's event loop. `on_acked(rank, step)`: every holder has verified the record.

    `domains` are the nodes' failure domains, see JobSpec. `send_rate`: bytes per second that all transfers of
    tensors together may send, 0 for no limit.
    `vouch` comes from the daemon; nothing is asked of other agents, and none of them is heard, before.
    """

    def __init__(
        self,
        node: int,
        job: str,
        copies: int,
        vault: Vault,
        domains: tuple[str, ...] = (),
        send_rate: float = 0,
    ) -> None:
        self._me, self._job, self._copies, self._vault = node, job, copies, vault
        self._domains = domains
        self.vouch: Vouch | None = None
        self._pace = Pace(send_rate)
        self.serving = Serving(node, job, vault, self._pace)
        self.soundness = self.serving.soundness
        self._nodes: tuple[NodeInfo, ...] = ()
        self._generation = 0
        self._ranked: frozenset[int] = frozenset()
        self._unreachable: set[int] = set()
        self._records: dict[int, RecordHolder] = {}
        self._tensors: dict[int, TensorHolder] = {}
        self._waiting: dict[tuple[str, int, int], _Pushed] = {}
        # The nodes that the twins of a shard are on, as of its newest push.
        self._twins: dict[int, frozenset[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.on_acked: Callable[[int, int], None] = lambda _rank, _step: None
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    async def start(self, address: str) -> int:
        """Serve other agents; the port. Raises OSError."""
        self.serving.on_event = self.soundness.on_event = self.on_event
        self._server, port = await serve(address, 0, self._came)
        return port

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.vouch is None:
            writer.close()
        else:
            self._spawn(self.serving.serve((reader, writer), self.vouch))

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
        self._twins.clear()
        self._ranked = frozenset(place.node for place in assignment.places)
        self._spawn(self.serving.follow(assignment.generation))
        here = {info.node for info in self._nodes}
        links: tuple[dict[int, Any], ...] = (self._records, self._tensors)
        for known in links:
            for node in known.keys() - here:
                known.pop(node).close()
        for holder in self._tensors.values():
            holder.forget()

    def release(self) -> None:
        """Training is over: nobody has to hold anything any more, and may hang up."""
        self._nodes = ()
        self._waiting.clear()

    def push(self, record: p.PutRecord) -> None:
        """Send a record to its holders. With nobody to hold it, it counts as held, and that is an event."""
        targets = holders(self._nodes, self._me, self._copies, self._unreachable, self._domains)
        acked = lambda: self.on_acked(record.rank, record.step)  # noqa: E731
        self._push(("record", record.rank, record.step), record, targets, acked)

    def push_tensors(self, version: Version, twins: frozenset[int], acked: Callable[[], None]) -> None:
        """Send a shard's tensors to so many others that, with its twins' nodes, there are enough of them."""
        self._twins[version.shard] = twins
        # Where every node with ranks has it, copies beside them could only outlive the whole job.
        copies = 0 if twins == self._ranked and len(twins) > 1 else self._copies
        targets = shard_holders(self._nodes, self._me, copies, twins, self._unreachable, self._domains)
        self._push(("tensors", version.shard, version.step), version, targets, acked)

    def _push(
        self,
        key: tuple[str, int, int],
        what: p.PutRecord | Version,
        targets: Sequence[NodeInfo],
        acked: Callable[[], None],
    ) -> None:
        if not targets:
            acked()
            return
        self._waiting[key] = _Pushed(what, {info.node for info in targets}, acked)
        for info in targets:
            if isinstance(what, Version):
                self._tensor_holder(info).send(what)
            else:
                self._record_holder(info).send(what)

    def _record_holder(self, info: NodeInfo) -> RecordHolder:
        known = self._records.get(info.node)
        if known is None:
            known = self._records[info.node] = RecordHolder(info, self._record_held, self._lost)
            self._spawn(known.run(self._dial))
        return known

    def _tensor_holder(self, info: NodeInfo) -> TensorHolder:
        known = self._tensors.get(info.node)
        if known is None:
            known = self._tensors[info.node] = TensorHolder(
                info, self._tensors_held, self._lost, self._is_sound, self._pace
            )
            self._spawn(known.run(self._dial))
        return known

    def _record_held(self, node: int, held: p.Held) -> None:
        if held.generation == self._generation:
            self._has(node, ("record", held.rank, held.step))

    def _tensors_held(self, node: int, version: Version) -> None:
        if version.generation == self._generation:
            self._has(node, ("tensors", version.shard, version.step))

    async def _is_sound(self, version: Version) -> bool:
        """Of what a holder refused. Bad here too, nobody can hold it, and nothing waits for it any more."""
        found = self._vault.tensors(version.shard, version.step)
        here = found is not None and found[0] == version.at
        if here and await self.soundness.holds(version.shard, version.step):
            return True
        pushed = self._waiting.get(("tensors", version.shard, version.step))
        if pushed is not None and pushed.what == version:
            del self._waiting[("tensors", version.shard, version.step)]
            self.on_event("unprotected", f"shard {version.shard}, step {version.step}, is held nowhere else")
            pushed.acked()
        return False

    def _has(self, node: int, key: tuple[str, int, int]) -> None:
        pushed = self._waiting.get(key)
        if pushed is None:
            return
        pushed.missing.discard(node)
        if not pushed.missing:
            del self._waiting[key]
            pushed.acked()

    def _lost(self, node: int, why: str) -> None:
        """A holder cannot be reached: the next on the ring takes its place for all that waits on it."""
        links: tuple[dict[int, Any], ...] = (self._records, self._tensors)
        for known in links:
            if node in known:
                known.pop(node).close()
        if all(info.node != node for info in self._nodes) or node in self._unreachable:
            return
        self._unreachable.add(node)
        self.on_event("holder-lost", f"node-{node} cannot hold records any more: {why}")
        if not holders(self._nodes, self._me, self._copies, self._unreachable, self._domains):
            self.on_event("unprotected", "no other node can hold this node's records")
        for key, pushed in list(self._waiting.items()):
            if node in pushed.missing:
                del self._waiting[key]
                if isinstance(pushed.what, Version):
                    self.push_tensors(pushed.what, self._twins[pushed.what.shard], pushed.acked)
                else:
                    self.push(pushed.what)

    # ------------------------------------------------------------------------------------- fetch

    async def fetch_record(self, rank: int, step: int, nodes: Sequence[int]) -> None:
        """Get a record into the vault from the first node that gives a sound one. Raises PeerError."""

        async def ask(link: Peer) -> None:
            link.send(p.GetRecord(rank=rank, step=step))
            reply = await link.receive()
            if not isinstance(reply, p.RecordReply) or not reply.record:
                raise PeerError("it does not hold it")
            self._vault.put_record(rank, step, Held(reply.record, reply.digest, reply.shard))

        await self._from_any(nodes, f"the record of rank {rank}, step {step}", ask)

    async def fetch_tensors(self, shard: int, step: int, nodes: Sequence[int]) -> None:
        """Get a shard's tensors of a step into the vault, verified. Raises PeerError."""

        def put(at: TensorsAt) -> None:
            self._vault.put_tensors(shard, step, at)

        async def get(link: Peer, *, verify: bool) -> None:
            link.send(p.GetTensors(shard=shard, step=step, verify=verify))
            reply = await link.receive()
            if not isinstance(reply, p.TensorsReply) or not reply.digest:
                raise PeerError("it does not hold them soundly" if verify else "it does not hold them")
            told = Told(self._job, shard, step, self._generation, reply.nbytes, reply.digest)
            await receive_tensors(link, self._vault, told, put)

        async def ask(link: Peer) -> None:
            try:
                await get(link, verify=False)
            except BadVersionError as error:
                self.on_event("refused-version", f"from node-{link.node}: {error}")
                # Its copy is bad, which it finds then, or the way here was.
                await get(link, verify=True)

        # Not all who need it ask the same one first.
        start = self._me % len(nodes) if nodes else 0
        what = f"the tensors of step {step}, shard {shard}"
        await self._from_any((*nodes[start:], *nodes[:start]), what, ask)

    async def ask_save(self, info: NodeInfo, ask: p.SaveAsk) -> p.SaveReply:
        """What another agent answers to it. Raises CkptlessError, OSError, TimeoutError."""
        link = await self._dial(info)
        try:
            async with asyncio.timeout(DIAL_DEADLINE_S):
                link.send(ask)
                reply = await link.receive()
        finally:
            link.close()
        if not isinstance(reply, p.SaveReply):
            raise PeerError(f"{type(reply).__name__} is no answer to SaveAsk")
        return reply

    async def _dial(self, info: NodeInfo) -> Peer:
        if self.vouch is None:
            raise PeerError("the daemon has not given the job's key yet")
        address, me = (info.address, info.agent_port), (self._job, self._me)
        return await Link.dial(address, me, self.vouch, p.AgentMessage, DIAL_DEADLINE_S)

    async def _from_any(
        self,
        nodes: Sequence[int],
        what: str,
        ask: Callable[[Peer], Coroutine[Any, Any, None]],
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

    async def close(self) -> None:
        """Close every connection."""
        if self._server is not None:
            self._server.close()
        known: list[Holder] = [*self._records.values(), *self._tensors.values()]
        for holder in known:
            holder.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
