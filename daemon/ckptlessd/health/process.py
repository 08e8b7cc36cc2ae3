"""A process that a probe starts, in a session of its own: it ends with whatever it has started there."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence


class Process:
    """Belongs to one thread at a time. One that waits in the kernel outlives even SIGKILL."""

    def __init__(self, argv: Sequence[str], *, out: int, pass_fds: Sequence[int] = ()) -> None:
        """Start it; what it prints goes to `out`. Raises OSError."""
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            pass_fds=pass_fds,
        )
        try:
            self._ended = os.pidfd_open(self._process.pid)
        except OSError:
            self.kill()
            self._process.wait()  # no deadline: it has just begun
            raise

    def wait(self, until_s: float, out: int | None = None) -> int | None:
        """Return its exit code, negative for a signal; None: it goes on at `until_s` (monotonic).

        Returns None, too, as soon as there is something to read in `out`. Once it has ended, what it has left
        behind in its session is killed: its number is its own for as long as nobody has asked for its code.
        """
        poll = select.poll()
        for fd in (self._ended,) if out is None else (self._ended, out):
            poll.register(fd, select.POLLIN)
        if self._process.returncode is None:
            ready = {fd for fd, _ in poll.poll(max(0.0, until_s - time.monotonic()) * 1000)}
            if self._ended not in ready:
                return None
            self.kill()
        # no deadline: it has ended
        return self._process.wait()

    def kill(self) -> None:
        """Kill it, and what it has started; nothing, where `wait` has returned its exit code."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it, once it has ended."""
        os.close(self._ended)
