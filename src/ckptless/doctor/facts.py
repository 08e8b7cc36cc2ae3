"""The facts that findings are made of: everything the doctor has read, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptless.torch_versions import Version


@dataclass(frozen=True)
class Nccl:
    """An NCCL: its version, and whether it was asked for, bundled with torch, or the system's."""

    version: Version
    source: str


@dataclass(frozen=True)
class Torch:
    """A torch. `moved` are the sentences of guards that refuse it; None where it was not loaded.

    `tried`: what the self-test says is wrong, "" for nothing; None where it was not made.
    """

    version: Version
    moved: Mapping[str, str] | None = None
    tried: str | None = None


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of this process and machine, in bytes; None is no limit, or not known.

    `memlock` (RLIMIT_MEMLOCK) and `files` (RLIMIT_NOFILE, a number) are the soft ones. `memfd`: "" where one
    can be made, else why not.
    """

    memfd: str = ""
    shm_free_nbytes: int | None = None
    memlock_nbytes: int | None = None
    address_space_nbytes: int | None = None
    files: int | None = None
    available_nbytes: int | None = None


@dataclass(frozen=True)
class Daemon:
    """ckptlessd on this node: the socket, whether it answers, and its TCP port. `error`: why it does not."""

    socket: str
    port: int
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything. `ephemeral` is net.ipv4.ip_local_port_range, both ends included; () where unknown.

    `interfaces` are names and addresses. `guard`: how the store learns who connects.
    """

    torch: Torch | None = None
    nccl: Nccl | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[tuple[str, str], ...] = ()
    ephemeral: tuple[int, int] | tuple[()] = ()
    limits: ProcessLimits = ProcessLimits()
    slurm: bool = False
    srun: str | None = None
    daemon: Daemon | None = None
    guard: Literal["netlink", "proc", "none"] = "netlink"
    settings_error: str = ""
