"""Pure: the names of runs, and which Slurm job each belongs to."""

import re

from ckptless.daemon.api.errors import PeerError

_RUN = re.compile(r"(\d{1,10})(?:\.(?:\d{1,5}|s\d{1,10}(?:r\d{1,5})?))?")


def slurm_job_id(run: str) -> int:
    """The Slurm job of a run: 4711, 4711.1, ..., or in step 3 4711.s3, requeued once 4711.s3r1. PeerError."""
    found = _RUN.fullmatch(run)
    if found is None:
        raise PeerError(f"{run[:80]!r} is not the name of a run in a Slurm job")
    return int(found.group(1))
