"""State for this node's ranks: takes commits, replicates them, gives back what a rank must restore."""

import asyncio
import hmac
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from ckptless.daemon.agent.core.agent_core import AgentCore
from ckptless.daemon.agent.core.slots import Slot
from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.agent.ranks.rank_processes import RankProcesses
from ckptless.daemon.agent.versions.former import FormerState
from ckptless.daemon.agent.versions.replicas import Replicas, put_record
from ckptless.daemon.agent.versions.room import Room
from ckptless.daemon.agent.versions.store import HeldRecord, Version, VersionStore, header_of
from ckptless.daemon.agent.versions.twins import AgentTwins
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import BadVersionError, CkptlessError, PeerError, ProtocolError
from ckptless.daemon.transport.tasks import Tasks, end_all

logger = logging.getLogger(__name__)

FromTraining: TypeAlias = m.Twins | m.Commit | m.Stepped | m.Fetch | m.FetchRecord | m.FetchSpans | m.Allocate


class StateService:
    """Owned by the agent's event loop."""

    def __init__(
        self,
        core: AgentCore,
        store: VersionStore,
        replicas: Replicas,
        rank_processes: RankProcesses,
        twins: AgentTwins,
        room: Room,
    ) -> None:
        self._core, self._node = core, core.node
        self._store, self._replicas, self._rank_processes = store, replicas, rank_processes
        self._twins, self._room = twins, room
        self._former = FormerState(core.node, store, replicas)
        # The numbers of ranks that the job may have, where it is elastic.
        self.sizes: tuple[int, ...] = ()
        self._assignment: m.Assignment | None = None
        self._fetches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._cache_key = b""
        # Slots that have made a step in this generation.
        self._moved: set[int] = set()
        self._twin_nodes: dict[int, frozenset[int]] = {}
        self._writers: dict[int, int] = {}
        # What a rank's newest commit still waits for: it counts once all of it is there.
        self._waiting: dict[tuple[int, int], set[str]] = {}
        # Told of every step and commit, and whether it is the slot's `first` in its generation.
        self.on_step: Callable[..., None] = lambda *_args, **_kw: None
        replicas.on_acked = lambda rank, step: self._acked(rank, step, "record")

    def learn_key(self, key: bytes) -> None:
        """The job's key: what ranks encrypt cached data with is made of it (HKDF-Extract, RFC 5869)."""
        self._cache_key = hmac.digest(b"ckptless data cache", key, "sha256")

    def follow(self, assignment: m.Assignment) -> None:
        """A new generation: nothing of the old one is fetched any more."""
        for task in self._fetches.values():
            task.cancel()
        self._fetches.clear()
        self._moved.clear()
        self._twin_nodes.clear()
        self._writers.clear()
        self._waiting.clear()
        self._room.follow(assignment)
        self._former.follow(assignment)
        self._assignment = assignment

    def assigned(self, assignment: m.Assignment, rank: int) -> m.Assigned:
        """A rank's part of the assignment."""
        mine = assignment.ranks_on(self._node)
        nodes = sorted(assignment.ranks_by_node)
        return m.Assigned(
            generation=assignment.generation,
            rank=rank,
            world_size=len(assignment.places),
            local_world_size=len(mine),
            group_rank=nodes.index(self._node),
            restore_step=assignment.restore_step,
            store=self._rank_processes.store,
            peers=tuple(info.address for info in assignment.nodes),
            ranks_per_root=self._rank_processes.ranks_per_root(assignment),
            cache_key=self._cache_key,
            local_ranks=tuple(mine),
            cut=assignment.cut,
            former_shards=assignment.former.shards if assignment.former is not None else (),
            sizes=self.sizes,
            done_step=assignment.done_step,
            faults=assignment.faults,
        )

    # ----------------------------------------------------------------------------------- commits

    def serve(
        self,
        slot: Slot,
        link: RankLink,
        message: FromTraining,
    ) -> None:
        """A rank's request; its generation is the slot's. Raises ProtocolError."""
        if self._core.frozen is not None:
            link.send(m.Refused(generation=message.generation, what=type(message).__name__))
        elif isinstance(message, m.Twins):
            self._share(slot, link, message)
        elif slot.shard[0] != message.generation:
            raise ProtocolError(f"{type(message).__name__} before Twins")
        elif isinstance(message, m.Commit):
            self._commit(slot, message)
        elif isinstance(message, m.Stepped):
            self._tell(slot, message)
        elif isinstance(message, m.Allocate):
            self._allocate(slot, link, message)
        elif isinstance(message, m.Fetch):
            failed = lambda why: m.Fetched(step=message.step, error=why)  # noqa: E731
            self._answer(self._give(slot, link, message), link, failed)
        elif isinstance(message, m.FetchRecord):
            self._answer(self._give_record(link, message), link, lambda why: m.FetchedRecord(error=why))
        else:
            self._answer(self._give_spans(link, message), link, lambda why: m.FetchedSpans(error=why))

    def _answer(
        self, work: Coroutine[Any, Any, None], link: RankLink, failed: Callable[[str], m.ToRank]
    ) -> None:
        self._tasks.spawn(work).add_done_callback(lambda done: self._given(done, link, failed))

    def _share(self, slot: Slot, link: RankLink, message: m.Twins) -> None:
        """Have the first of the twins on this node to come write for all of them."""
        assert self._assignment is not None
        ranks = message.ranks or tuple(range(len(self._assignment.places)))
        if any(rank not in range(len(self._assignment.places)) for rank in ranks):
            raise ProtocolError("a twin that is no rank of this job")
        shard = min(ranks)
        slot.shard = (message.generation, shard)
        self._room.share(shard, ranks)
        self._twin_nodes[shard] = frozenset(self._assignment.places[rank].node for rank in ranks)
        writer = self._writers.setdefault(shard, slot.index)
        link.send(m.Writes(generation=message.generation, writes=writer == slot.index))

    def _allocate(self, slot: Slot, link: RankLink, wanted: m.Allocate) -> None:
        """Give a rank its memory, unless the node has not enough for all that it is to hold then."""
        shard = slot.shard[1]
        refusal = self._room.refusal(shard, wanted.slot_nbytes * wanted.slots)
        if refusal is not None:
            link.send(m.Allocated(error=refusal))
            return
        region = self._store.allocate(shard, wanted.slot_nbytes, wanted.slots)
        link.send(m.Allocated(region=region.number), region.fd)

    def _commit(self, slot: Slot, commit: m.Commit) -> None:
        rank = self._core.rank(slot)
        if rank is None:
            return
        assert self._assignment is not None
        shard, key = slot.shard[1], (rank, commit.step)
        self._waiting[key] = {"record"}
        if commit.tensors is not None:
            self._waiting[key] |= {"tensors", "twins"}
            # What was restored is held, and maybe in another place by now: a twin may have found it bad. What
            # was cut anew is not.
            if commit.step != self._assignment.restore_step or self._assignment.former is not None:
                self._check_version(commit, shard, rank)
                self._store.put_tensors(shard, commit.step, commit.tensors)
        held = HeldRecord(commit.record, commit.digest, shard)
        self._store.put_record(rank, commit.step, held)
        self._replicas.push(put_record(commit.generation, rank, commit.step, held))
        if commit.tensors is not None:
            self._push_tensors(shard, commit, lambda: self._acked(*key, "tensors"))
            nodes = self._twin_nodes.get(shard, frozenset())
            self._twins.committed((shard, commit.step), rank, nodes, lambda: self._acked(*key, "twins"))
        self._tell(slot, commit)

    def _tell(self, slot: Slot, message: m.Commit | m.Stepped) -> None:
        assert self._assignment is not None
        # The step that was restored is committed again, to have its copies in the new generation.
        new = message.step > (self._assignment.restore_step or 0)
        first = new and slot.index not in self._moved
        if new:
            self._moved.add(slot.index)
        self.on_step(slot, message, first=first)

    def _check_version(self, commit: m.Commit, shard: int, rank: int) -> None:
        """Raises BadVersionError, and tells, where what was written is not what the commit says."""
        assert self._assignment is not None
        assert commit.tensors is not None
        try:
            region = self._store.region(commit.tensors.region)
            if region is None or not region.has_slot(commit.tensors.offset, commit.tensors.nbytes):
                raise BadVersionError("it lies in a place that was not allocated")
            header = header_of(region, commit.tensors)
            header.check(self._replicas.origin, shard, commit.step, commit.generation)
            if (header.generation, header.rank) != (commit.generation, rank):
                raise BadVersionError(f"it is of generation {header.generation}, rank {header.rank}")
        except BadVersionError as error:
            text = f"of rank {rank}, shard {shard}, step {commit.step}: {error}"
            self._replicas.on_event("commit-refused", text)
            raise

    def _push_tensors(self, shard: int, commit: m.Commit, acked: Callable[[], None]) -> None:
        """Give a shard to others where this is the node of its lowest rank, of those that have it anyway."""
        assert self._assignment is not None
        found = self._store.tensors(shard, commit.step)
        if found is None or self._assignment.places[shard].node != self._node:
            acked()
            return
        version = Version(commit.generation, shard, commit.step, *found)
        self._replicas.push_tensors(version, self._twin_nodes[shard], acked)

    def _acked(self, rank: int, step: int, what: str) -> None:
        waiting = self._waiting.get((rank, step))
        if waiting is None:
            return
        waiting.discard(what)
        if waiting:
            return
        del self._waiting[(rank, step)]
        for slot in self._core.slots:
            if self._core.rank(slot) == rank and slot.occupant is not None:
                self._rank_processes.send(slot.occupant.birth, m.Acked(generation=slot.generation, step=step))

    # ----------------------------------------------------------------------------------- restore

    def prefetch(self, rank: int) -> None:
        """A new process will want this rank's state: get it while it builds."""
        assignment = self._assignment
        if assignment is not None and assignment.restore_step is not None and assignment.former is None:
            self._fetch_record(rank, assignment.restore_step)
            self._fetch_tensors(assignment.shards[rank], assignment.restore_step)

    def _fetch_record(self, rank: int, step: int) -> asyncio.Task[None] | None:
        assert self._assignment is not None
        if self._store.record(rank, step) is not None:
            return None
        nodes = self._assignment.record_nodes[rank]
        return self._once(("record", rank), self._replicas.fetch_record(rank, step, nodes))

    def _fetch_tensors(self, shard: int, step: int) -> asyncio.Task[None] | None:
        assert self._assignment is not None
        if self._replicas.integrity.seems(shard, step):
            return None
        nodes = self._assignment.holders_of(shard)
        return self._once(("tensors", shard), self._replicas.fetch_tensors(shard, step, nodes))

    def _once(self, key: tuple[str, int], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._fetches.get(key)
        # What came and is not here any more was bad: it is fetched again.
        again = task is not None and task.done() and not task.cancelled() and task.exception() is None
        if task is not None and not again:
            work.close()
            return task
        task = asyncio.create_task(work)
        # Whoever asks for the state hears of a failure; nobody may ask if the generation ends first.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._fetches[key] = task
        return task

    async def _give(self, slot: Slot, link: RankLink, request: m.Fetch) -> None:
        rank, shard = self._core.rank(slot), slot.shard[1]
        if rank is None:
            return
        if request.unsound is not None:
            why = f"{request.why} (says rank {rank})"
            self._replicas.integrity.drop(shard, request.step, request.unsound, why)
        assert self._assignment is not None
        # Any other step is one that this rank has committed itself: it is here, or nowhere.
        if request.step == self._assignment.restore_step and self._assignment.former is None:
            try:
                self._check_shard(rank, shard)
                for task in (
                    self._fetch_record(rank, request.step),
                    self._fetch_tensors(shard, request.step),
                ):
                    if task is not None:
                        await asyncio.shield(task)
            except CkptlessError as error:
                link.send(m.Fetched(step=request.step, error=str(error)))
                return
        held, found = self._store.record(rank, request.step), self._store.tensors(shard, request.step)
        if held is None or found is None:
            link.send(m.Fetched(step=request.step, error=f"step {request.step} is not held here any more"))
            return
        at, region = found
        reply = m.Fetched(step=request.step, record=held.record, tensors=at, slot_nbytes=region.slot_nbytes)
        link.send(reply, region.fd)

    async def _give_record(self, link: RankLink, request: m.FetchRecord) -> None:
        try:
            link.send(m.FetchedRecord(record=await self._former.record(request.rank)))
        except CkptlessError as error:
            link.send(m.FetchedRecord(error=str(error)))

    async def _give_spans(self, link: RankLink, request: m.FetchSpans) -> None:
        try:
            fd = await self._former.spans(request)
        except CkptlessError as error:
            link.send(m.FetchedSpans(error=str(error)))
            return
        try:
            link.send(m.FetchedSpans(nbytes=sum(count for _, count in request.spans)), fd)
        finally:
            os.close(fd)

    def _given(self, done: asyncio.Task[None], link: RankLink, failed: Callable[[str], m.ToRank]) -> None:
        """Answer a rank also where this agent has failed: it waits for nothing else."""
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("state could not be given", exc_info=error)
            link.send(failed(f"its agent failed: {type(error).__name__}: {error}"))

    def _check_shard(self, rank: int, shard: int) -> None:
        """Raises PeerError where a rank was built to hold another part of the model than it had."""
        assert self._assignment is not None
        was = self._assignment.shards[rank]
        if was != shard:
            raise PeerError(f"rank {rank} is built as a twin of rank {shard} and was one of rank {was}")

    async def close(self) -> None:
        """Stop what is under way."""
        await self._former.close()
        await end_all([*self._fetches.values(), *self._tasks])
