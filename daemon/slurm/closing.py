"""Pure: rows of jobs that nobody has closed, though Slurm says that they are over.

Agents that are all gone, a quorum that is, a daemon that was away at the end: no daemon of the job has
decided how it ended, or this one has not heard it. What Slurm says gives way to what they have decided.
"""

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.records import BY_SLURM, JobRecord, JobState
from ckptless.daemon.slurm.adapter import Job
from ckptless.daemon.slurm.run_name import restarts_of, slurm_job_id

# More than clocks of nodes differ by: MUNGE takes no credential of such a one.
CLOCKS_S = 60.0
_ENDS: dict[str, JobState] = {
    "COMPLETED": "done",
    **dict.fromkeys(("CANCELLED", "DEADLINE", "PREEMPTED", "REVOKED", "TIMEOUT"), "stopped"),
}


def close(
    row: JobRecord, known: Mapping[int, Job], runs: Collection[str], asked_s: float
) -> JobRecord | None:
    """The closed row of a run that is over by Slurm's word; None where it is not, or nobody can tell.

    `known` are Slurm's jobs as of `asked_s`, Unix time in seconds; `runs` are those whose end is still to be
    decided here.
    """
    try:
        job_id, restarts = slurm_job_id(row.job), restarts_of(row.job)
    except PeerError:
        return None  # a run of local mode
    if row.job in runs or row.started_s >= asked_s:
        return None
    job = known.get(job_id)
    if job is None:
        return _closed(row, "stopped", "it knows the job no more (see sacct)", asked_s)
    if job.restarts > restarts:
        return _closed(row, "stopped", "it has started the job again", job.start_s or asked_s)
    if job.start_s is not None and row.started_s < job.start_s - CLOCKS_S:
        return _closed(row, "stopped", "another job has its number", asked_s)
    if not job.over:
        return None
    return _closed(row, _ENDS.get(job.state, "failed"), job.state, job.end_s or asked_s)


def _closed(row: JobRecord, state: JobState, what: str, ended_s: float) -> JobRecord:
    code = 0 if state == "done" else None
    ended_s = max(ended_s, row.started_s)
    return replace(row, state=state, ended_s=ended_s, exit_code=code, reason=f"{BY_SLURM}: {what}")
