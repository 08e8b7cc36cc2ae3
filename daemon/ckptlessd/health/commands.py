"""Probes that run a command: one of the site's own, and one that asks a mounted file system."""

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from ckptless.daemon.ckptlessd.health.host import mounts_of
from ckptless.daemon.ckptlessd.health.probe import Finding
from ckptless.daemon.ckptlessd.health.process import Process

# Of what a command prints; it is ended where it prints more.
MOST_NBYTES = 1 << 20
# Of its last line.
SHOWN = 200
_TAIL_NBYTES = 4096
# SIGKILL takes so long at most, but where the kernel waits for something.
_KILL_S = 2.0


class _Running:
    """One command, and what it prints."""

    def __init__(self, argv: Sequence[str]) -> None:
        # A pipe, not a file with RLIMIT_FSIZE: that would end one that writes to a long log of its own.
        self._out, written = os.pipe()
        os.set_blocking(self._out, False)
        self._open, self._nbytes, self._tail = True, 0, b""
        try:
            self._process = Process(argv, out=written)
        except BaseException:
            os.close(self._out)
            raise
        finally:
            os.close(written)

    def wait(self, until_s: float) -> int | None:
        """Return its exit code, negative for a signal; None: it goes on at `until_s` (monotonic)."""
        while True:
            code = self._process.wait(until_s, self._out if self._open else None)
            self._take()
            if code is not None or time.monotonic() >= until_s:
                return code

    def end(self) -> bool:
        """End it, and what it has started; False where the kernel does not let it."""
        self._process.kill()
        return self.wait(time.monotonic() + _KILL_S) is not None

    def last_line(self) -> str:
        """Return the last line that it has printed, shortened."""
        lines = self._tail.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return "".join(letter if letter.isprintable() else " " for letter in last)[:SHOWN]

    def close(self) -> None:
        """Give its output back."""
        os.close(self._out)
        self._process.close()

    def _take(self) -> None:
        """Read what there is, and end it where that is too much."""
        while self._open and self._nbytes <= MOST_NBYTES:
            try:
                chunk = os.read(self._out, 1 << 16)
            except BlockingIOError:
                return
            self._open = bool(chunk)
            self._nbytes += len(chunk)
            self._tail = (self._tail + chunk)[-_TAIL_NBYTES:]
        if self._open:
            self._open = False
            self._process.kill()


class CommandProbe:
    """Runs a command of the site's: exit code 0 is well, its last line says what is not."""

    interval_s = 60.0
    deadline_s = 45.0
    # Before the deadline, so that the finding is the command's own.
    LIMIT_S = 30.0

    def __init__(self, line: str) -> None:
        self._argv = tuple(shlex.split(line))
        self._left: _Running | None = None

    def missing(self) -> str:
        """See `probe.Probe`."""
        return "" if Path(self._argv[0]).exists() else f"there is no {self._argv[0]}"

    def look(self) -> list[Finding]:
        """See `probe.Probe`. Raises OSError where it cannot be started."""
        if self._left is not None:
            if self._left.wait(time.monotonic()) is None:
                return [self._found("it does not end, not even by SIGKILL")]
            self._left.close()
            self._left = None
        running = _Running(self._argv)
        code = running.wait(time.monotonic() + self.LIMIT_S)
        words = running.last_line()
        if code is None:
            if running.end():
                running.close()
            else:
                self._left = running
            return [self._found(f"it does not end in {self.LIMIT_S:.0f} s: {words}")]
        running.close()
        if code == 0:
            return []
        by = f"signal {-code}" if code < 0 else f"exit code {code}"
        return [self._found(f"{by}: {words or 'it says nothing'}")]

    def _found(self, words: str) -> Finding:
        return Finding(code="command-failed", where=self._argv[0], evidence=words)

    def close(self) -> None:
        """See `probe.Probe`."""
        if self._left is not None:
            self._left.end()
            self._left.close()
            self._left = None


class MountProbe:
    """Asks mounted file systems, by `stat -f`, which is a process of its own: only that hangs with one."""

    interval_s = 30.0
    deadline_s = 20.0
    LIMIT_S = 10.0

    def __init__(self, places: Sequence[str], proc: Path = Path("/proc")) -> None:
        self._places, self._proc = tuple(places), proc
        self._mounted: set[str] = set()
        self._asked: dict[str, _Running] = {}

    def missing(self) -> str:
        """See `probe.Probe`."""
        return "" if self._places else "health.mounts names none"

    def look(self) -> list[Finding]:
        """See `probe.Probe`. Raises OSError."""
        mounted = {one.place for one in mounts_of(self._proc)}
        gone = [place for place in self._places if place in self._mounted - mounted]
        self._mounted |= mounted
        for place in self._places:
            if place not in self._asked:
                self._asked[place] = _Running(("stat", "-f", "--", place))
        until_s = time.monotonic() + self.LIMIT_S
        found = [Finding(code="mount-gone", where=place, evidence="it is not in mountinfo") for place in gone]
        for place, running in [*self._asked.items()]:
            code = running.wait(until_s)
            if code is None:
                # The same one is waited for in the next look: a server that is back answers it.
                words = f"stat -f has no answer in {self.LIMIT_S:.0f} s"
                found.append(Finding(code="mount-silent", where=place, evidence=words))
                continue
            if code != 0:
                found.append(Finding(code="mount-silent", where=place, evidence=running.last_line()))
            del self._asked[place]
            running.close()
        return found

    def close(self) -> None:
        """See `probe.Probe`."""
        for running in self._asked.values():
            running.end()
            running.close()
        self._asked.clear()
