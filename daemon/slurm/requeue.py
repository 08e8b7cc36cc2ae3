"""The end of a job that Slurm starts again: put back into the queue from here, or preempted with grace time.

The requeue rung: a job that cannot go on goes back into Slurm's queue, if its user wants that.

A preempted job with grace time: its batch script must outlive its training, or Slurm calls the job FAILED. At
the begin of the grace time Slurm signals the steps and lets the batch script run. Only at its end is the job
requeued, or called PREEMPTED, as the site has it; a batch script that ends before decides that itself, by its
exit code. So whoever it waits for stays: the launcher, or under srun the first node's agent.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.messages import Outcome, Why
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.ending import Ending
from ckptless.daemon.slurm.errors import SlurmError
from ckptless.daemon.slurm.run_name import restarts

logger = logging.getLogger(__name__)

# Not the script's fault, and nothing that other nodes would not mend.
MENDABLE: frozenset[Why] = frozenset({"never-formed", "no-spare", "no-common-step"})
DEADLINE_S = 30.0
ASK_S = 2.0
POLL_S = 2.0
# From the end of the grace time until Slurm has acted on it: a pass or two of its scheduler.
LATE_S = 180.0
# Where Slurm does not say yet when the grace time ends: for a job without a time limit it does so afterwards.
LONGEST_S = 86_400.0


def why_requeue(outcome: Outcome | None, most: int, env: Mapping[str, str]) -> str | None:
    """Return why the job is to start again, or None. `most`: how often it may; `env`: Slurm's, of this start.

    Without an outcome every node has ended for itself: none heard a majority of the voters, and nobody could
    say how the job ends. No node is left that runs any of it, since all steps are over.
    """
    if restarts(env) >= most:
        return None
    if outcome is None:
        return "no-quorum: no node heard a majority of the job's voters"
    if outcome.state == "failed" and outcome.why in MENDABLE:
        return f"{outcome.why}: {outcome.reason}"
    return None


async def requeue(job_id: int, why: str) -> bool:
    """Tell Slurm; whether it will start the job again. Slurm ends this batch script then."""
    try:
        # Its own number, as Slurm gave it to this script, is good for the element of an array, too.
        await Commands().tell(Deadline(DEADLINE_S), f"requeue job {job_id}", "requeue", str(job_id))
    except SlurmError as error:
        logger.error("job %d cannot be put back into the queue (%s): %s", job_id, why, error)  # noqa: TRY400
        return False
    logger.warning("job %d goes back into the queue: %s", job_id, why)
    return True


async def stay(
    job_id: int, slurm: Commands | None = None, now: Callable[[], float] = time.time, poll_s: float = POLL_S
) -> None:
    """Wait, in the job's grace time, until Slurm has done with the job what it wanted.

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
