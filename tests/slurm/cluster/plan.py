"""What a cluster consists of: machines, addresses, Slurm's settings, services, shares."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

CONTROLLER = "ctl"
SWITCH = "switch"
NETWORK = "10.99.0"
MOST_NODES = 200

# The users of the cluster beside those of the system, and their uids; each has a home that all nodes share.
USERS = {"tester": 5001, "other": 5002}
SHARED = "/shared"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ClusterError(Exception):
    """The cluster cannot do what was asked; the text is one sentence that says why."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A program that PID 1 of a machine starts at boot and watches.

    `{node}` in `argv` and in the values of `env` is the machine's name. What it prints goes to
    /var/log/NAME.log, which outlives a reboot.

    Attributes:
        user: who it runs as.
        where: the machines that have it.
        restart: start it again when it ends, unless it was stopped on purpose.
        boot_options: added to `argv` for the first start after a boot only.
        ready: a path that must exist before the next service of the machine starts; empty: do not wait.
    """

    name: str
    argv: tuple[str, ...]
    user: str = "root"
    env: Mapping[str, str] = field(default_factory=dict)
    where: Literal["nodes", "ctl", "all"] = "nodes"
    restart: bool = True
    boot_options: tuple[str, ...] = ()
    ready: str = ""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A directory or file of the host that every machine of the cluster sees, under the same path or `at`."""

    path: str
    at: str = ""
    writable: bool = False

    @property
    def inside(self) -> str:
        """Return where the cluster's machines see it."""
        return self.at or self.path


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that must be known to boot any machine of a cluster.

    Attributes:
        conf: lines of slurm.conf to set; an empty value takes the line out.
        lines: added to slurm.conf as they are.
        node_options: added to the line of the nodes, such as `Gres=gpu:2`.
        rootfs: the root of another system, with its own Slurm; empty: this machine's.
        path: put before the system's PATH of users and services.
    """

    nodes: int = 5
    cpus: int = 8
    memory_mb: int = 4000
    conf: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    node_options: str = ""
    shares: tuple[Share, ...] = ()
    services: tuple[Service, ...] = ()
    rootfs: str = ""
    path: str = ""
    shm_size: str = "2g"
    tmp_size: str = "2g"

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ClusterError(f"{self.nodes} nodes: a cluster has 1 to {MOST_NODES}")
        names = [service.name for service in self.services]
        taken = {"munged", "slurmd", "slurmctld"} | {name for name in names if names.count(name) > 1}
        for name in names:
            if name in taken or not name.replace("-", "").replace("_", "").isalnum():
                raise ClusterError(
                    f"service {name!r}: give it a name of letters and digits that is not in use"
                )

    @property
    def node_names(self) -> list[str]:
        """node01, node02 and so on."""
        return [f"node{number:02d}" for number in range(1, self.nodes + 1)]

    @property
    def machines(self) -> list[str]:
        """The controller and the nodes."""
        return [CONTROLLER, *self.node_names]

    @property
    def search_path(self) -> str:
        """PATH of users and services."""
        return f"{self.path}:{SYSTEM_PATH}" if self.path else SYSTEM_PATH

    def address(self, machine: str) -> str:
        """The machine's address on the cluster's network."""
        return f"{NETWORK}.{self._number(machine)}"

    def mac(self, machine: str) -> str:
        """Fixed, so that a rebooted machine is found in its peers' ARP caches at once."""
        return f"02:00:0a:63:00:{self._number(machine):02x}"

    def services_of(self, machine: str) -> list[Service]:
        """Every service of the machine, in the order in which they start."""
        kind = "ctl" if machine == CONTROLLER else "nodes"
        own = [service for service in self.services if service.where in (kind, "all")]
        return [_MUNGED, _SLURMCTLD if machine == CONTROLLER else _SLURMD, *own]

    def dump(self, file: Path) -> None:
        """Write it as JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, file: Path) -> Plan:
        """The plan in a file that `dump` wrote."""
        fields: dict[str, Any] = json.loads(file.read_text())
        fields["lines"] = tuple(fields["lines"])
        fields["shares"] = tuple(Share(**share) for share in fields["shares"])
        fields["services"] = tuple(_service(service) for service in fields["services"])
        return cls(**fields)

    def _number(self, machine: str) -> int:
        return 10 + ([CONTROLLER, *self.node_names].index(machine))


def _service(fields: dict[str, Any]) -> Service:
    for name in ("argv", "boot_options"):
        fields[name] = tuple(fields[name])
    return Service(**fields)


_MUNGED = Service(
    name="munged",
    argv=("munged", "--foreground"),
    user="munge",
    restart=False,
    ready="/run/munge/munge.socket.2",
)
_SLURMCTLD = Service(name="slurmctld", argv=("slurmctld", "-D", "-i"), user="slurm", restart=False)
# All nodes share one kernel, so the boot time that slurmd reads would never change: -b tells the controller
# that the node has rebooted. A slurmd that is only started again must not say so.
_SLURMD = Service(name="slurmd", argv=("slurmd", "-D"), boot_options=("-b",), restart=False)


@dataclass(frozen=True)
class Layout:
    """Where a cluster keeps what, below its directory."""

    base: Path

    @property
    def plan(self) -> Path:
        """The plan, as JSON; its presence says that the directory is a cluster's."""
        return self.base / "cluster.json"

    @property
    def lock(self) -> Path:
        """Held by whoever brings machines up or takes them down."""
        return self.base / "lock"

    @property
    def etc(self) -> Path:
        """/etc of all machines."""
        return self.base / "etc"

    @property
    def home(self) -> Path:
        """/home of all machines."""
        return self.base / "home"

    @property
    def shared(self) -> Path:
        """/shared of all machines."""
        return self.base / "shared"

    def machine(self, name: str) -> Path:
        """The machine's own directory: console.log, its pid, its lock, /var."""
        return self.base / "machines" / name
