"""Nodes that come to a Slurm job and leave it while it runs, as the job wants: one after the other."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ckptless.daemon.launch.late import LateNodes
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.forming import nodes_asked_for, nodes_given_back, nodes_up, unmark_up
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.errors import SlurmRefusedError
from ckptless.daemon.slurm.hostlist import compress
from ckptless.daemon.transport.tasks import end_all

logger = logging.getLogger(__name__)

# Slurm answers at once whether a node is idle; under load it may take its time.
DEADLINE_S = 20.0
# So long after a refusal it is asked again, each time twice as long, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
Start: TypeAlias = Callable[[str], Awaitable[None]]


class DrawIn:
    """Owned by the launcher's event loop. `start(name)` has an agent started; `names` are the job's nodes.

    What Slurm gives is the user's to use, within limits, QOS and reservations: it is asked in the user's
    name. A node that the job has lost is not asked for again; one that was given back may be.
    """

    def __init__(
        self, job_id: int, late: LateNodes, log_dir: Path, names: Sequence[str], start: Start
    ) -> None:
        self._job_id, self._late, self._log_dir, self._start = job_id, late, log_dir, start
        # By number, as in JobSpec.
        self._names = list(names)
        self._given_back: set[int] = set()
        # Nodes that are out of the job and that Slurm does not take: they are used again before others.
        self._kept: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self._pause_s, self._next_s = FIRST_PAUSE_S, 0.0
        self._said = ""

    async def look(self, now_s: float, ended: set[int]) -> None:
        """Now and then: ask Slurm for a node, or give one back; `ended`: nodes whose agents have ended."""
        if self._task is not None:
            if not self._task.done():
                return
            # no deadline: it is done
            await self._task
            self._task = None
        leaving = nodes_given_back(self._log_dir) - self._given_back
        if now_s < self._next_s:
            return
        if leaving and leaving <= ended:
            # All at once: Slurm 22.05 without slurmdbd takes one such update of a job, and no second one.
            self._task = asyncio.create_task(self._try(self._release(sorted(leaving)), now_s))
            return
        there = nodes_up(self._log_dir)
        up = {number for number, name in enumerate(self._names) if name in there}
        if self._late.missing(nodes_asked_for(self._log_dir), up, ended):
            self._task = asyncio.create_task(self._try(self._draw(), now_s))

    async def _try(self, work: Coroutine[Any, Any, None], now_s: float) -> None:
        try:
            # no deadline: each of Slurm's commands has its own
            await work
        except (CkptlessError, TimeoutError) as error:
            why = str(error) or "Slurm has not answered"
            if why != self._said:
                self._said = why
                logger.warning("%s", why)
            self._next_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        else:
            self._pause_s, self._said = FIRST_PAUSE_S, ""

    async def _release(self, numbers: Sequence[int]) -> None:
        slurm = Commands()
        held = (await slurm.job(self._job_id, deadline_s=DEADLINE_S)).nodes
        # Slurm may have some already: they failed, or it has not answered what was asked before.
        names = [name for number in numbers if (name := self._names[number]) in held]
        try:
            if names:
                await slurm.release(self._job_id, names, deadline_s=DEADLINE_S)
        except SlurmRefusedError:
            self._kept += names
            self._given_back.update(numbers)
            raise
        self._given_back.update(numbers)
        logger.info("%s: given back", compress([self._names[number] for number in numbers]))

    async def _draw(self) -> None:
        avoid = [name for number, name in enumerate(self._names) if number not in self._given_back]
        if self._kept:
            name = self._kept.pop(0)
        else:
            (name,) = await Commands().draw_in(self._job_id, 1, avoid=avoid, deadline_s=DEADLINE_S)
        self._late.start()
        self._names.append(name)
        logger.info("%s: drawn in", name)
        unmark_up(self._log_dir, name)
        await self._start(name)

    async def close(self) -> None:
        """Ask for nothing any more; a request that is under way is taken back."""
        if self._task is not None:
            await end_all([self._task])
