"""A probe of an installed package, in a process of its own: it is somebody else's code.

It may hold its interpreter for ever, print without end, break, or start what never ends: nothing of that
reaches the daemon. What runs there is `installed_main`.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence

import msgspec

from ckptless.daemon.ckptlessd.health import installed_main
from ckptless.daemon.ckptlessd.health.answers import ProbeError
from ckptless.daemon.ckptlessd.health.installed_main import ASK, END, START_S, Answer
from ckptless.daemon.ckptlessd.health.probe import Finding
from ckptless.daemon.ckptlessd.health.process import Process

# After its deadline it counts as hung; so much later it is ended.
GRACE_S = 1.0
# Whoever is to end, by itself or by SIGKILL, has so long.
END_S = 1.0
MOST_NBYTES = 4 << 20
_CHUNK_NBYTES = 1 << 16


class InstalledProbe:
    """See `probe.Probe`. `value`: what its entry point names. Its process lives from look to look."""

    def __init__(self, value: str) -> None:
        self._value = value
        self.interval_s = self.deadline_s = START_S
        self._process: Process | None = None
        self._link: socket.socket | None = None

    def missing(self) -> str:
        """See `probe.Probe`. Raises ProbeError."""
        return self._start().missing

    def look(self) -> Sequence[Finding]:
        """See `probe.Probe`. Raises ProbeError."""
        # It was ended in the last look, or has ended by itself.
        if self._link is None and (missing := self._start().missing):
            raise ProbeError(missing)
        assert self._link is not None
        with contextlib.suppress(OSError):  # it has ended: what comes next says how
            self._link.send(ASK)
        return [Finding(code=code, where=where, evidence=text) for code, where, text in self._answer().found]

    def close(self) -> None:
        """See `probe.Probe`."""
        if self._link is not None:
            assert self._process is not None
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_WR)
            self._process.wait(time.monotonic() + END_S)
        self._end()

    def _start(self) -> Answer:
        """Start its process, and return what it says first. Raises ProbeError."""
        self._end()
        if self._process is not None:
            raise ProbeError("its process does not end, not even by SIGKILL")
        link, theirs = socket.socketpair()
        try:
            argv = (sys.executable, "-m", installed_main.__name__, self._value, str(theirs.fileno()))
            # Where it prints to, nobody reads.
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._process = Process(argv, out=nowhere, pass_fds=(theirs.fileno(),))
            finally:
                os.close(nowhere)
        except OSError as error:
            link.close()
            raise ProbeError(f"its process cannot be started: {error.strerror}") from None
        finally:
            theirs.close()
        self._link = link
        link.setblocking(False)
        self.deadline_s = START_S
        answer = self._answer()
        if answer.deadline_s:
            self.interval_s, self.deadline_s = answer.interval_s, answer.deadline_s
        return answer

    def _answer(self) -> Answer:
        """Return what it says next. Raises ProbeError for its error, and ends it where it says nothing."""
        said, trouble = self._said(time.monotonic() + self.deadline_s + GRACE_S)
        if trouble:
            self._end()
            raise ProbeError(trouble)
        try:
            answer = msgspec.json.decode(said, type=Answer)
        except msgspec.DecodeError as error:
            self._end()
            raise ProbeError(f"it says something else than what it has found: {error}") from None
        if answer.error:
            raise ProbeError(answer.error)
        return answer

    def _said(self, until_s: float) -> tuple[bytes, str]:
        """Return a line of its words, and why there is none."""
        assert self._link is not None
        assert self._process is not None
        said = b""
        while True:
            code = self._process.wait(until_s, self._link.fileno())
            try:
                # no deadline: the socket does not block
                more = self._link.recv(_CHUNK_NBYTES)
            except BlockingIOError:
                more = None
            except OSError:
                more = b""
            said += more or b""
            if said.endswith(END):
                return said, ""
            if more == b"" or (code is not None and not more):
                return b"", self._gone()
            if len(said) > MOST_NBYTES:
                return b"", "it has found more than can be told"
            if time.monotonic() >= until_s:
                return b"", f"it has not answered in {self.deadline_s:g} s, and is ended"

    def _gone(self) -> str:
        """Return in words why nothing more comes."""
        assert self._process is not None
        code = self._process.wait(time.monotonic() + END_S)
        if code is None:
            return "its process has closed the connection"
        return f"its process has ended, {f'signal {-code}' if code < 0 else f'exit code {code}'}"

    def _end(self) -> None:
        """End it, and what it has started; one that the kernel does not let end is kept."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            self._process.kill()
            if self._process.wait(time.monotonic() + END_S) is not None:
                self._process.close()
                self._process = None
