"""Whether a node's own agent answers: one that does not is ended, and with it its node's part of the job.

A process that is stopped, or stuck, keeps its connection; its death would be seen at once, so it is killed.
An agent whose ranks are stopped as well is of a job that Slurm has suspended, which is no fault.
"""

import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

ASKS_PER_DEADLINE = 4
# A caller that comes this much later than it meant to was starved itself.
LATE_S = 0.25
STOPPED = "T"


@dataclass
class Heartbeat:
    """Pure: when to ask an agent whether it is there, and for how long it has been silent. In seconds."""

    deadline_s: float
    heard_at: float
    asked_at: float = float("-inf")
    looked_at: float | None = None

    def heard(self, now: float) -> None:
        """It has said something."""
        self.heard_at = now

    def look(self, now: float) -> bool:
        """Time has passed; say whether to ask now. A caller that comes late could not have heard."""
        if self.looked_at is not None and now - self.looked_at > LATE_S:
            self.heard_at += now - self.looked_at
        self.looked_at = now
        if now - self.asked_at < self.deadline_s / ASKS_PER_DEADLINE:
            return False
        self.asked_at = now
        return True

    def silent(self, now: float) -> bool:
        """Whether it has been silent for too long."""
        return now - self.heard_at > self.deadline_s


class AgentProcess:
    """The process at the other end of an agent's connection. Owned by the daemon's event loop."""

    def __init__(self, pid: int, uid: int) -> None:
        """Raises OSError where the process that connected, which was `uid`'s, is gone or cannot be seen.

        Its number may be another user's by now, since a connection can be passed on; that one is never ended.
        """
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        try:
            if Path(f"/proc/{pid}").stat().st_uid != uid:
                raise ProcessLookupError(f"process {pid} is not of uid {uid}")
        except OSError:
            os.close(self._pidfd)
            raise

    @property
    def suspended(self) -> bool:
        """Whether it is stopped with all of its children, as by `scontrol suspend`."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return all(_state(pid) == STOPPED for pid in (str(self.pid), *children))
        except OSError:
            return False

    def kill(self) -> None:
        """End it at once; its ranks end with it. Raises PermissionError where this daemon may not."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Forget it."""
        os.close(self._pidfd)


def _state(pid: str) -> str:
    """Of proc(5)'s stat; the name before it may have anything in it. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
