"""A preempted job with grace time: its batch script must outlive its training, or Slurm calls the job FAILED.

At the begin of the grace time Slurm signals the steps and lets the batch script run. Only at its end is the
job requeued, or called PREEMPTED, as the site has it; a batch script that ends before decides that itself, by
its exit code. So whoever it waits for stays: the launcher, or under srun the first node's agent.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.launch.requeue import requeue
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.ending import Ending

logger = logging.getLogger(__name__)

ASK_S = 2.0
POLL_S = 2.0
# From the end of the grace time until Slurm has acted on it: a pass or two of its scheduler.
LATE_S = 180.0
# Where Slurm does not say yet when the grace time ends: for a job without a time limit it does so afterwards.
LONGEST_S = 86_400.0


async def stay(
    job_id: int, slurm: Commands | None = None, now: Callable[[], float] = time.time, poll_s: float = POLL_S
) -> None:
    """Return at once unless the job is in its grace time; else when Slurm has done with it what it wanted.

    Where Slurm does nothing in time, because what it wanted the nodes for has gone, the job is requeued from
    here. Slurm ends this process, too; so it may not return.
    """
    slurm = slurm or Commands()
    found = await _ask(slurm, job_id)
    if found is None or not found.in_grace:
        return
    logger.warning("Slurm preempts the job: waiting for it to end or requeue it, as the site has it")
    began = now()
    while found is None or found.in_grace:
        limit = began + LONGEST_S
        if found is not None and found.end_s is not None:
            limit = min(limit, max(found.end_s, began) + LATE_S)
        if now() > limit:
            await requeue(job_id, "its grace time is over, and Slurm has done nothing")
            return
        await asyncio.sleep(poll_s)
        found = await _ask(slurm, job_id)


async def _ask(slurm: Commands, job_id: int) -> Ending | None:
    try:
        return await slurm.ending(job_id, deadline_s=ASK_S)
    except CkptlessError as error:
        logger.info("Slurm cannot be asked about job %d: %s", job_id, error)
        return None
