"""The output of ranks: every byte to a log file each, and whole lines, with a prefix, to the agent's console.

The log is the record: nothing that a rank wrote is left out of it, also if the rank was killed. The console
is for people: when nobody reads it (a stopped pager, a stalled srun) it loses lines, and says so, rather
than stop the agent, whose loop answers for the node.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

READ_BYTES = 64 * 1024
MAX_LINE_BYTES = 64 * 1024
CONSOLE_BACKLOG_BYTES = 4 * 1024 * 1024

OnEvent: TypeAlias = Callable[[str, str], None]


def rank_log_path(directory: Path, rank: int) -> Path:
    """Return where `rank`'s output goes: a name that sorts by rank."""
    return directory / f"rank-{rank:05d}.log"


def error_path(directory: Path, rank: int) -> Path:
    """Return where torch's `@record` writes what `rank` has raised."""
    return directory / f"rank-{rank:05d}.error.json"


class ConsoleOutput:
    """The agent's own standard output, shared by its ranks; writing to it never blocks.

    `fd` stays the caller's. When the other side is gone, `on_event("console-lost", text)` is called once and
    what follows is dropped.
    """

    def __init__(self, fd: int, on_event: OnEvent, backlog_bytes: int = CONSOLE_BACKLOG_BYTES) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._backlog_bytes = backlog_bytes
        self._fd = _own_nonblocking(fd)
        self._is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
        self._backlog = bytearray()
        self._left_out = 0
        self._lost = False
        self._empty = asyncio.Event()
        self._empty.set()

    def write(self, lines: bytes) -> None:
        """Write whole lines: now, when there is room, or never if too much waits already."""
        if self._lost:
            return
        if len(self._backlog) + len(lines) > self._backlog_bytes:
            self._left_out += lines.count(b"\n")
            return
        self._backlog += lines
        if self._empty.is_set():
            self._pump()

    async def flush(self, deadline_s: float) -> bool:
        """Wait until everything is written, at most `deadline_s`; says whether it is."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop writing; what still waits is dropped."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._lost = True
        self._backlog.clear()
        self._empty.set()

    def _pump(self) -> None:
        try:
            while self._backlog or self._left_out:
                if not self._backlog:
                    self._backlog += _left_out_notice(self._left_out)
                    self._left_out = 0
                written = self._send(bytes(self._backlog[:READ_BYTES]))
                del self._backlog[:written]
        except BlockingIOError:
            if self._empty.is_set():
                self._empty.clear()
                self._loop.add_writer(self._fd, self._pump)
            return
        except OSError as error:
            self._on_event("console-lost", f"the console takes no more output: {error}; the log files do")
            self.close()
        if not self._empty.is_set():
            self._loop.remove_writer(self._fd)
            self._empty.set()

    def _send(self, data: bytes) -> int:
        if not self._is_socket:
            return os.write(self._fd, data)
        with socket.socket(fileno=self._fd) as connection:
            try:
                return connection.send(data, socket.MSG_DONTWAIT)
            finally:
                connection.detach()


def _left_out_notice(lines: int) -> bytes:
    return f"[ckptless] {lines} lines left out here, as nobody read them; the log files have them\n".encode()


def _own_nonblocking(fd: int) -> int:
    """Return a descriptor for what `fd` is open on that does not block, without changing `fd` for others.

    O_NONBLOCK belongs to the open file, which the agent shares with its parent's shell and with the zygote:
    setting it on `fd` would break their writes. So the file is opened anew.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        # Refused when it is another user's (after su): then it may block, but it works. Or its reader is gone
        # already, and the first write will say so.
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    # A file never blocks for long, and opened anew it would be overwritten from its beginning.
    return os.dup(fd)


class RankOutput:
    """Copies one process's pipe to its log file, and by lines to the console if given, until the pipe's end.

    Takes over `pipe`, a read end. Raises OSError where the first log cannot be opened; of one that cannot be
    written, or of a later one that cannot be opened, `on_event("log-failed", text)` hears once: the rank goes
    on.
    """

    def __init__(
        self, pipe: int, log: Path, prefix: str, console: ConsoleOutput | None, on_event: OnEvent
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pipe = pipe
        self._on_event = on_event
        self._partial = bytearray()
        self._ended = asyncio.Event()
        self._log, self._log_path = -1, log
        self.redirect(log, prefix, console)
        os.set_blocking(pipe, False)
        self._loop.add_reader(pipe, self._on_readable)

    def redirect(self, log: Path, prefix: str, console: ConsoleOutput | None) -> None:
        """Send what comes from now on elsewhere (a spare has got a rank); nothing once the pipe has ended."""
        if self._ended.is_set():
            return
        self._prefix, self._console = prefix.encode(), console
        try:
            fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if self._log < 0:
                raise
            # A recovery is not given up for a log.
            self._on_event("log-failed", f"{log}: {error}; the output goes on into {self._log_path}")
            return
        if self._log >= 0:
            os.close(self._log)
        self._log, self._log_path, self._log_failed = fd, log, False

    def add(self, data: bytes) -> None:
        """Write what the process has said elsewhere to its log."""
        if data and not self._ended.is_set():
            self._write_log(data)

    async def finish(self, deadline_s: float) -> None:
        """Copy what a dead process has left and stop. Call it after the death.

        Waits for the pipe's end, which someone the process left behind may hold off; after `deadline_s`
        what the pipe holds then, hence all that the process itself wrote, is copied and the pipe closed.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._ended.wait()
        except TimeoutError:
            # Bounded: whoever holds the pipe may go on writing.
            left = fcntl.fcntl(self._pipe, fcntl.F_GETPIPE_SZ)
            while left > 0 and not self._ended.is_set():
                copied = self._copy(left)
                if copied == 0:
                    break
                left -= copied
            self.close()

    def close(self) -> None:
        """Stop at once, writing out a line that is not finished."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._loop.remove_reader(self._pipe)
        if self._partial:
            self._print([bytes(self._partial)])
            self._partial.clear()
        os.close(self._pipe)
        os.close(self._log)

    def _on_readable(self) -> None:
        self._copy(READ_BYTES)

    def _copy(self, limit: int) -> int:
        """Copy up to `limit` bytes and say how many there were; closes at the pipe's end."""
        try:
            data = os.read(self._pipe, limit)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        self._write_log(data)
        self._partial += data
        *lines, rest = bytes(self._partial).split(b"\n")
        whole = len(rest) - len(rest) % MAX_LINE_BYTES
        if whole:
            lines.append(rest[:whole])
        self._partial = bytearray(rest[whole:])
        self._print(lines)
        return len(data)

    def _write_log(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._log, view) :]
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                self._on_event("log-failed", f"{self._log_path}: {error}; output is being lost")

    def _print(self, lines: list[bytes]) -> None:
        if self._console is None:
            return
        for line in lines:
            # An endless line is cut, not kept: it would grow the agent.
            for start in range(0, max(len(line), 1), MAX_LINE_BYTES):
                self._console.write(self._prefix + line[start : start + MAX_LINE_BYTES] + b"\n")
