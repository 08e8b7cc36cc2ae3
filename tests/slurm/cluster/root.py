"""The file system that a machine sees, built on an empty tmpfs: nothing is there that is not put there.

/usr /bin /sbin /lib* /opt    the system's, read-only
/etc                          the cluster's, read-only
/home /shared                 the cluster's, one for all machines
/var                          the machine's own, kept when it is off
/run /tmp /dev/shm /root      its own, fresh at every boot
/dev /proc /sys               devices of the system, processes and network of the machine
shares                        under their own paths; directories above them can be entered by all users
"""

from __future__ import annotations

from pathlib import Path

from . import kernel
from .plan import SHARED, Layout, Plan

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt")
_QUIET = kernel.NO_SUID | kernel.NO_DEV


def enter(layout: Layout, plan: Plan, machine: str) -> None:
    """Build it in this process's own mount namespace, and make it the root. Raises OSError."""
    kernel.keep_mounts_private()
    root = layout.machine(machine) / "root"
    root.mkdir(exist_ok=True)
    kernel.mount("tmpfs", root, 0, "mode=755,size=16m")
    _system(Path(plan.rootfs or "/"), root)
    _place(layout.etc, root / "etc", writable=False)
    _place(layout.machine(machine) / "var", root / "var")
    _place(layout.home, root / "home")
    _place(layout.shared, root / SHARED.lstrip("/"))
    for name, options in (("run", "mode=755"), ("tmp", f"mode=1777,size={plan.tmp_size}")):
        (root / name).mkdir()
        kernel.mount("tmpfs", root / name, _QUIET, options)
    (root / "root").mkdir(mode=0o755)  # shares may lie below it
    _place(Path("/dev"), root / "dev")
    kernel.mount("tmpfs", root / "dev/shm", _QUIET, f"mode=1777,size={plan.shm_size}")
    # Fresh ones: they show the PID and the network namespace that mounts them.
    (root / "proc").mkdir()
    kernel.mount("proc", root / "proc", _QUIET | kernel.NO_EXEC)
    (root / "sys").mkdir()
    kernel.mount("sysfs", root / "sys", _QUIET | kernel.NO_EXEC | kernel.READ_ONLY)
    for share in plan.shares:
        _place(Path(share.path), root / share.inside.lstrip("/"), writable=share.writable)
    kernel.pivot(root)


def _system(source: Path, root: Path) -> None:
    for name in _SYSTEM:
        entry = source / name
        if entry.is_symlink():
            (root / name).symlink_to(entry.readlink())
        elif entry.is_dir():
            _place(entry, root / name, writable=False)


def _place(source: Path, target: Path, *, writable: bool = True) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    kernel.bind(source, target, writable=writable)
