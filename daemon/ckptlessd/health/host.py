"""Probes of the host itself: its disks, its memory, its clock and its processors."""

import ctypes
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ckptless.daemon.ckptlessd.health.probe import Finding, Probe

_MIB = 1 << 20
# Less room than this is none: a log, a core and a ledger need some.
LEAST_FREE_NBYTES = 100 * _MIB
LEAST_FREE_SHARE = 0.01
# So much of a minute in which nothing could go on, as every process waited for memory.
MOST_PRESSURE_PERCENT = 20.0
# adjtimex(2).
_STA_UNSYNC = 0x0040


class DiskProbe(Probe):
    """Looks for room, and for file systems that the kernel has made read-only, as it does after errors.

    `paths` are folders that need room; a disk that was read-only from the beginning is meant to be.
    """

    interval_s = 60.0
    deadline_s = 10.0

    def __init__(self, paths: Sequence[Path], proc: Path = Path("/proc")) -> None:
        self._paths, self._proc = tuple(paths), proc
        self._written: set[tuple[str, str]] = set()

    def look(self) -> list[Finding]:
        """See `probe.Probe`. Raises OSError."""
        full = [Finding(code="disk-full", where=str(p), evidence=w) for p in self._paths if (w := no_room(p))]
        # By place and device: another disk at the same place is read-only from its beginning. What FUSE gives
        # as its device is its user's choice.
        mounts = {
            (one.place, one.source): one.options
            for one in mounts_of(self._proc)
            if one.source.startswith("/") and one.kind.partition(".")[0] != "fuse"
        }
        self._written |= {disk for disk, options in mounts.items() if "rw" in options}
        return full + [
            Finding(code="disk-read-only", where=disk[0], evidence=",".join(options))
            for disk, options in mounts.items()
            if disk in self._written and "ro" in options
        ]


class Mount(NamedTuple):
    """One line of mountinfo; `options` are those of the file system itself, not of this mount of it."""

    place: str
    kind: str
    source: str
    options: list[str]


def mounts_of(proc: Path) -> list[Mount]:
    """Return all mounts, by proc_pid_mountinfo(5). This asks no file system anything. Raises OSError."""
    found: list[Mount] = []
    # A place is its user's choice, where FUSE is: only "\n" ends a line.
    for line in os.fsdecode((proc / "self/mountinfo").read_bytes()).split("\n"):
        mount, _, system = line.partition(" - ")
        if system:
            kind, source, options = system.split(" ", 2)
            found.append(Mount(_unescaped(mount.split(" ")[4]), kind, source, options.split(",")))
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def no_room(path: Path) -> str:
    """Return how little room there is, in words; "" where there is enough, or no such folder."""
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return ""
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if total and free < min(LEAST_FREE_NBYTES, total * LEAST_FREE_SHARE):
        return f"{free / _MIB:.0f} MiB of {total / _MIB:.0f} MiB are free"
    if found.f_files and not found.f_favail:
        return f"none of {found.f_files} inodes is free"
    return ""


class HostProbe(Probe):
    """Looks at the pressure on memory, the clock, and whether processors were too hot."""

    interval_s = 60.0
    deadline_s = 10.0

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._pressure = proc / "pressure/memory"
        self._cpus = sys / "devices/system/cpu"
        self._throttled: dict[str, int] | None = None

    def look(self) -> list[Finding]:
        """See `probe.Probe`. Raises OSError."""
        return [*self._memory(), *_clock(), *self._heat()]

    def _memory(self) -> list[Finding]:
        try:
            text = self._pressure.read_text()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EOPNOTSUPP):
                return []  # a kernel without CONFIG_PSI, or that was booted with psi=0
            raise
        found = re.search(r"^full .*\bavg60=(\d+\.\d+)", text, re.MULTILINE)
        if found is None or float(found[1]) < MOST_PRESSURE_PERCENT:
            return []
        words = f"all processes waited for memory in {found[1]} % of the last minute"
        return [Finding(code="memory-pressure", evidence=words)]

    def _heat(self) -> list[Finding]:
        """Find packages of processors that were throttled since the last look, by their own count."""
        now: dict[str, int] = {}
        for path in self._cpus.glob("cpu[0-9]*/thermal_throttle/package_throttle_count"):
            package = (path.parents[1] / "topology/physical_package_id").read_text().strip()
            # Each processor counts for itself.
            now[package] = max(int(path.read_text()), now.get(package, 0))
        before, self._throttled = self._throttled, now
        return [
            Finding(
                code="cpu-throttled", where=f"package {package}", evidence=f"{count} times since the boot"
            )
            for package, count in now.items()
            if before is not None and count > before.get(package, count)
        ]


def _clock() -> list[Finding]:
    """Ask the kernel whether somebody (chronyd, ntpd) holds its clock. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    # struct timex has 208 bytes; `modes` 0, its first field, changes nothing; `status` is the sixth word.
    buffer = ctypes.create_string_buffer(256)
    if libc.adjtimex(buffer) < 0:
        if ctypes.get_errno() == errno.EPERM:
            return []  # a unit or a container that lets nobody ask
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    status = ctypes.c_int.from_buffer(buffer, 40).value
    if not status & _STA_UNSYNC:
        return []
    return [Finding(code="clock", evidence=f"adjtimex says that nobody holds it (status {status:#06x})")]
