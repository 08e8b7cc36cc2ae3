"""The stacks of a process that does not get on: the interpreter's, the native ones, and the kernel's view.

The interpreter's are faulthandler's, which a signal has the process itself write, whatever holds its
interpreter. The native ones, of all threads, are py-spy's where it is installed; of a process that is
stopped it has the interpreter's, which that cannot write itself.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ckptless.daemon.protocol import messages as m

# What writing its stacks may take a process that has no processor for it; else it takes 0.05 s.
WRITTEN_S, PAUSE_S = 1.0, 0.02
# What py-spy may take (0.2 s for a process with torch in it), and how much of that a process's end waits for
# while the other ranks leave the generation.
NATIVE_S, HELD_S = 1.0, 0.5
# From SIGKILL to its end.
END_S = 1.0
MOST_NBYTES, MOST_THREADS = 1 << 18, 64
PROGRAM = "py-spy"
_WRITTEN = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# How the last of what is written ends: where the main thread began, or faulthandler has written enough of it.
# A pause alone is no end: on a busy machine its process waits for a processor in the middle.
_END = re.compile(r"(?: in (?:<module>|_run_module_as_main)|\n  \.\.\.)\n$")
_SPIED = re.compile(r"^    (.*) \((.*):(\d+)\)$")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Frame(NamedTuple):
    """One call in a stack of the interpreter's."""

    path: str
    line: int
    function: str


class Written(Protocol):
    """Where a process writes its stacks to: its page, see `standing.Page`."""

    closed: bool

    def new_stacks(self) -> str:
        """Return what it has written since the last time."""
        ...


def main_thread(stacks: str) -> tuple[Frame, ...]:
    """Return the main thread's calls, the innermost first, as faulthandler or py-spy has written them."""
    _, written, last = stacks.rpartition("(most recent call first):")
    if written:
        # The main thread is the last.
        found = [_WRITTEN.match(line) for line in last.splitlines()]
        return tuple(Frame(one[1], int(one[2]), one[3]) for one in found if one is not None)
    # With py-spy it is the first.
    first = stacks.partition("\nThread ")[2].partition("\nThread ")[0]
    spied = [_SPIED.match(line) for line in first.splitlines()]
    return tuple(Frame(one[2], int(one[3]), one[1]) for one in spied if one is not None)


def spot(stack: Sequence[Frame]) -> tuple[object, ...]:
    """Return what stays the same as long as the innermost call does not return: its line does not count."""
    return (*((frame.path, frame.function) for frame in stack[:1]), *stack[1:])


def place(stack: Sequence[Frame]) -> str:
    """Return where a stack is in code that is nobody's library."""
    own = [frame for frame in stack if not frame.path.startswith(_LIBRARIES)]
    if not stack:
        return ""
    path, line, function = (own or stack)[0]
    return f"{function} ({Path(path).name}, line {line})"


async def written_by(page: Written, kill: Callable[[int], None]) -> str:
    """Ask a process that is not stopped for the stacks of its threads; "" where it writes none."""
    kill(m.STACKS_SIGNAL)
    stacks, deadline = "", time.monotonic() + WRITTEN_S
    while time.monotonic() < deadline:
        await asyncio.sleep(PAUSE_S)
        if page.closed:
            break
        more = page.new_stacks()
        if not more and _END.search(stacks):
            break
        stacks += more
    return stacks


async def native(pid: int, kill: Callable[[int], None], *, stopped: bool) -> str:
    """Return the native stacks of all threads, or why there are none, in one line; in NATIVE_S and END_S.

    Of one that is `stopped` they are the interpreter's.
    """
    # Beside the interpreter, too: a virtual environment's folder need not be on the PATH.
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=str(Path(sys.executable).parent))
    if program is None:
        return f"{PROGRAM} is not installed here (pip install 'ckptless[stacks]')"
    # Whoever is stopped cannot be attached to.
    how = "--nonblocking" if stopped else "--native"
    argv = (program, "dump", how, "--full-filenames", "--pid", str(pid))
    try:
        # In the agent's session: what is in none of ours is reaped as a rank's orphan.
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        return f"{PROGRAM} cannot be started: {error}"
    assert process.stdout is not None
    said, late = b"", False
    try:
        async with asyncio.timeout(NATIVE_S):
            while len(said) < MOST_NBYTES and (more := await process.stdout.read(1 << 16)):
                said += more
            await process.wait()
    except TimeoutError:
        late = True
    finally:
        if process.returncode is None:
            await asyncio.shield(_end(process, kill, stopped=stopped))
    text = said[:MOST_NBYTES].decode(errors="replace").strip()
    if late:
        return f"{PROGRAM} has not ended in {NATIVE_S:g} s"
    if process.returncode != 0:
        # What follows is where in py-spy that was.
        return f"{PROGRAM} cannot: {' '.join(text.partition('Stack backtrace')[0].split())[:300]}"
    return text


async def _end(process: asyncio.subprocess.Process, kill: Callable[[int], None], *, stopped: bool) -> None:
    """End py-spy, and let go on what it may have stopped."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
    if not stopped:
        kill(signal.SIGCONT)


def kernels_view(pid: int, proc: Path = Path("/proc")) -> str:
    """Return what the kernel says each thread of a process is at, a line each, and its stack there if we may.

    Of what may not be read the line has "?".
    """
    try:
        tasks = sorted((proc / str(pid) / "task").iterdir(), key=lambda task: int(task.name))
    except OSError as error:
        return f"nothing could be read: {error}"
    lines = [line for task in tasks[:MOST_THREADS] for line in _thread(task)]
    if len(tasks) > MOST_THREADS:
        lines.append(f"and {len(tasks) - MOST_THREADS} threads more")
    return "\n".join(lines)


def _thread(task: Path) -> Iterator[str]:
    state = next((line for line in _read(task / "status").splitlines() if line.startswith("State:")), "?")
    state = state.removeprefix("State:").strip()
    # Where it runs the kernel has "0" and "running" for these.
    where = {"": "?", "0": "no wait"}.get(found := _read(task / "wchan"), found)
    call = _read(task / "syscall").partition(" ")[0] or "?"
    yield f"thread {task.name} ({_read(task / 'comm') or '?'}): {state}, in {where}, system call {call}"
    yield from (f"  {line}" for line in _read(task / "stack").splitlines())


def _read(path: Path) -> str:
    """Return a small file; "" where it may not be read: some are root's, and a thread may have ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 14).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)
