"""Pure: the names of runs, which Slurm job each belongs to, and how often Slurm had started that."""

import re
from collections.abc import Mapping

from ckptless.daemon.protocol.errors import PeerError

RESTARTS = "SLURM_RESTART_COUNT"
_RUN = re.compile(r"(\d{1,10})(?:\.(?:(\d{1,5})|s\d{1,10}(?:r(\d{1,5}))?))?")


def slurm_job_id(run: str) -> int:
    """The Slurm job of a run: 4711, 4711.1, ..., or in step 3 4711.s3, requeued once 4711.s3r1. PeerError."""
    return int(_match(run).group(1))


def restarts_of(run: str) -> int:
    """Return how often the run's job had been started before. Raises PeerError."""
    found = _match(run)
    return int(found.group(2) or found.group(3) or 0)


def restarts(env: Mapping[str, str]) -> int:
    """Return how often Slurm has started the job before, by the environment of a step or batch script."""
    text = env.get(RESTARTS, "")
    return int(text) if text.isdecimal() else 0


def _match(run: str) -> re.Match[str]:
    found = _RUN.fullmatch(run)
    if found is None:
        raise PeerError(f"{run[:80]!r} is not the name of a run in a Slurm job")
    return found
