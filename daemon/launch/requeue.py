"""The requeue rung: a job that cannot go on goes back into Slurm's queue, if its user wants that."""

import logging
from collections.abc import Mapping

from ckptless.daemon.api.messages import Outcome, Why
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.errors import SlurmError

logger = logging.getLogger(__name__)

# Not the script's fault, and nothing that other nodes would not mend.
MENDABLE: frozenset[Why] = frozenset({"never-formed", "no-spare", "no-common-step"})
DEADLINE_S = 30.0
RESTARTS = "SLURM_RESTART_COUNT"


def restarts(env: Mapping[str, str]) -> int:
    """How often Slurm has started the job again."""
    text = env.get(RESTARTS, "")
    return int(text) if text.isdecimal() else 0


def why_requeue(outcome: Outcome | None, most: int, env: Mapping[str, str]) -> str | None:
    """Why the job is to start again, or None. `most`: how often it may; `env`: Slurm's, of this start.

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
