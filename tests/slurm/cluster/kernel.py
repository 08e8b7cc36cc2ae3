"""Linux system calls that Python 3.11 has no function for, and the identity of a process."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000

READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones; for PID, the next child is the first in it."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def set_hostname(name: str) -> None:
    """Name this UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def mount(kind: str, target: Path, flags: int = 0, options: str = "") -> None:
    """Mount a file system that has no device, such as tmpfs or proc."""
    _mount(kind, target, kind, flags, options)


def bind(source: Path, target: Path, *, writable: bool = True) -> None:
    """Make `source`, and all that is mounted below it, visible at `target`."""
    _mount(str(source), target, None, _BIND | _RECURSIVE, "")
    if not writable:
        _mount(None, target, None, _BIND | REMOUNT | READ_ONLY, "")


def keep_mounts_private() -> None:
    """From here on nothing that is mounted in this namespace shows in another."""
    _mount(None, Path("/"), None, _RECURSIVE | _PRIVATE, "")


def pivot(root: Path) -> None:
    """Make `root`, a mount point, the root of this mount namespace; nothing of the old one is left in it."""
    os.chdir(root)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: its number on {platform.machine()} is not known here")
    # The documented trick: the old root is stacked on the new one, and then detached.
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), f"pivot_root {root}")
    _check(_libc.umount2(b".", ctypes.c_int(_DETACH)), "umount the old root")
    os.chdir("/")


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: str) -> None:
    result = _libc.mount(
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(result, f"mount {source or kind or ''} on {target}")


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks: with its pid its identity. None: gone, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    words = stat[stat.rindex(")") + 2 :].split()
    return None if words[0] in "ZX" else int(words[19])
