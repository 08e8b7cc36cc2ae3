"""What this machine must have for a cluster, and the words for what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from . import files
from .plan import SYSTEM_PATH, ClusterError

# Command, and the Debian package that has it.
_HERE = {"ip": "iproute2", "nsenter": "util-linux"}
_INSIDE = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "setpriv": "util-linux",
}


def missing(rootfs: str = "") -> list[str]:
    """Return what stands in the way of a cluster here, each in a few words; empty: nothing does."""
    lacks = [] if os.geteuid() == 0 else ["root"]
    lacks += [f"{name} (package {package})" for name, package in _HERE.items() if not _which(name, "")]
    inside = [f"{name} (package {package})" for name, package in _INSIDE.items() if not _which(name, rootfs)]
    passwd = Path(rootfs or "/") / "etc/passwd"
    text = passwd.read_text() if passwd.is_file() else ""
    inside += [f"the user {user}" for user in ("munge", "slurm") if files.account(text, user) is None]
    return lacks + [f"{lack} in {rootfs}" if rootfs else lack for lack in inside]


def check(rootfs: str) -> None:
    """Raises ClusterError where something is missing."""
    lacks = missing(rootfs)
    if lacks:
        raise ClusterError(f"a cluster needs {', '.join(lacks)}")


def slurm_version(rootfs: str) -> str:
    """Return what `slurmd -V` says, such as "slurm-wlm 22.05.8"."""
    command = ["slurmd", "-V"] if not rootfs else ["chroot", rootfs, "slurmd", "-V"]
    env = {"PATH": SYSTEM_PATH}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.strip()


def _which(name: str, rootfs: str) -> str | None:
    path = ":".join(f"{rootfs}{directory}" for directory in SYSTEM_PATH.split(":"))
    return shutil.which(name, path=path)
