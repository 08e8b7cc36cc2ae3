"""Has a job's state saved to its directory because somebody says so: root, or the job's owner."""

import os
from collections.abc import Iterable

from ckptless.daemon.api.messages import PROTOCOL
from ckptless.daemon.api.saving import Save, Saved
from ckptless.daemon.control import eviction
from ckptless.daemon.evict import find_run
from ckptless.daemon.runtime import JobRuntime


async def save(jobs: Iterable[JobRuntime], asked: Save, uid: int) -> Saved:
    """Do it, or say in one sentence why not. `uid` is the asker's, by the kernel's word."""
    if asked.protocol != PROTOCOL:
        text = f"ckptctl speaks protocol {asked.protocol}, the daemon {PROTOCOL}"
        return Saved(verdict="refused", text=text)
    run = find_run(jobs, asked.job)
    if run is None or not eviction.may_say("operator", uid, run.uid, os.getuid()):
        # Of other users' jobs nobody learns so much as that they are here.
        return Saved(verdict="unknown", text=f"no job {asked.job!r} that uid {uid} may touch runs here")
    if (outcome := run.session.control.outcome) is not None:
        return Saved(verdict="refused", text=f"job {run.job} is over: {outcome.reason}")
    return await run.save_state(asked.deadline_s)
