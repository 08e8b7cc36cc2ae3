"""Saves steps: every so many, when somebody asks, and at the job's end."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from ckptless.daemon.agent.ranks.processes import Zygote
from ckptless.daemon.agent.saving import last as last_save
from ckptless.daemon.agent.saving import plan as save_plan
from ckptless.daemon.agent.saving.saver import Saver
from ckptless.daemon.agent.versions.replicas import Replicas
from ckptless.daemon.agent.versions.store import VersionStore
from ckptless.daemon.protocol import saved
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.messages import Assignment, NodeInfo
from ckptless.daemon.protocol.peers.messages import SaveAsk, SaveReply
from ckptless.daemon.protocol.saving import Saved, SaveDone, SaveNow
from ckptless.daemon.settings.agent_config import AgentConfig
from ckptless.daemon.transport.tasks import Tasks

logger = logging.getLogger(__name__)

# At the end so long is waited for what other nodes hold: they end at the same moment, or not at all.
GATHER_S = 5.0
POLL_S = 0.05
SETTLE_S = 10.0
ENDING = ".ending-"


class SaveService:
    """Owned by the agent's event loop."""

    def __init__(self, config: AgentConfig, store: VersionStore, zygote: Zygote, replicas: Replicas) -> None:
        self.saver = Saver(config, store, zygote)
        self._agent, self._store, self._replicas = config, store, replicas
        self._assignment: Assignment | None = None
        self._ending = False
        self._tasks = Tasks()
        replicas.serving.on_save_ask = self._asked

    def learn_key(self, key: bytes) -> None:
        """The job's key: what is made of it tells this run's folders from an earlier one's."""
        self.saver.tag = hashlib.blake2b(key, digest_size=4, person=b"ckptless-save").hexdigest()

    def follow(self, assignment: Assignment) -> None:
        """A new generation."""
        self._assignment = assignment
        self.saver.follow(assignment)

    # -------------------------------------------------------------------------------- at the end

    async def at_end(self) -> None:
        """The ranks have ended: save the newest step that the nodes hold together, if it is not saved yet."""
        config, assignment = self.saver.config, self._assignment
        self._ending = True
        if config is None or assignment is None:
            return
        deadline = asyncio.get_running_loop().time() + config.end_s
        # A part of the job that was cut off ends in a generation of its own.
        run = f"{self._agent.spec.job}-{self.saver.tag}-{assignment.generation}"
        folder = Path(config.directory) / f"{ENDING}{run}"
        nodes = [info.node for info in assignment.nodes]
        try:
            holdings, world = self._store.holdings(), len(assignment.places)
            task = await last_save.agree(folder, self._agent.node, nodes, holdings, world, GATHER_S)
            # Only now, as others have waited for this node's word. An older step may be waiting for a node
            # that is lost; what is saved here is newer, anyway.
            await self.saver.settle(SETTLE_S)
            if task is None or not task.step:
                logger.info("there is no step to save")
            elif self._agent.node in task.nodes:
                left_s = max(1.0, deadline - asyncio.get_running_loop().time())
                await self.saver.save_last(task, left_s)
            await asyncio.to_thread(last_save.leave, folder, self._agent.node)
        except (CkptlessError, OSError) as error:
            self.saver.on_event("error", "save-failed", f"the last step: {error or type(error).__name__}")

    # ------------------------------------------------------------------------------ when asked to

    def _asked(self, ask: SaveAsk) -> SaveReply:
        """Another agent's question."""
        if self._assignment is None or ask.generation != self._assignment.generation:
            return SaveReply(newest=None)
        if ask.step is not None:
            self.saver.want(ask.step)
        return SaveReply(newest=self.saver.newest, steps_per_s=self.saver.steps_per_s)

    def save_soon(self, order: SaveNow, answer: Callable[[SaveDone], None]) -> None:
        """The daemon wants it; it gets its answer when it is done."""

        async def do() -> None:
            answer(SaveDone(number=order.number, answer=await self.save_now(order)))

        self._tasks.spawn(do())

    async def save_now(self, order: SaveNow) -> Saved:
        """Have all nodes save one step, and wait until it is there, or the deadline is over."""
        job = self._agent.spec.job
        if self.saver.config is None:
            text = f"job {job} was started without --save-dir: it has no place to save to"
            return Saved(verdict="refused", text=text)
        if self._assignment is None:
            return Saved(verdict="refused", text=f"job {job} has not begun yet")
        why = "no step has been made"
        try:
            async with asyncio.timeout(order.deadline_s):
                while not self._ending:
                    with contextlib.suppress(TimeoutError):
                        found = await self._try_save(Path(self.saver.config.directory))
                        if found is not None:
                            return found
                    why = "its ranks did not come to a step that all nodes can save"
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return Saved(verdict="failed", text=f"nothing was saved in {order.deadline_s:.0f} s: {why}")
        except (CkptlessError, OSError) as error:
            return Saved(verdict="failed", text=str(error) or type(error).__name__)
        return Saved(verdict="failed", text=f"job {job} is ending: it saves its last step by itself")

    async def _try_save(self, directory: Path) -> Saved | None:
        """One step, in one generation; None where that is not to be had now."""
        assert self._assignment is not None
        assignment = self._assignment
        generation, nodes = assignment.generation, save_plan.nodes_of(assignment)
        infos = [info for info in assignment.nodes if info.node in nodes]
        # no deadline: that of the whole save, which `save_now` has
        told = await asyncio.gather(*(self._ask(info, SaveAsk(generation=generation)) for info in infos))
        newest = [reply.newest for reply in told if reply.newest is not None]
        if len(newest) < len(infos) or not min(newest):
            return None
        step = save_plan.step_ahead(newest, max(reply.steps_per_s for reply in told))
        target = directory / saved.step_name(step)
        order = SaveAsk(generation=generation, step=step)
        self.saver.failed.pop(step, None)
        # no deadline: that of the whole save, which `save_now` has
        told = await asyncio.gather(*(self._ask(info, order) for info in infos))
        if any(reply.newest is None or reply.newest > step + 1 for reply in told):
            return None  # one is further already than it was to be
        while not self._ending and self._assignment.generation == generation:
            if await asyncio.to_thread(saved.is_whole, target):
                text = f"step {step} is saved in {target}"
                return Saved(verdict="saved", text=text, step=step, path=str(target))
            if step in self.saver.failed:
                return Saved(verdict="failed", text=f"step {step}: {self.saver.failed[step]}", step=step)
            await asyncio.sleep(POLL_S)
        return None

    async def _ask(self, info: NodeInfo, ask: SaveAsk) -> SaveReply:
        if info.node == self._agent.node:
            return self._asked(ask)
        return await self._replicas.ask_save(info, ask)
