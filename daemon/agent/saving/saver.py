"""Saves steps to a directory: has a writer process put this node's part there, from copies of its versions.

The writer comes from the zygote, which has torch loaded, and gets memfds of its own. So training goes on, and
a save that has begun ends well even if the ranks it is of are gone meanwhile.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptless.daemon.agent.ranks.environment import AGENT_SOCKET
from ckptless.daemon.agent.ranks.link import RankLink
from ckptless.daemon.agent.ranks.processes import Process, SpawnSpec, Zygote
from ckptless.daemon.agent.saving import plan as save_plan
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.protocol import saved
from ckptless.daemon.protocol import saving as w
from ckptless.daemon.protocol.codec import check_protocol
from ckptless.daemon.protocol.errors import CkptlessError, PeerError, ProtocolError
from ckptless.daemon.protocol.messages import Assignment, TensorsAt
from ckptless.daemon.settings.agent_config import AgentConfig
from ckptless.daemon.transport.tasks import Tasks

logger = logging.getLogger(__name__)

OnEvent = Callable[[Literal["info", "warning", "error"], str, str], None]

WRITER = "ckptless.pytorch_hooks.saving.writer"
HELLO_DEADLINE_S = 60.0
SAVE_DEADLINE_S = 1800.0
PACED_STEPS = 8
COPY_NBYTES = 64 << 20


@dataclass(frozen=True)
class TakenShard:
    """A shard's version: where it lies in the memory behind `fd`, which is whose this is to close."""

    shard: int
    at: TensorsAt
    fd: int


@dataclass(frozen=True)
class Hold:
    """The memory that a part is written from. Nobody has to keep it: versions are copied before all else."""

    shards: tuple[TakenShard, ...]
    records: tuple[w.WriteRecord, ...]


class Saver:
    """Owned by the agent's event loop. Without a SaveConfig it does nothing.

    `on_event(level, kind, text)` hears of what was saved, and of what was not.
    """

    def __init__(self, config: AgentConfig, store: VersionStore, zygote: Zygote) -> None:
        self.config = config.save
        self._agent, self._store, self._zygote = config, store, zygote
        self._assignment: Assignment | None = None
        self._wanted: set[int] = set()
        self._begun: set[tuple[int, int]] = set()
        self._writer: Process | None = None
        # What writers say; the one of now may be faster than our own bookkeeping of its birth.
        self._said: asyncio.Queue[tuple[RankLink, w.FromWriter]] = asyncio.Queue()
        # Of this run alone: a folder that an earlier one of the same name left is not this one's.
        self.tag = ""
        self._paced: deque[tuple[int, float]] = deque(maxlen=PACED_STEPS)
        self._tasks = Tasks()
        self.failed: dict[int, str] = {}
        # What could not be removed, as long as that is so: it is told of once.
        self._left = ""
        self.on_event: OnEvent = lambda _level, _kind, _text: None

    @property
    def newest(self) -> int | None:
        """The newest step that a rank of this node has committed."""
        return self._paced[-1][0] if self._paced else None

    @property
    def steps_per_s(self) -> float:
        """The rate at which steps come, as of now."""
        if len(self._paced) < 2:
            return 0.0
        (first, since), (last, _) = self._paced[0], self._paced[-1]
        return (last - first) / max(1e-3, asyncio.get_running_loop().time() - since)

    # --------------------------------------------------------------------------------- when

    def follow(self, assignment: Assignment) -> None:
        """A new generation: what was asked of the old one is not to be expected any more."""
        gone = set() if self._assignment is None else set(save_plan.nodes_of(self._assignment))
        gone -= {info.node for info in assignment.nodes}
        if gone and self._writer is not None:
            # It would wait for the part of a node that is lost.
            self._writer.kill()
        self._assignment = assignment
        self._wanted.clear()
        self._begun.clear()
        self._paced.clear()

    def want(self, step: int) -> None:
        """Save this one, too, as soon as it is committed."""
        self._wanted.add(step)
        self.committed(step, paced=False)

    def committed(self, step: int, *, paced: bool = True) -> None:
        """A rank of this node has committed a step."""
        if self.config is None or self._assignment is None:
            return
        earlier = [made for made, _ in self._paced if made < step]
        before = earlier[-1] if earlier else self._assignment.restore_step or 0
        if paced and (not self._paced or step > self._paced[-1][0]):
            self._paced.append((step, asyncio.get_running_loop().time()))
        due = step in self._wanted or save_plan.is_due(step, before, self.config.every)
        key = (self._assignment.generation, step)
        if not due or key in self._begun or (task := self._own_part(step)) is None:
            return
        self._begun.add(key)
        nodes = save_plan.nodes_of(self._assignment)
        part = self._part(task, f"{self._assignment.generation}", nodes, SAVE_DEADLINE_S)
        self._tasks.spawn(self._save_aside(task, part, self._hold(task)))

    def _own_part(self, step: int) -> save_plan.Task | None:
        """Return what this node writes of a step, once all of that is committed."""
        assert self._assignment is not None
        me = self._agent.node
        shards: dict[int, int] = {}
        for rank in self._assignment.ranks_on(me):
            held = self._store.record(rank, step)
            if held is None:
                return None
            shards[rank] = held.shard
        own = save_plan.own_shards(self._assignment, me, shards)
        if any(self._store.tensors(shard, step) is None for shard in own):
            return None
        return save_plan.Task(
            step=step,
            shards=tuple((shard, me) for shard in own),
            records=tuple((rank, me) for rank in shards),
        )

    def _part(self, task: save_plan.Task, when: str, nodes: Sequence[int], deadline_s: float) -> w.WritePart:
        assert self.config is not None
        assert self._assignment is not None
        name = f"{saved.SAVING}{task.step}-{self._agent.spec.job}-{self.tag}-{when}"
        return w.WritePart(
            job=self._agent.spec.job,
            step=task.step,
            generation=self._assignment.generation,
            world_size=len(self._assignment.places),
            folder=str(Path(self.config.directory) / name),
            directory=self.config.directory,
            node=self._agent.node,
            parts=tuple(nodes),
            finishes=nodes[0] == self._agent.node,
            keep=self.config.keep,
            deadline_s=deadline_s,
        )

    # --------------------------------------------------------------------------------- save

    async def _save_aside(self, task: save_plan.Task, part: w.WritePart, held: Hold) -> None:
        try:
            await self.save(task, part, held)
        except (CkptlessError, OSError) as error:
            why = str(error) or type(error).__name__
            self.failed[task.step] = why
            self.on_event("warning", "save-failed", f"step {task.step}: {why}")
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_give_up, Path(part.folder), part)

    def save_last(self, task: save_plan.Task, deadline_s: float) -> Coroutine[Any, Any, str]:
        """At the job's end: this node's part of `task`; as `save`."""
        me = self._agent.node
        mine = save_plan.Task(
            step=task.step,
            shards=tuple((shard, me) for shard in task.shards_of(me)),
            records=tuple((rank, me) for rank in task.records_of(me)),
        )
        return self.save(mine, self._part(mine, "end", task.nodes, deadline_s), self._hold(mine))

    def _hold(self, task: save_plan.Task) -> Hold:
        """Return what is to be written, as it lies here now; what is missing the writer misses, too."""
        found = [(shard, self._store.tensors(shard, task.step)) for shard, _ in task.shards]
        kept = [(rank, self._store.record(rank, task.step)) for rank, _ in task.records]
        return Hold(
            tuple(TakenShard(shard, one[0], os.dup(one[1].fd)) for shard, one in found if one is not None),
            tuple(
                w.WriteRecord(rank=rank, shard=held.shard, record=held.record, digest=held.digest)
                for rank, held in kept
                if held is not None
            ),
        )

    async def save(self, task: save_plan.Task, part: w.WritePart, held: Hold) -> str:
        """Write this node's part; the step's folder where it was this node that finished it, else "".

        Raises CkptlessError, OSError. `held` is closed.
        """
        copies: list[TakenShard] = []
        try:
            if self._writer is not None:
                raise PeerError("an older step is still being written")
            # At once: its slot is written over three steps later.
            copies = await asyncio.to_thread(_copy_all, held.shards)
            if await asyncio.to_thread(saved.is_whole, Path(part.directory) / saved.step_name(task.step)):
                return ""
            return await self._write(part, Hold(tuple(copies), held.records))
        finally:
            for one in (*held.shards, *copies):
                os.close(one.fd)

    async def _write(self, part: w.WritePart, held: Hold) -> str:
        if self._writer is not None:
            raise PeerError("an older step is still being written")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self._said = asyncio.Queue()
        log = Path(self._agent.log_dir) / f"save-{self._agent.name}.log"
        with log.open("ab") as output:
            process = self._writer = await self._zygote.spawn(self._spec(), output.fileno())
        try:
            async with asyncio.timeout(part.deadline_s):
                link = await self._hello(process)
                for one in held.shards:
                    link.send(w.WriteShard(shard=one.shard, at=one.at), one.fd)
                for record in held.records:
                    link.send(record)
                link.send(part)
                _, said = await self._next_word(process)
        except TimeoutError as error:
            raise PeerError(f"it was not written in {part.deadline_s:.0f} s") from error
        finally:
            self._writer = None
            process.kill()
        if not isinstance(said, w.Written):
            raise ProtocolError(f"its writer says {type(said).__name__} in place of what became of it")
        if said.error:
            raise PeerError(said.error)
        if said.left and not self._left:
            self.on_event("warning", "save-not-removed", f"an older step cannot be removed: {said.left}")
        self._left = said.left
        if said.path:
            self.on_event("info", "saved", f"step {part.step} in {loop.time() - begun:.2f} s: {said.path}")
        return said.path

    def _spec(self) -> SpawnSpec:
        return SpawnSpec(
            argv=(WRITER,),
            module=True,
            env={**self._agent.env, AGENT_SOCKET: self._agent.rank_socket},
            cwd=Path(self._agent.cwd),
            # Slurm signals all there is in the step, at a time limit, too: what is begun is to be ended.
            deaf=True,
        )

    # --------------------------------------------------------------------------- the writer

    async def _hello(self, process: Process) -> RankLink:
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                link, _ = await self._next_word(process)
        except TimeoutError:
            raise PeerError("its writer did not come up") from None
        return link

    async def _next_word(self, process: Process) -> tuple[RankLink, w.FromWriter]:
        """Return what this writer says next. Raises PeerError where it has ended."""
        dead = asyncio.create_task(process.wait())
        try:
            while True:
                word = asyncio.create_task(self._said.get())
                try:
                    # no deadline: the caller's
                    await asyncio.wait({word, dead}, return_when=asyncio.FIRST_COMPLETED)
                    if not word.done():
                        raise PeerError(f"its writer has ended with {process.returncode}")
                    if word.result()[0].pid == process.pid:
                        return word.result()
                finally:
                    word.cancel()
        finally:
            dead.cancel()

    def says(self, link: RankLink, message: w.FromWriter) -> None:
        """A writer's message. Raises ProtocolError."""
        if isinstance(message, w.WriterHello):
            check_protocol(message.protocol, "the writer")
        self._said.put_nowait((link, message))

    async def settle(self, deadline_s: float) -> None:
        """Wait for what is being written, at most so long; then it is given up."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(list(self._tasks), timeout=deadline_s)
        if late and self._writer is not None:
            self._writer.kill()
            await asyncio.wait(late, timeout=deadline_s)


def _copy_all(held: Sequence[TakenShard]) -> list[TakenShard]:
    """Memfds of exactly the versions' bytes. Raises OSError."""
    copies: list[TakenShard] = []
    try:
        for one in held:
            fd = os.memfd_create("ckptless-save", os.MFD_CLOEXEC)
            copies.append(TakenShard(one.shard, one.at, fd))
            done = 0
            while done < one.at.nbytes:
                count = min(COPY_NBYTES, one.at.nbytes - done)
                sent = os.sendfile(fd, one.fd, one.at.offset + done, count)
                if not sent:
                    raise OSError(f"the memory of shard {one.shard} ends early")
                done += sent
    except BaseException:
        for one in copies:
            os.close(one.fd)
        raise
    return copies


def _give_up(folder: Path, part: w.WritePart) -> None:
    """Say that nobody needs to wait for this node's part; if it is the one that finishes, all are in vain."""
    if part.finishes:
        shutil.rmtree(folder, ignore_errors=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / saved.skip_name(part.node)).touch()
