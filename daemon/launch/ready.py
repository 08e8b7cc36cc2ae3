"""Local mode: wait until a node's daemon listens. One that still does something (imports) is waited for."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckptless.daemon.api.errors import StartError
from ckptless.daemon.api.unixpath import unix_address

POLL_S = 0.05
LAST_LINES = 3
DEFAULT_START_S = 30.0
# One that works, and does not listen after so many times as long, will not.
MOST_TIMES = 20


@dataclass
class Progress:
    """Pure: since when a number has not moved. In seconds."""

    value: int | None = None
    since: float = field(default=0.0)

    def stuck_s(self, value: int, now: float) -> float:
        """For how long `value` has been what it is."""
        if value != self.value:
            self.value, self.since = value, now
        return now - self.since


async def wait_ready(
    name: str, daemon: asyncio.subprocess.Process, listens: str, patience_s: float, stop: Callable[[], bool]
) -> None:
    """Return when the socket `listens` takes connections, or when `stop` says so.

    Raises StartError for a daemon that has ended, or that has used no CPU time for `patience_s`; on a busy
    machine one that works may take MOST_TIMES as long.
    """
    loop, progress = asyncio.get_running_loop(), Progress()
    began = loop.time()
    while not stop():
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe, contextlib.suppress(OSError):
            probe.connect(unix_address(listens))
            return
        if daemon.returncode is not None:
            raise StartError(f"{name}'s daemon did not start: it has ended with code {daemon.returncode}")
        ticks, state = _cpu(daemon.pid)
        if loop.time() - began > MOST_TIMES * patience_s:
            raise StartError(
                f"{name}'s daemon (process {daemon.pid}, state {state}) is not ready after "
                f"{MOST_TIMES * patience_s:.0f} s, though it works: see its log"
            )
        if progress.stuck_s(ticks, loop.time()) > patience_s:
            raise StartError(
                f"{name}'s daemon (process {daemon.pid}, state {state}) is not ready, and has done nothing "
                f"for {patience_s:.0f} s: see what holds it up, or give more with --start-timeout"
            )
        await asyncio.sleep(POLL_S)


def _cpu(pid: int) -> tuple[int, str]:
    """Of proc(5)'s stat: clock ticks in user and kernel mode, and the state; (-1, "X") where it is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1, "X"
    return int(words[11]) + int(words[12]), words[0]


def last_lines(path: Path) -> str:
    """The end of a log, on one line."""
    lines = path.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-LAST_LINES:]) if lines else "it said nothing"
