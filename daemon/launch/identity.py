"""Whose state is whose: what tells a job, and a run, from others of the same name."""

import secrets
from collections.abc import Mapping

import xxhash

# The same in every task of the job, and after a requeue. Slurm tells a job no time of submission, and what it
# tells others changes with a requeue; the SPANK plugin does, where the job was submitted with --ckptless.
# Without it an older job of the same number, user and cluster has the same run id.
JOB = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_SPANK_CKPTLESS_SUBMITTED")
# The same in every task of a step. Slurm tells the time of a job's start since 23.02; before, and without the
# plugin, it is srun's port that tells steps of one number apart.
STEP = (
    *JOB,
    *("SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_JOB_START_TIME"),
    *("SLURM_STEP_LAUNCHER_PORT", "SLURM_SRUN_COMM_PORT"),
)


def run_id(env: Mapping[str, str]) -> str:
    """`JobSpec.run_id` of a run in a Slurm job: the same for all runs of the job, requeued or not."""
    return _digest(env, JOB)


def launch_id(env: Mapping[str, str], *, in_step: bool) -> str:
    """`JobSpec.launch` of a run in Slurm: tasks of a step each find the same one."""
    return _digest(env, STEP) if in_step else secrets.token_hex(16)


def _digest(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(env.get(name, "") for name in names).encode())
