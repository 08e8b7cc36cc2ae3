"""One run of one of Slurm's commands: clean environment, deadline, bounded output, no shell.

Whatever happens (deadline, cancellation, too much output), the process has ended when `run` returns or
raises.
"""

import asyncio
import contextlib
import logging
import os
import pwd
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.slurm.errors import SlurmRefusedError, SlurmUnreachableError

_log = logging.getLogger(__name__)

MAX_OUTPUT = 128 * 1024 * 1024
MAX_ERRORS = 64 * 1024
KILL_DEADLINE_S = 5.0

# All that a command gets of our own environment. No SLURM_*, SQUEUE_*, SALLOC_*, SCONTROL_*: they are
# options.
_PASSED_ON = ("PATH", "SLURM_CONF")


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a command, and what it said."""

    status: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a command runs as, if not as ourselves."""

    uid: int
    gid: int
    groups: tuple[int, ...]

    @classmethod
    def of(cls, uid: int) -> "Account | None":
        """The account of `uid`; None if that is ourselves. SlurmRefusedError if we cannot become it."""
        if uid == os.geteuid():
            return None
        if os.geteuid() != 0:
            raise SlurmRefusedError(
                f"this takes root or the job's own user (uid {uid}); the daemon runs as uid {os.geteuid()}"
            )
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            raise SlurmRefusedError(f"there is no account with uid {uid} on this machine") from None
        return cls(uid, entry.pw_gid, tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command: English, UTC, the site's slurm.conf, and `more`."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {"PATH": os.defpath, **kept, "LC_ALL": "C", "TZ": "UTC", **more}


def find(command: str, folder: Path | None) -> str:
    """The path of one of Slurm's commands, in `folder` or else on our PATH; SlurmUnreachableError if none."""
    found = shutil.which(command, path=None if folder is None else str(folder))
    if found is None:
        where = f"in {folder}" if folder is not None else "on the daemon's PATH"
        raise SlurmUnreachableError(
            f"Slurm's command {command} is not {where}: install Slurm's client commands"
        )
    return found


async def run(
    argv: Sequence[str],
    *,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
    account: Account | None = None,
    grace_s: float = 0.0,
) -> Done:
    """Run `argv` (its first is a path) and return how it ended, within `deadline_s` seconds from now.

    One that is not done by then gets SIGTERM and `grace_s` seconds, then SIGKILL: SlurmUnreachableError.
    Raises ProtocolError if it prints more than MAX_OUTPUT.
    """
    name = Path(argv[0]).name
    identity = {"user": account.uid, "group": account.gid, "extra_groups": account.groups} if account else {}
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(env or {}),
            cwd="/",
            start_new_session=True,
            **identity,  # type: ignore[arg-type]
        )
    except OSError as error:
        raise SlurmUnreachableError(f"{name} could not be started: {error}") from error
    try:
        async with asyncio.timeout(max(deadline_s, 0.0)):
            return await _finish(process, name)
    except TimeoutError:
        raise SlurmUnreachableError(f"Slurm did not answer {name} within {deadline_s:.3g} s") from None
    finally:
        if process.returncode is None:
            await asyncio.shield(end(process, grace_s))


async def _finish(process: asyncio.subprocess.Process, name: str) -> Done:
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(_read(process.stderr, MAX_ERRORS, throw_away=True))
    try:
        out = await _read(process.stdout, MAX_OUTPUT)
        if len(out) > MAX_OUTPUT:
            raise ProtocolError(f"{name} printed more than {MAX_OUTPUT} bytes")
        # no deadline: that of `run`, around all of it
        err = await errors
    finally:
        if not errors.done():
            errors.cancel()
            await asyncio.wait({errors})
    # no deadline: that of `run`, around all of it
    status = await process.wait()
    return Done(status, out.decode(errors="replace"), err.decode(errors="replace"))


async def _read(stream: asyncio.StreamReader, most: int, *, throw_away: bool = False) -> bytes:
    """All of a stream. What is beyond `most` bytes, and a little, is thrown away, or not even read."""
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(1 << 16):
        if size <= most:
            parts.append(part)
            size += len(part)
        elif not throw_away:
            break
    return b"".join(parts)


async def end(process: asyncio.subprocess.Process, grace_s: float = 0.0) -> None:
    """End a process that leads a process group, and the group with it; SIGTERM and `grace_s` seconds first.

    A process that even SIGKILL does not end (it waits for a dead file server) is given up, and logged.
    """
    if process.returncode is None and grace_s > 0 and _signal_group(process.pid, signal.SIGTERM):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await _gone(process)
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(KILL_DEADLINE_S):
            await _gone(process)
    except TimeoutError:
        _log.error("process %d does not end within %.0f s of SIGKILL", process.pid, KILL_DEADLINE_S)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait until the process has ended. asyncio takes note of that only once its pipes are read empty."""
    for stream in (process.stdout, process.stderr):
        while stream is not None and await stream.read(1 << 20):
            pass
    # no deadline: that of `run`, around all of it
    await process.wait()


def _signal_group(pid: int, number: signal.Signals) -> bool:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True
