"""Agent to agent: pushes this node's records and tensors to their holders, and gets state from others."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ckptless.daemon.agent.versions.fetching import TensorsFetch, Wanted
from ckptless.daemon.agent.versions.giving_back import GivingBack
from ckptless.daemon.agent.versions.holders import (
    ANY_NETWORK,
    Network,
    Peer,
    RecordHolder,
    TensorHolder,
    Version,
)
from ckptless.daemon.agent.versions.lost_copies import Key, LostCopies
from ckptless.daemon.agent.versions.pushed import Pushed, both, nothing
from ckptless.daemon.agent.versions.serving import Serving
from ckptless.daemon.agent.versions.vault import Held, Vault
from ckptless.daemon.api.errors import CkptlessError, PeerError
from ckptless.daemon.api.messages import Assignment, NodeInfo
from ckptless.daemon.api.version import Origin
from ckptless.daemon.control.remaking import Copies, Holders, Remake, remakes
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.bulk import Pace
from ckptless.daemon.peers.credentials import KeyCredentials
from ckptless.daemon.peers.link import Link, Route
from ckptless.daemon.peers.listener import Listener

DIAL_DEADLINE_S = 3.0
# Of a record, which is small.
FETCH_DEADLINE_S = 60.0
Reply = TypeVar("Reply", p.SaveReply, p.HeldBy)


class Replicas:
    """Owned by the agent's event loop. `on_acked(rank, step)`: every holder has verified the record.

    `domains` are the nodes' failure domains, see JobSpec.
    `vouch` comes from the daemon; nothing is asked of other agents, and none of them is heard, before.
    """

    def __init__(
        self,
        node: int,
        origin: Origin,
        copies: int,
        vault: Vault,
        domains: tuple[str, ...] = (),
        network: Network = ANY_NETWORK,
    ) -> None:
        self._me, self.origin, self._vault = node, origin, vault
        self._copies = Copies(copies, domains)
        self._to: Holders | None = None
        self.vouch: KeyCredentials | None = None
        self._source, self._pace = network.source, Pace(network.send_rate)
        self.serving = Serving(node, origin, vault, self._pace)
        self.soundness = self.serving.soundness
        ask = lambda info, message: self._ask(info, message, p.HeldBy)  # noqa: E731
        self._giving_back = GivingBack(node, vault, ask, lambda: self.serving.accepting)
        self.serving.on_who_holds = self._giving_back.answer
        self._nodes: tuple[NodeInfo, ...] = ()
        self._generation = 0
        self._unreachable: set[int] = set()
        self._records: dict[int, RecordHolder] = {}
        self._tensors: dict[int, TensorHolder] = {}
        self._waiting: dict[Key, Pushed] = {}
        # Of each rank's record and shard's tensors the newest that its holders have.
        self._newest: dict[tuple[str, int], tuple[Key, Pushed]] = {}
        self._lost_copies = LostCopies()
        self._tasks: set[asyncio.Task[None]] = set()
        self._door = Listener(self._came)
        self.on_acked: Callable[[int, int], None] = lambda _rank, _step: None
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    async def start(self, address: str) -> int:
        """Serve other agents; the port. Raises OSError."""
        self.serving.on_event = self.soundness.on_event = self.on_event
        self._lost_copies.on_event = self._giving_back.on_event = self.on_event
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

    # -------------------------------------------------------------------------------------- push

    def follow(self, assignment: Assignment) -> None:
        """A new generation: other holders, and nothing of the old one is waited for.

        What they lack of the restored step they are given at once.
        """
        self._nodes, self._generation = assignment.nodes, assignment.generation
        self._unreachable.clear()
        self._forget_pushed()
        to = self._to = Holders(assignment, self._copies)
        self._spawn(self.serving.follow(assignment.generation))
        here = {info.node for info in self._nodes}
        for known in self._links():
            for node in known.keys() - here:
                known.pop(node).close()
        for holder in self._tensors.values():
            holder.forget()
        for lost in remakes(to, self._me):
            self._remake(to, lost)
        self._giving_back.follow(to)

    def _links(self) -> tuple[dict[int, Any], ...]:
        return self._records, self._tensors

    def release(self) -> None:
        """Training is over: nobody has to hold anything any more, and may hang up."""
        self._nodes, self._to = (), None
        self._forget_pushed()
        self._giving_back.stop()

    def _forget_pushed(self) -> None:
        self._waiting.clear()
        self._newest.clear()
        self._lost_copies.clear()

    def _remake(self, to: Holders, lost: Remake) -> None:
        """Give to others what this node holds of the restored step, without a rank that commits it."""
        assignment = to.assignment
        assert assignment.restore_step is not None
        number, step = lost.number, assignment.restore_step
        key: Key = (lost.what, number, step)
        self._lost_copies.begin(key)
        pushed = self._remade_record(to, key) if lost.what == "record" else None
        if lost.what == "tensors" and (found := self._vault.tensors(number, step)) is not None:
            version = Version(assignment.generation, number, step, *found)
            targets = lambda: to.of_tensors(number, self._unreachable)  # noqa: E731
            pushed = Pushed(version, targets, lambda: self._lost_copies.end(key))
        if pushed is None:
            self._lost_copies.fail(key, "this node has lost it, too")
            return
        # Who is said to hold it is not asked again.
        pushed.held = {info.node for info in pushed.targets()} - set(lost.takers)
        self._push(key, pushed)

    def _remade_record(self, to: Holders, key: Key) -> Pushed | None:
        _, rank, step = key
        held = self._vault.record(rank, step)
        if held is None:
            return None
        record = p.PutRecord(
            generation=to.assignment.generation,
            rank=rank,
            shard=held.shard,
            step=step,
            record=held.record,
            digest=held.digest,
        )
        targets = lambda: to.of_record(rank, self._unreachable)  # noqa: E731
        return Pushed(record, targets, lambda: self._lost_copies.end(key))

    def push(self, record: p.PutRecord) -> None:
        """Send a record to its holders. With nobody to hold it, it counts as held, and that is an event."""
        acked = lambda: self.on_acked(record.rank, record.step)  # noqa: E731
        self._push(("record", record.rank, record.step), Pushed(record, self._holders, acked))

    def _holders(self) -> tuple[NodeInfo, ...]:
        return self._to.of_node(self._me, self._unreachable) if self._to is not None else ()

    def push_tensors(self, version: Version, twins: frozenset[int], acked: Callable[[], None]) -> None:
        """Send a shard's tensors to so many others that, with its twins' nodes, there are enough of them."""

        def targets() -> tuple[NodeInfo, ...]:
            return self._to.of_shared(self._me, twins, self._unreachable) if self._to is not None else ()

        self._push(("tensors", version.shard, version.step), Pushed(version, targets, acked))

    def _push(self, key: Key, pushed: Pushed) -> None:
        """To all that are to hold it and have not been sent it."""
        before = self._waiting.pop(key, None)
        if before is not None and before is not pushed:
            pushed.acked = both(before.acked, pushed.acked)
        infos = {info.node: info for info in pushed.targets() if info.node not in pushed.held}
        fresh = infos.keys() - pushed.missing
        pushed.missing = set(infos)
        if not infos:
            self._all_have(key, pushed)
            return
        self._waiting[key] = pushed
        for node in infos:
            if node not in fresh:
                continue
            if isinstance(pushed.what, Version):
                self._tensor_holder(infos[node]).send(pushed.what)
            else:
                self._record_holder(infos[node]).send(pushed.what)

    def _all_have(self, key: Key, pushed: Pushed) -> None:
        self._waiting.pop(key, None)
        known = self._newest.get(key[:2])
        if known is None or known[0][2] <= key[2]:
            self._newest[key[:2]] = (key, pushed)
        self._giving_back.settled.held(key[:2], key[2], pushed.held)
        acked, pushed.acked = pushed.acked, nothing
        acked()

    def _record_holder(self, info: NodeInfo) -> RecordHolder:
        known = self._records.get(info.node)
        if known is None:
            known = self._records[info.node] = RecordHolder(info, self._record_held, self._lost)
            self._spawn(known.run(self.dial))
        return known

    def _tensor_holder(self, info: NodeInfo) -> TensorHolder:
        known = self._tensors.get(info.node)
        if known is None:
            known = self._tensors[info.node] = TensorHolder(
                info, self._tensors_held, self._lost, self._is_sound, self._pace
            )
            self._spawn(known.run(self.dial))
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
            self._lost_copies.fail(("tensors", version.shard, version.step), "what is here is bad")
            pushed.acked()
        return False

    def _has(self, node: int, key: Key) -> None:
        pushed = self._waiting.get(key)
        if pushed is None:
            return
        pushed.missing.discard(node)
        pushed.held.add(node)
        if not pushed.missing:
            self._all_have(key, pushed)

    def _lost(self, node: int, why: str) -> None:
        """A holder cannot be reached: the next on the ring takes its place for all that waits on it."""
        for known in self._links():
            if node in known:
                known.pop(node).close()
        if all(info.node != node for info in self._nodes) or node in self._unreachable:
            return
        self._unreachable.add(node)
        self._giving_back.settled.lost(node)
        self.on_event("holder-lost", f"node-{node} cannot hold records any more: {why}")
        if not self._holders():
            self.on_event("unprotected", "no other node can hold this node's records")
        for key, pushed in list(self._waiting.items()):
            if node in pushed.missing | pushed.held:
                pushed.held.discard(node)
                self._push(key, pushed)
        for key, pushed in list(self._newest.values()):
            if node in pushed.held and key not in self._waiting:
                pushed.held.discard(node)
                self._replace(key, pushed)

    def _replace(self, key: Key, pushed: Pushed) -> None:
        """It was held by all, one of whom is gone: another gets it, not only the next step."""
        if any(info.node not in pushed.held for info in pushed.targets()):
            pushed.acked = lambda: self._lost_copies.end(key)
            self._lost_copies.begin(key)
            self._push(key, pushed)

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
        """Get tensors into the vault, verified, from all who have the same. Raises PeerError, OSError."""
        infos = [info for info in self._nodes if info.node in nodes and info.node != self._me]
        wanted = Wanted(self.origin, shard, step, self._generation)
        while True:
            fetch = TensorsFetch(wanted, self._vault, self.dial, self.on_event)
            try:
                at = await fetch.run(infos)
            except PeerError:
                if not fetch.others:
                    raise
                infos = fetch.others
            else:
                self._vault.put_tensors(shard, step, at)
                return

    async def knock(self, info: NodeInfo) -> None:
        """Returns where another agent of the job answers. Raises as `dial` does."""
        (await self.dial(info)).close()

    async def ask_save(self, info: NodeInfo, ask: p.SaveAsk) -> p.SaveReply:
        """What another agent answers to it. Raises CkptlessError, OSError, TimeoutError."""
        return await self._ask(info, ask, p.SaveReply)

    async def _ask(self, info: NodeInfo, ask: p.AgentMessage, kind: type[Reply]) -> Reply:
        link = await self.dial(info)
        try:
            async with asyncio.timeout(DIAL_DEADLINE_S):
                link.send(ask)
                reply = await link.receive()
        finally:
            link.close()
        if not isinstance(reply, kind):
            raise PeerError(f"{type(reply).__name__} is no answer to {type(ask).__name__}")
        return reply

    async def dial(self, info: NodeInfo) -> Peer:
        """A connection to another agent. Raises OSError, TimeoutError, CkptlessError."""
        if self.vouch is None:
            raise PeerError("the daemon has not given the job's key yet")
        route = Route((info.address, info.agent_port), self._source, info.node)
        return await Link.dial(
            route, (self.origin.job, self._me), self.vouch, p.AgentMessage, DIAL_DEADLINE_S
        )

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
                link = await self.dial(info)
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
        await self._door.close()
        await self._giving_back.close()
        for holder in [*self._records.values(), *self._tensors.values()]:
            holder.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
