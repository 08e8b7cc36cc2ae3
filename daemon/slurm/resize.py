"""Growing and shrinking a running job, in the steps that Slurm has for it.

Growing takes a second job: one that asks for the new nodes with `--dependency=expand:JOB`, and, once it has
them, gives them all to the first by shrinking to none. That helper job is named after a secret of ours, so
that it is found and cancelled whatever went wrong in between.
"""

import logging
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.slurm.adapter import MAX_DRAW_IN, Job, check_node
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.errors import SlurmError, SlurmRefusedError, SlurmUnreachableError, from_message
from ckptless.daemon.slurm.giving_way import HELPER_NAME, Queued, could_use_idle
from ckptless.daemon.slurm.hostlist import compress
from ckptless.daemon.slurm.process import Account

if TYPE_CHECKING:
    from ckptless.daemon.slurm.commands import Commands

_log = logging.getLogger(__name__)

CLEAN_UP_S = 10.0

# "Unable to allocate resources: Connection timed out" is what --immediate ends with.
_NO_NODES = ("Unable to allocate resources", "configuration not available", "configuration is not available")


async def grow(
    slurm: "Commands", job_id: int, count: int, avoid: Sequence[str], deadline: Deadline
) -> tuple[str, ...]:
    """See `Commands.draw_in`."""
    if not 0 < count <= MAX_DRAW_IN:
        raise UsageError(f"{count} is not a number of nodes to draw in: 1 to {MAX_DRAW_IN}")
    job = await _running(slurm, job_id, deadline)
    helper_name = f"{HELPER_NAME}-{job_id}-{secrets.token_hex(6)}"
    # The daemon may run as root, whose jobs may be what a user's may not: all is asked for in the user's
    # name.
    account = Account.of(job.user_id)
    queue = await slurm.queue(deadline_s=deadline.left_s)
    ours = next((one for one in queue if one.job_id == job_id), None)
    if ours is not None and (first := could_use_idle(ours, queue)) is not None:
        raise SlurmRefusedError(
            f"job {job_id} draws no node in while job {first.job_id}, which comes first, waits for nodes"
        )
    request = (*_request(job, count, avoid, helper_name, deadline), *_standing(ours))
    try:
        done = await slurm.command(deadline, "salloc", *request, account=account)
        if done.status != 0:
            raise _no_nodes(job_id, count, done.err)
        helper = await _helper(slurm, helper_name, deadline)
        await slurm.tell(deadline, f"grow job {job_id}", "update", f"jobid={helper.job_id}", "numnodes=0")
        grown = await slurm.job(job_id, deadline_s=deadline.left_s)
    except BaseException:
        await _drop(slurm, helper_name)
        raise
    if not set(helper.nodes) <= set(grown.nodes):
        raise SlurmRefusedError(
            f"Slurm took {compress(helper.nodes)} for job {job_id} but did not give them to it"
        )
    return helper.nodes


async def shrink(slurm: "Commands", job_id: int, names: Sequence[str], deadline: Deadline) -> None:
    """See `Commands.release`."""
    going = {check_node(name) for name in names}
    job = await _running(slurm, job_id, deadline)
    if strangers := going - set(job.nodes):
        raise UsageError(f"{compress(strangers)} is not in job {job_id}, which has {compress(job.nodes)}")
    if job.batch_host in going:
        raise UsageError(
            f"{job.batch_host} runs the batch script of job {job_id}: without it the job would end"
        )
    staying = [name for name in job.nodes if name not in going]
    if not staying:
        raise UsageError(f"job {job_id} would have no node left: cancel it instead")
    if going:
        nodes = f"nodelist={compress(staying)}"
        await slurm.tell(deadline, f"shrink job {job_id}", "update", f"jobid={job_id}", nodes)


async def _running(slurm: "Commands", job_id: int, deadline: Deadline) -> Job:
    """The job. One that waits has a list of nodes, too: the one it asks for, which is no business of ours."""
    job = await slurm.job(job_id, deadline_s=deadline.left_s)
    if not job.running:
        raise SlurmRefusedError(f"job {job_id} is {job.state}: only a running job grows or shrinks")
    if job.array:
        raise SlurmRefusedError(f"job {job_id} is task {job.array} of an array: Slurm resizes no such task")
    return job


def _request(
    job: Job, count: int, avoid: Sequence[str], helper_name: str, deadline: Deadline
) -> tuple[str, ...]:
    """The options of salloc. Whole nodes, as spares are; for no longer than the job itself may run."""
    options = [
        "--no-shell",
        f"--job-name={helper_name}",
        f"--nodes={count}",
        "--exclusive",
        "--ntasks-per-node=1",
        f"--dependency=expand:{job.job_id}",
        f"--immediate={max(1, int(deadline.left_s / 2))}",
    ]
    if job.partition:
        options.append(f"--partition={job.partition}")
    if job.time_limit_s is not None:
        options.append(f"--time={math.ceil(job.time_limit_s / 60)}")
    if avoid:
        options.append(f"--exclude={compress(check_node(name) for name in avoid)}")
    return tuple(options)


def _standing(ours: Queued | None) -> tuple[str, ...]:
    """The options by which it stands in the queue where the job did, and not before others that wait."""
    if ours is None:
        return ()
    nice = (f"--nice={ours.nice}",) if ours.nice > 0 else ()
    return (*nice, f"--qos={ours.qos}") if ours.qos else nice


def _no_nodes(job_id: int, count: int, said: str) -> SlurmError:
    """Return what salloc's refusal means."""
    if "Requested operation not supported" in said or "Requested operation is presently disabled" in said:
        return SlurmRefusedError(
            f"Slurm may not grow job {job_id}: add permit_job_expansion to SchedulerParameters in slurm.conf"
        )
    if "Unable to contact" not in said and any(words in said for words in _NO_NODES):
        return SlurmRefusedError(
            f"Slurm has no {count} idle node(s) for job {job_id}: {said.split('error: ')[-1].strip()}"
        )
    return from_message(f"find {count} node(s) for job {job_id}", said)


async def _helper(slurm: "Commands", helper_name: str, deadline: Deadline) -> Job:
    for job in await slurm.squeue(deadline, f"--name={helper_name}"):
        if job.running and job.nodes:
            return job
    raise SlurmRefusedError(f"the nodes that Slurm gave to {helper_name} were gone at once")


async def _drop(slurm: "Commands", helper_name: str) -> None:
    """Cancel the helper job if there is one. With slurmctld away that is somebody else's to do."""
    deadline = Deadline(CLEAN_UP_S)
    try:
        for job in await slurm.squeue(deadline, f"--name={helper_name}"):
            if not job.over:
                await slurm.scancel(str(job.job_id), deadline)
    except SlurmUnreachableError:
        _log.warning("job %s may hold nodes until it is cancelled: slurmctld is away", helper_name)
