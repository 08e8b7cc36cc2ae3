"""The probe of the kernel's log: what the kernel says of GPUs, processors, memory, disks and links."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptless.daemon.ckptlessd.health.probe import Finding

KMSG = Path("/dev/kmsg")
# The longest record that the kernel gives, see CONSOLE_EXT_LOG_MAX.
_MOST_NBYTES = 8192
# A log that is written faster than it is read ends no look.
MOST_RECORDS = 10_000
# Of a line, as evidence.
_SHOWN = 200

# `6,1234,56789,-;text`: facility * 8 + level, sequence number, microseconds since the boot, flags. Facility
# 0 is the kernel itself; anything else was written by a process.
_RECORD = re.compile(rb"(\d{1,4}),\d+,\d+,[^;]*;([^\n]*)")
# The domain of a device behind a VMD has five digits.
_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}(?:\.[0-9a-f])?)?"
_NET = r"[A-Za-z0-9_.-]{1,15}"
# No drive of the node: a user's image in a loop device, a floppy that is not there, the BMC's virtual media.
_DISK = r"(?!loop\d|fd\d|sr\d)([^),:\s]+)"
_HW = r"\[Hardware Error\]:"

# Code, and a pattern for the beginning of the text; its group is where, else it is about the node. Names of
# processes stand at the beginning of lines, too, and are their users' choice: no pattern is so short that
# one (15 characters, then `[1]: segfault` or ` invoked oom-killer`) could be taken for it.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("nvswitch-fatal", rf"nvidia-nvswitch\d+: SXid \(PCI:({_PCI})\): \d+, Fatal, "),
    ("nvswitch", rf"nvidia-nvswitch\d+: SXid \(PCI:({_PCI})\): \d+, "),
    ("machine-check", rf"mce: {_HW} (CPU \d+): Machine Check Exception: "),
    ("machine-check", rf"(?:\{{\d+\}})?{_HW} +event severity: fatal"),
    # Of anything: what it was, memory or PCIe, the kernel says in lines of its own.
    ("hardware-error", rf"(?:\{{\d+\}})?{_HW} +event severity: recoverable"),
    ("machine-check", rf"{_HW} (?:Uncorrected, software |System Fatal error)"),
    ("machine-check-corrected", rf"(?:\{{\d+\}})?{_HW} +event severity: corrected"),
    ("machine-check-corrected", rf"mce: {_HW} Machine check events logged"),
    ("machine-check-corrected", rf"mce: {_HW} (CPU \d+): Machine Check: "),
    ("machine-check-corrected", rf"{_HW} (?:Corrected|Deferred) error, no action required"),
    ("memory-uncorrected", r"EDAC (MC\d+): \d+ UE .*\bon .* page:0x"),
    ("memory-uncorrected", r"mce: Uncorrected hardware memory error in user-access at "),
    ("memory-uncorrected", r"Memory failure: 0x[0-9a-f]+: recovery action for .*: (?:Failed|Ignored)"),
    ("memory-corrected", r"EDAC (MC\d+): \d+ CE .*\bon .* page:0x"),
    ("pcie-fatal", rf"\S+ ({_PCI}): (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"),
    (
        "pcie-uncorrected",
        rf"\S+ ({_PCI}): (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)",
    ),
    ("nvme", r"nvme (nvme\d+): I/O (?:tag )?\d+ .*timeout(?:, |$)"),
    (
        "nvme",
        r"nvme (nvme\d+): (?:controller is down; |Device not ready; |Removing after probe failure|"
        r"Disabling device after reset failure)",
    ),
    (
        "disk-error",
        r"(?:(?:blk_update_request|print_req_error|end_request): )?"
        r"(?:critical )?(?:device offline|I/O|medium|protection|recoverable transport|target|timeout) "
        # What a drive does not support is no error of its.
        rf"error, dev {_DISK}, (?!.*\((?:DISCARD|SECURE_ERASE|WRITE_ZEROES)\))",
    ),
    ("disk-error", rf"Buffer I/O error on dev(?:ice)? {_DISK}, "),
    ("file-system-error", rf"EXT4-fs error \(device {_DISK}\)(?:: | in )"),
    ("file-system-error", rf"EXT4-fs \({_DISK}\): Remounting filesystem read-only"),
    (
        "file-system-error",
        rf"XFS \({_DISK}\): (?:Corruption|Metadata corruption|Metadata CRC error|"
        r"Filesystem has been shut down|[Ll]og I/O [Ee]rror|[Mm]etadata I/O [Ee]rror|"
        r"I/O Error Detected|Internal error |User initiated shutdown|xfs_do_force_shutdown|"
        r"writeback error on inode )",
    ),
    ("file-system-error", rf"BTRFS:? (?:error|critical) \(device {_DISK}[^)]*\)(?!: open_ctree failed)"),
    ("nfs-silent", r"nfs: server (\S+) not responding"),
    ("task-hung", r"INFO: task .{1,63}:\d+ blocked (?:in I/O wait )?for more than \d+ seconds"),
    ("cpu-stuck", r"(?:(?:NMI )?watchdog: )?BUG: soft lockup - (CPU#\d+) stuck for "),
    ("cpu-stuck", r"(?:NMI )?watchdog: (?:CPU\d+: )?Watchdog detected hard LOCKUP on (cpu \d+)"),
    ("out-of-memory", r"Out of memory(?: \(oom_kill_allocating_task\))?: Kill(?:ed)? process \d+ "),
    ("cgroup-out-of-memory", r"Memory cgroup out of memory: Kill(?:ed)? process \d+ "),
    ("link-flap", rf"\S+ {_PCI} ({_NET}): (?:\w+: \S+ )?(?:NIC )?[Ll]ink (?:is )?[Dd]own"),
    ("link-flap", rf"(?:mlx4_en|e1000e|igb|ixgbe): ({_NET}):? (?:NIC )?Link (?:is )?[Dd]own$"),
    (
        "nic-failed",
        rf"mlx5_core ({_PCI}): (?:\w+:\d+:(?:\(pid \d+\):)? )?"
        r"(?:device's health compromised - reached miss count|Fatal error \d+ detected)",
    ),
    ("nic-stuck", rf"NETDEV WATCHDOG: ({_NET}) \(\S*\): transmit queue \d+ timed out"),
    ("nic-stuck", rf"\S+ \S+ ({_NET}): NETDEV WATCHDOG: CPU: \d+: transmit queue \d+ timed out"),
)
_PATTERNS_READ = tuple((code, re.compile(pattern)) for code, pattern in _PATTERNS)
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?({_PCI})(?: GPU-I:\d+)?\): (\d{{1,4}}), ")
# Xid 154 also tells that nothing is to be done any more.
_RECOVERED = re.compile(r"154, .*GPU recovery action changed from .* to 0x0 \(None\)")
# Most lines of a log are about none of these.
_BEGINS = re.compile(
    r"NVRM|nvidia-nvswitch|mce: |\[Hard|\{|EDAC|Memory |\S+ [0-9a-f]{4,8}:|nvme |blk_|print_req|end_req|I/O|"
    r"critical|medium|target|timeout|device off|protection|recoverable|Buffer|EXT4|XFS|BTRFS|nfs: |INFO: |"
    r"(?:NMI )?watchdog: |BUG: |Out of|mlx|e1000e|igb|ixgbe|NETDEV|\S+ \S+ \S+: NETDEV",
    re.IGNORECASE,
)


def finding(text: str) -> Finding | None:
    """Return what one line of the kernel tells of the node's health; None: nothing."""
    if _BEGINS.match(text) is None:
        return None
    if (xid := _XID.match(text)) is not None:
        if _RECOVERED.match(text, xid.start(2)) is not None:
            return None
        return Finding(code=f"xid-{int(xid[2])}", where=f"GPU {xid[1]}", evidence=text[:_SHOWN])
    for code, pattern in _PATTERNS_READ:
        if (found := pattern.match(text)) is not None:
            where = found[1] if pattern.groups else ""
            return Finding(code=code, where=where, evidence=text[:_SHOWN])
    return None


class KernelLogProbe:
    """Reads what the kernel has logged since the last look; what was logged before the first is not read."""

    interval_s = 5.0
    deadline_s = 10.0

    def __init__(self, path: Path = KMSG) -> None:
        self._path = path
        self._fd = -1

    def missing(self) -> str:
        """See `probe.Probe`."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return f"{self._path} cannot be read: {error.strerror}"
        with contextlib.suppress(OSError):  # a pipe has no end to go to
            os.lseek(self._fd, 0, os.SEEK_END)
        return ""

    def look(self) -> list[Finding]:
        """See `probe.Probe`. Raises OSError."""
        texts = filter(None, map(_kernels_own, self._records(lambda: os.read(self._fd, _MOST_NBYTES))))
        return [found for found in map(finding, texts) if found is not None]

    def close(self) -> None:
        """See `probe.Probe`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @staticmethod
    def _records(read: Callable[[], bytes]) -> Iterator[bytes]:
        for _ in range(MOST_RECORDS):
            try:
                record = read()
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # what was to come next has been overwritten: on with what is there
            if not record:
                return
            # One at a time, but from a pipe, where lines of a record begin with a space.
            yield from re.split(rb"\n(?! )", record)


def _kernels_own(record: bytes) -> str:
    """Return the text of a record that the kernel itself has written, else ""."""
    found = _RECORD.match(record)
    if found is None or int(found[1]) >> 3:
        return ""
    text = found[2].decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in text)
