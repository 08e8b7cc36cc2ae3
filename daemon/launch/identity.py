"""Whose state is whose: what tells a Slurm job from others that have the same number."""

from collections.abc import Mapping

import xxhash

# The same in every task of the job, and after a requeue. Slurm tells a job no time of submission, and what it
# tells others changes with a requeue: an older job of the same number, user and cluster has the same run id.
NAMES = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_UID")


def run_id(env: Mapping[str, str]) -> str:
    """`JobSpec.run_id` of a run in a Slurm job: the same for all runs of the job, requeued or not."""
    return xxhash.xxh3_128_hexdigest("\0".join(env.get(name, "") for name in NAMES).encode())
