"""Draws idle nodes into a Slurm job while it runs, one after the other, as the job asks for them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from ckptless.daemon.launch.late import LateNodes
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.forming import nodes_asked_for, nodes_up
from ckptless.daemon.slurm.commands import Commands

logger = logging.getLogger(__name__)

# Slurm answers at once whether a node is idle; under load it may take its time.
DRAW_DEADLINE_S = 20.0
# So long after a refusal it is asked again, each time twice as long, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
Start: TypeAlias = Callable[[str], Awaitable[None]]


class DrawIn:
    """Owned by the launcher's event loop. `start(name)` has an agent started; `names` are the job's nodes.

    What Slurm gives is the user's to use, within limits, QOS and reservations: it is asked in the user's
    name. A node that the job has had already has its number there, and is not asked for again.
    """

    def __init__(
        self, job_id: int, late: LateNodes, log_dir: Path, names: Sequence[str], start: Start
    ) -> None:
        self._job_id, self._late, self._log_dir, self._start = job_id, late, log_dir, start
        self._had = list(names)
        self._asking: asyncio.Task[tuple[str, ...]] | None = None
        self._names: dict[int, str] = {}
        self._pause_s, self._next_s = FIRST_PAUSE_S, 0.0
        self._said = ""

    async def look(self, now_s: float, ended: set[str]) -> None:
        """Now and then: begin to ask for a node, or start an agent on the one that was given.

        `ended`: the nodes whose steps are over.
        """
        if self._asking is not None:
            if self._asking.done():
                task, self._asking = self._asking, None
                await self._take(task, now_s)
            return
        names = nodes_up(self._log_dir)
        up = {number for number, name in self._names.items() if name in names}
        over = {number for number, name in self._names.items() if name in ended}
        if now_s >= self._next_s and self._late.missing(nodes_asked_for(self._log_dir), up, over):
            asked = Commands().draw_in(self._job_id, 1, avoid=self._had, deadline_s=DRAW_DEADLINE_S)
            self._asking = asyncio.create_task(asked)

    async def _take(self, task: "asyncio.Task[tuple[str, ...]]", now_s: float) -> None:
        try:
            (name,) = task.result()
        except (CkptlessError, TimeoutError) as error:
            why = str(error) or "Slurm has not answered"
            if why != self._said:
                self._said = why
                logger.warning("no node is drawn in: %s", why)
            self._next_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return
        self._pause_s, self._said = FIRST_PAUSE_S, ""
        self._had.append(name)
        self._names[self._late.start()] = name
        logger.info("%s: drawn in", name)
        await self._start(name)

    async def close(self) -> None:
        """Ask for nothing any more; a request that is under way is taken back."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
