"""Configuration of one daemon, read once from YAML and checked strictly."""

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import yaml

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import Name, NodeNumber
from ckptless.daemon.protocol.log import RunLogFormat
from ckptless.daemon.settings.file import CONSTRUCTION
from ckptless.daemon.settings.options import KeepSettings

T = TypeVar("T")

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's daemon: where it listens for the others."""

    node: NodeNumber
    name: Name
    address: Name
    port: Port


class Timers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times by which daemons watch each other.

    `beat_s`: seconds between two signs of life. `dark_s`: a daemon that is silent for so long is taken for
    unreachable, and its node for lost when nothing else on it answers either, by the word of others too.
    """

    beat_s: Seconds = 0.25
    dark_s: Seconds = 1.5


class KeepConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bytes of ended jobs' memory that a daemon keeps for their next start, and for how long (s)."""

    nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    ttl_s: Seconds = KeepSettings().ttl_s


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of any daemon: who it is, where it listens, where it writes."""

    name: str
    address: str
    port: Port
    state_dir: str
    socket: str
    socket_mode: int = 0o600
    timers: Timers = Timers()
    keep: KeepConfig = KeepConfig()


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A daemon of local mode, or of hosts without Slurm: one of `peers`, for the jobs of one user.

    All hold the key in `key_file`. `one_machine`: where all are on one, a file is the witness of two halves;
    elsewhere nobody is.
    """

    node: int
    state_dir: str
    socket: str
    key_file: str
    peers: tuple[Peer, ...]
    one_machine: bool = True
    timers: Timers = Timers()
    keep: KeepConfig = KeepConfig()
    log_format: RunLogFormat = "text"

    @property
    def daemon(self) -> DaemonConfig:
        """Return the part that every daemon has. Raises UsageError."""
        me = next((peer for peer in self.peers if peer.node == self.node), None)
        if me is None:
            raise UsageError(f"node {self.node} is not among the peers: add its entry")
        return DaemonConfig(
            name=me.name,
            address=me.address,
            port=me.port,
            state_dir=self.state_dir,
            socket=self.socket,
            timers=self.timers,
            keep=self.keep,
        )


def load(path: Path, kind: type[T]) -> T:
    """A struct out of a YAML (or JSON) file. Raises UsageError with the file and the place in it."""
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), kind)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, msgspec.ValidationError, *CONSTRUCTION) as error:
        raise UsageError(f"{path}: {error}") from error


def read_key(path: Path) -> bytes:
    """A key file's bytes. Raises UsageError where others may read it."""
    try:
        mode = path.stat().st_mode
        key = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the key file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise UsageError(f"the key file {path} can be read by others: chmod 600 it")
    if len(key) < 16:
        raise UsageError(f"the key file {path} holds {len(key)} bytes; it needs at least 16")
    return key
