"""One run of one of Slurm's commands: clean environment, deadline, bounded output, no shell.

Whatever happens (deadline, cancellation, too much output), the process has ended when `run` returns or
raises.
"""

import asyncio
import contextlib
import os
import pwd
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.slurm.errors import SlurmRefusedError, SlurmUnreachableError

MAX_OUTPUT = 128 * 1024 * 1024
MAX_ERRORS = 64 * 1024
KILL_DEADLINE_S = 5.0

# All that a command gets of our own environment. No SLURM_*, SQUEUE_*, SALLOC_*, SCONTROL_*: they are
# options.
_PASSED_ON = ("PATH", "SLURM_CONF")


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a command runs as, if not as ourselves."""

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
    """What a command runs in: English, UTC, the site's slurm.conf, and `more`."""
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
            await asyncio.shield(_end(process, grace_s))


async def _finish(process: asyncio.subprocess.Process, name: str) -> Done:
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = await asyncio.gather(_read(process.stdout, MAX_OUTPUT), _read(process.stderr, MAX_ERRORS))
    if len(out) > MAX_OUTPUT:
        raise ProtocolError(f"{name} printed more than {MAX_OUTPUT} bytes")
    status = await process.wait()
    return Done(status, out.decode(errors="replace"), err.decode(errors="replace"))


async def _read(stream: asyncio.StreamReader, most: int) -> bytes:
    """All of a stream. Beyond `most` bytes: a little more of the output, and no more of the errors."""
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(1 << 16):
        if size <= most:
            parts.append(part)
            size += len(part)
        elif most == MAX_OUTPUT:
            break
    return b"".join(parts)


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """End a process that still runs, and take its status."""
    with contextlib.suppress(ProcessLookupError):
        if grace_s > 0:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
                    return
        process.kill()
    async with asyncio.timeout(KILL_DEADLINE_S):
        await process.wait()
