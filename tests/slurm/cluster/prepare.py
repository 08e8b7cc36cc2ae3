"""The directory of a cluster: its /etc, its homes, its plan."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from . import files, requirements
from .plan import SWITCH, USERS, ClusterError, Layout, Plan, Share

# Not taken over from the system: what the cluster has its own of, and secrets.
_OWN = (
    "slurm",
    "munge",
    "ckptless",
    "ssh",
    "ssl/private",
    "shadow",
    "shadow-",
    "gshadow",
    "gshadow-",
    "hostname",
)
_SEEN_ANYWAY = ("usr", "opt")

Files = Mapping[str, str | bytes]


def with_ckptless(plan: Plan) -> Plan:
    """The plan with this checkout and its virtual environment on every machine, read-only, at the same paths.

    The environment's commands come first in PATH. Raises ClusterError: this is not the environment's Python.
    """
    if sys.prefix == sys.base_prefix:
        raise ClusterError("to have ckptless on the cluster, run this with its virtual environment's Python")
    places = (Path(__file__).absolute().parents[3], Path(sys.prefix), Path(sys.base_prefix))
    wanted: list[Path] = []
    # The interpreter often lies in a home that only root can enter; on the cluster that home is another.
    for path in (*places, *(place.resolve() for place in places)):
        seen = not plan.rootfs and len(path.parts) > 1 and path.parts[1] in _SEEN_ANYWAY
        if not seen and not any(path.is_relative_to(above) for above in wanted):
            wanted.append(path)
    if plan.rootfs and any(path.parts[1] == "usr" for path in wanted):
        raise ClusterError("with another root, the virtual environment must not rest on Python in /usr")
    shares = tuple(Share(path=str(path)) for path in wanted)
    return dataclasses.replace(plan, shares=plan.shares + shares, path=str(Path(sys.prefix) / "bin"))


def prepare(layout: Layout, plan: Plan, extra: Files) -> None:
    """Make or refresh everything that the machines find. Raises ClusterError, OSError."""
    layout.base.mkdir(parents=True, exist_ok=True)
    layout.base.chmod(0o700)  # there are copies of the system's files in it
    for name in (SWITCH, *plan.machines):
        layout.machine(name).mkdir(parents=True, exist_ok=True)
    system = Path(plan.rootfs or "/") / "etc"
    if not layout.etc.exists():
        fresh = layout.base / "etc.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(system, fresh, symlinks=True, ignore=_ignore(system), ignore_dangling_symlinks=True)
        fresh.rename(layout.etc)
    for path, text in _texts(plan, system).items():
        write(layout, path, text)
    for path, content in extra.items():
        write(layout, path, content)
    _munge_key(layout)
    _homes(layout)


def write(layout: Layout, path: str, content: str | bytes) -> None:
    """Put a file into /etc of all machines; one that begins with "#!" can be executed.

    It is overwritten in place: running machines have it, or its directory, open. Raises ClusterError.
    """
    if not path.startswith("/etc/") or ".." in Path(path).parts:
        raise ClusterError(f"{path}: the cluster's own files lie in /etc; for others share a directory")
    data = content.encode() if isinstance(content, str) else content
    file = layout.etc / path.removeprefix("/etc/")
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink():
        file.unlink()
    if not file.exists() or file.read_bytes() != data:
        file.write_bytes(data)
    file.chmod(0o755 if data.startswith(b"#!") else 0o644)


def _texts(plan: Plan, system: Path) -> dict[str, str]:
    return {
        "/etc/slurm/slurm.conf": files.slurm_conf(plan),
        "/etc/slurm/cgroup.conf": files.cgroup_conf(requirements.slurm_version(plan.rootfs)),
        "/etc/slurm/plugstack.conf": "include /etc/slurm/plugstack.conf.d/*.conf\n",
        "/etc/slurm/plugstack.conf.d/README": "One file for each SPANK plugin, *.conf.\n",
        "/etc/hosts": files.hosts(plan),
        "/etc/nsswitch.conf": files.NSSWITCH,
        "/etc/passwd": files.passwd((system / "passwd").read_text()),
        "/etc/group": files.group((system / "group").read_text()),
    }


def _ignore(system: Path) -> Callable[[str, list[str]], list[str]]:
    own = {system / name for name in _OWN}
    return lambda directory, names: [name for name in names if Path(directory) / name in own]


def _munge_key(layout: Layout) -> None:
    key = layout.etc / "munge" / "munge.key"
    key.parent.mkdir(exist_ok=True)
    if not key.exists():
        key.write_bytes(os.urandom(1024))
    munge = files.account((layout.etc / "passwd").read_text(), "munge")
    assert munge is not None, "checked before"
    for path, mode in ((key.parent, 0o700), (key, 0o400)):
        os.chown(path, munge.uid, munge.gid)
        path.chmod(mode)


def _homes(layout: Layout) -> None:
    layout.home.mkdir(exist_ok=True)
    layout.home.chmod(0o755)
    for user, uid in USERS.items():
        home = layout.home / user
        home.mkdir(exist_ok=True)
        os.chown(home, uid, uid)
    layout.shared.mkdir(exist_ok=True)
    layout.shared.chmod(0o1777)
    os.chown(layout.shared, USERS["tester"], USERS["tester"])
