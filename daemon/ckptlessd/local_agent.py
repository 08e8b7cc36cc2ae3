"""The agent of a job on this node: its connection, its process, and whether it answers.

One that does not answer is ended, and with it its node's part of the job. A process that is stopped, or
stuck, keeps its connection; its death would be seen at once, so it is killed. One whose ranks are stopped,
too, may be of a job that Slurm has suspended, which is no fault: then other nodes' are stopped as well.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptless.daemon.ckptlessd.unix_server import Client
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.saving import Saved, SaveDone, SaveNow

# An agent does more in one go than a rank's listener: it may be silent for so many times a rank's `pong_s`.
PONGS_PER_AGENT = 2
AGENT_DEADLINE_S = 20.0
# An agent keeps to the deadline of a save itself.
SAVE_GRACE_S = 2.0
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
    """Return the state in proc(5)'s stat; the name before it may have anything in it. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class LocalAgent:
    """The daemon's end of a job's agent on this node, if that is connected. Owned by the event loop."""

    def __init__(self, job: str, now: Callable[[], float]) -> None:
        self._job, self._now = job, now
        self._client: Client | None = None
        # None where its process is not seen: its end comes next, or it is in another PID namespace.
        self._heart: tuple[Heartbeat, AgentProcess] | None = None
        self._saves: dict[int, asyncio.Future[Saved]] = {}
        self._save_count = 0

    @property
    def here(self) -> bool:
        """Whether it is connected."""
        return self._client is not None

    def connected(self, client: Client) -> None:
        """The agent is there; an older connection of it is forgotten."""
        self._client = client
        self._forget_process()
        if client.pid != os.getpid():
            with contextlib.suppress(OSError):
                process = AgentProcess(client.pid, client.uid)
                self._heart = (Heartbeat(AGENT_DEADLINE_S, self._now()), process)

    def send(self, message: m.ToAgent | SaveNow) -> None:
        """Queue a message, if it is connected. A suspended one gets no renewals, to be hung up on for."""
        client = self._client
        if client is not None and not (isinstance(message, m.Renewed) and client.has_unsent):
            client.write(message)

    def heard(self) -> None:
        """The agent has said something."""
        if self._heart is not None:
            self._heart[0].heard_at = self._now()

    def look(self, limits: m.Limits | None) -> float | None:
        """Ask it for a sign of life; seconds of its silence where that has lasted for too long."""
        if self._heart is None:
            return None
        heartbeat, now = self._heart[0], self._now()
        if limits is not None:
            heartbeat.deadline_s = PONGS_PER_AGENT * limits.pong_s
        if heartbeat.look(now):
            self.send(m.Ping(seq=0))
        return now - heartbeat.heard_at if heartbeat.silent(now) else None

    @property
    def suspended(self) -> bool:
        """Whether it is stopped with all of its ranks. What it gets to answer begins when it goes on."""
        if self._heart is None or not self._heart[1].suspended:
            return False
        self.heard()
        return True

    @property
    def deadline_s(self) -> float:
        """After so many seconds of silence it is ended."""
        return self._heart[0].deadline_s if self._heart is not None else AGENT_DEADLINE_S

    def kill(self) -> str:
        """End it at once; what came of that, in words."""
        if self._heart is None:
            return "it is gone"
        process = self._heart[1]
        try:
            process.kill()
        except OSError as error:
            return f"process {process.pid} cannot be killed: {error.strerror}"
        finally:
            self._forget_process()
        return f"process {process.pid} is killed"

    def hang_up(self) -> None:
        """End the connection; `left` follows."""
        if self._client is not None:
            self._client.close()

    def left(self, client: Client) -> bool:
        """A connection has ended; whether it was the agent's, which is gone then."""
        if self._client is not client:
            return False
        self._client = None
        self._forget_process()
        gone = Saved(verdict="failed", text=f"the agent of job {self._job} on this node has ended")
        for number in list(self._saves):
            self.saved(SaveDone(number=number, answer=gone))
        return True

    def _forget_process(self) -> None:
        if self._heart is not None:
            self._heart[1].close()
            self._heart = None

    async def save(self, deadline_s: float) -> Saved:
        """Have the agents save the job's state; what came of it."""
        if self._client is None:
            return Saved(verdict="elsewhere", text=f"job {self._job} has no agent on this node")
        self._save_count += 1
        number = self._save_count
        answer = self._saves[number] = asyncio.get_running_loop().create_future()
        self.send(SaveNow(number=number, deadline_s=deadline_s))
        try:
            async with asyncio.timeout(deadline_s + SAVE_GRACE_S):
                said: Saved = await answer
                return said
        except TimeoutError:
            return Saved(verdict="failed", text=f"the agent has said nothing in {deadline_s:.0f} s")
        finally:
            del self._saves[number]

    def saved(self, done: SaveDone) -> None:
        """The agent has answered `save`."""
        answer = self._saves.get(done.number)
        if answer is not None and not answer.done():
            answer.set_result(done.answer)

    def close(self) -> None:
        """Hang up on it, and forget its process."""
        self.hang_up()
        self._forget_process()
