"""What an administrator sets for ckptless on a cluster: /etc/ckptless/ckptless.yaml, the same on every node.

The defaults are chosen so that `version: 1` alone is a working file. Every timeout follows from one knob,
`max_stall`; one that is set by hand must fit the others, or the file is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field, structs

from ckptless.daemon import settings_file
from ckptless.daemon.api.errors import CkptlessError, UsageError
from ckptless.daemon.api.model import Limits
from ckptless.daemon.config import Timers
from ckptless.daemon.control.domains import check_name
from ckptless.daemon.settings_bind import is_bind, is_shared_bind
from ckptless.daemon.settings_file import Source, duration
from ckptless.daemon.slurm.hostlist import expand

DEFAULT_FILE = Path("/etc/ckptless/ckptless.yaml")
SLURM_PORTS = range(6817, 6821)  # slurmctld, slurmd, slurmdbd, and slurmrestd's usual one

# sockaddr_un has 108 bytes with the zero byte behind the name.
AbsolutePath = Annotated[str, Meta(pattern=r"^/[^\x00-\x1f]*$", max_length=4096)]
SocketPath = Annotated[str, Meta(pattern=r"^/[^\x00-\x1f]*$", max_length=107)]
Port = Annotated[int, Meta(ge=1024, le=65535)]
# Below the first, what a transfer sends at once would take longer than a moment.
Rate = Annotated[float, Meta(ge=1e6, le=1e12)]
Timeout = Annotated[float, Meta(ge=0.01, le=86400)]

LogLevel = Literal["debug", "info", "warning", "error"]
Backend = Literal["auto", "commands", "pyslurm"]
OnNodeLost = Literal["down", "drain", "none"]


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the file."""


class Overrides(_Part, frozen=True):
    """Timeouts in seconds that the file sets by hand; None is derived from `max_stall`."""

    beat_s: Timeout | None = field(default=None, name="beat")
    dark_s: Timeout | None = field(default=None, name="dark")
    pong_s: Timeout | None = field(default=None, name="pong")
    leave_s: Timeout | None = field(default=None, name="leave")
    join_s: Timeout | None = field(default=None, name="join")
    stall_s: Timeout | None = field(default=None, name="stall")
    lease_s: Timeout | None = field(default=None, name="lease")


class Budgets(_Part, frozen=True):
    """How often a rung of the ladder is tried; `Limits` says what each is for. The window is in seconds."""

    raise_tries: Annotated[int, Meta(ge=0, le=100)] = 1
    process_tries: Annotated[int, Meta(ge=0, le=100)] = 3
    flap_tries: Annotated[int, Meta(ge=1, le=100)] = 5
    flap_window_s: Annotated[float, Meta(ge=1, le=86400)] = field(default=3600.0, name="flap_window")


class DaemonSettings(_Part, frozen=True):
    """Where a daemon listens and what it keeps. Port 6821 is the first after those that Slurm uses.

    `bind` is the address, interface or network for the other daemons; None is the address of the node's name.
    """

    port: Port = 6821
    bind: str | None = None
    socket: SocketPath = "/run/ckptless/ckptlessd.sock"
    state_dir: AbsolutePath = "/var/lib/ckptless"
    log_level: LogLevel = "info"


class SlurmSettings(_Part, frozen=True):
    """How the daemon speaks with Slurm.

    `poll_s`: seconds between two looks at the jobs, and at the nodes of those that are led from here; one
    costs about 10 ms of CPU.
    `on_node_lost`: down by default (30 s after it was drained), since Slurm itself would wait for
    SlurmdTimeout, and since it kills what might still run there.
    """

    backend: Backend = "auto"
    poll_s: Annotated[float, Meta(ge=1, le=3600)] = field(default=30.0, name="poll")
    on_node_lost: OnNodeLost = "down"
    bin_dir: AbsolutePath | None = None


class MungeSettings(_Part, frozen=True):
    """Where munged listens; None is where libmunge looks by itself."""

    socket: SocketPath | None = None


class ReplicationSettings(_Part, frozen=True):
    """How copies of the state go from agent to agent, where a job says nothing else.

    `bandwidth_rate`: bytes per second that each agent sends at most; None for no limit. `interface`: an
    interface or a network that each node has an address of; None is the address of the node's name.
    """

    bandwidth_rate: Rate | None = field(default=None, name="bandwidth")
    interface: str | None = None


class CommSettings(_Part, frozen=True):
    """Over what the ranks talk to each other, where a job says nothing else: `interface` as for copies."""

    interface: str | None = None


class DataSettings(_Part, frozen=True):
    """What the batches of one loader may take on a node, where its script would take more; None: no limit.

    `prefetch`: batches made ahead of each replica's use.
    """

    budget_nbytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] | None = field(default=None, name="budget")
    prefetch: Annotated[int, Meta(ge=1, le=256)] | None = None


class KeepSettings(_Part, frozen=True):
    """What a daemon keeps of the memory of jobs that end before their training; see `control.keeping`."""

    memory_nbytes: Annotated[int, Meta(ge=0, le=1 << 50)] = field(default=4 << 30, name="memory")
    ttl_s: Annotated[float, Meta(ge=1, le=86400)] = field(default=900.0, name="ttl")


class SettingsFile(_Part, frozen=True):
    """The file. `max_stall` is 5 minutes as ckptless-run has it: longer than a slow step or an evaluation.

    `domains` are hostlists by the name of the failure domain.
    """

    version: Literal[1]
    max_stall_s: Annotated[float, Meta(ge=5, le=86400)] = field(default=300.0, name="max_stall")
    domains: dict[Any, Any] | None = None  # see _domains, which says it better than the parser
    timeouts: Overrides = Overrides()
    budgets: Budgets = Budgets()
    daemon: DaemonSettings = DaemonSettings()
    slurm: SlurmSettings = SlurmSettings()
    munge: MungeSettings = MungeSettings()
    replication: ReplicationSettings = ReplicationSettings()
    comm: CommSettings = CommSettings()
    data: DataSettings = DataSettings()
    keep: KeepSettings = KeepSettings()


class Timeouts(Struct, frozen=True, kw_only=True):
    """Every timeout, in seconds. `Limits` says what those from `pong_s` on mean for a job.

    `beat_s`: between two signs of life of a daemon to the others. `dark_s`: a daemon that is silent for so
    long is taken for unreachable, its node for lost when its agent does not answer either.
    """

    beat_s: float
    dark_s: float
    pong_s: float
    leave_s: float
    join_s: float
    stall_s: float
    lease_s: float

    @classmethod
    def derive(cls, max_stall_s: float) -> "Timeouts":
        """All of them from the longest stall that is accepted.

        A node is dark after 1.5 s, six beats; who accepts stalls over 5 minutes has time for a calmer
        verdict, up to 5 s.
        """
        limits = Limits.from_max_stall(max_stall_s)
        dark_s = round(min(5.0, max(1.5, max_stall_s / 200)), 3)
        return cls(
            beat_s=round(dark_s / 6, 3),
            dark_s=dark_s,
            pong_s=limits.pong_s,
            leave_s=limits.leave_s,
            join_s=limits.join_s,
            stall_s=limits.stall_s,
            lease_s=limits.lease_s,
        )


class Settings(Struct, frozen=True, kw_only=True):
    """Checked settings: what the file says, and what follows from it.

    `file` is None where there is none; `given` are the keys it sets ("daemon.port"). `domains` are the nodes
    of every failure domain; None where the file leaves that to Slurm's topology.
    """

    file: Path | None
    given: frozenset[str]
    max_stall_s: float
    domains: dict[str, tuple[str, ...]] | None
    timeouts: Timeouts
    budgets: Budgets
    daemon: DaemonSettings
    slurm: SlurmSettings
    munge: MungeSettings
    replication: ReplicationSettings
    comm: CommSettings
    data: DataSettings
    keep: KeepSettings

    def limits(self, max_stall_s: float | None = None, start_tries: int = 0) -> Limits:
        """Deadlines of a job: from the knob of its own (seconds) where it has one, else the site's.

        The budgets are the site's in either case, but for `start_tries`, which is the job's.
        """
        limits = structs.replace(
            Limits.from_max_stall(self.max_stall_s if max_stall_s is None else max_stall_s, start_tries),
            **structs.asdict(self.budgets),
        )
        if max_stall_s is not None:
            return limits
        own = self.timeouts
        return structs.replace(
            limits,
            pong_s=own.pong_s,
            leave_s=own.leave_s,
            join_s=own.join_s,
            stall_s=own.stall_s,
            lease_s=own.lease_s,
        )

    @property
    def timers(self) -> Timers:
        """How the daemons watch each other."""
        return Timers(beat_s=self.timeouts.beat_s, dark_s=self.timeouts.dark_s)


_TIMEOUT = "a duration with its unit from 10ms to 24h, such as 250ms or 2s, or left out"
_SOCKET = "the absolute path of a Unix socket, at most 107 bytes long"

# What each key's value must be, in the words of an error message.
WANTED = {
    "version": "1, as in `version: 1`",
    "max_stall": "a duration with its unit from 5s to 24h, such as 90s or 5m",
    "domains": "names with hostlists, as in `rack1: node[01-16]`, or null",
    "timeouts.beat": _TIMEOUT,
    "timeouts.dark": _TIMEOUT,
    "timeouts.pong": _TIMEOUT,
    "timeouts.leave": _TIMEOUT,
    "timeouts.join": _TIMEOUT,
    "timeouts.stall": _TIMEOUT,
    "timeouts.lease": _TIMEOUT,
    "budgets.raise_tries": "a number from 0 to 100",
    "budgets.process_tries": "a number from 0 to 100",
    "budgets.flap_tries": "a number from 1 to 100",
    "budgets.flap_window": "a duration with its unit from 1s to 24h, such as 30m",
    "daemon.port": "a TCP port from 1024 to 65535",
    "daemon.bind": "an IP address, a network such as 10.1.0.0/16, an interface such as ib0, or null",
    "daemon.socket": _SOCKET,
    "daemon.state_dir": "an absolute path",
    "daemon.log_level": "debug, info, warning or error",
    "slurm.backend": "auto, commands or pyslurm",
    "slurm.poll": "a duration with its unit from 1s to 1h, such as 30s",
    "slurm.on_node_lost": "down, drain or none",
    "slurm.bin_dir": "the absolute path of the folder with scontrol, or null",
    "munge.socket": f"{_SOCKET}, or null",
    "replication.bandwidth": "a rate with its unit from 1MB/s to 1000GB/s, such as 500MB/s, or null",
    "replication.interface": "a network such as 10.1.0.0/16, an interface such as ib0, or null",
    "comm.interface": "a network such as 10.1.0.0/16, an interface such as ib0, or null",
    "data.budget": "a size with its unit from 1MiB to 1024TiB, such as 512MiB or 4GiB, or null",
    "data.prefetch": "a number from 1 to 256, or null",
    "keep.memory": "a size with its unit, such as 512MiB or 64GiB, or 0",
    "keep.ttl": "a duration with its unit from 1s to 24h, such as 15m",
}

# These are read once; a reload takes over all others.
_RESTART_KEYS = (
    "daemon.port",
    "daemon.bind",
    "daemon.socket",
    "daemon.state_dir",
    "slurm.backend",
    "slurm.bin_dir",
    "munge.socket",
)


def load_settings(path: Path | None = None) -> Settings:
    """The settings of a file; None is the default file, or the defaults where that is missing.

    Raises UsageError: one sentence with the file, the line and the key.
    """
    if path is None:
        if not DEFAULT_FILE.exists():
            return _settled(Source(DEFAULT_FILE, {"version": 1}, {}), SettingsFile(version=1), None)
        path = DEFAULT_FILE
    source = settings_file.read(path)
    return _settled(source, settings_file.parse(source, SettingsFile, WANTED), path)


def _settled(source: Source, found: SettingsFile, file: Path | None) -> Settings:
    timeouts = _overridden(Timeouts.derive(found.max_stall_s), found.timeouts)
    settings = Settings(
        file=file,
        given=_given(source, found.timeouts),
        max_stall_s=found.max_stall_s,
        domains=_domains(source, found.domains),
        timeouts=timeouts,
        budgets=found.budgets,
        daemon=found.daemon,
        slurm=found.slurm,
        munge=found.munge,
        replication=found.replication,
        comm=found.comm,
        data=found.data,
        keep=found.keep,
    )
    if found.daemon.port in SLURM_PORTS:
        raise source.mistake(
            "daemon.port", f"daemon.port is {found.daemon.port}, which is one of Slurm's own"
        )
    if found.daemon.bind is not None and not is_bind(found.daemon.bind):
        text = f"daemon.bind is {found.daemon.bind}: it must be {WANTED['daemon.bind']}"
        raise source.mistake("daemon.bind", text)
    shared = {"replication.interface": found.replication.interface, "comm.interface": found.comm.interface}
    for key, interface in shared.items():
        if interface is not None and not is_shared_bind(interface):
            raise source.mistake(key, f"{key} is {interface}: it must be {WANTED[key]}")
    _check_timeouts(source, timeouts, found)
    return settings


def _domains(source: Source, written: Mapping[object, object] | None) -> dict[str, tuple[str, ...]] | None:
    """The nodes of each failure domain. Raises UsageError for a bad name or hostlist, or a node in two."""
    if written is None:
        return None
    found: dict[str, tuple[str, ...]] = {}
    home: dict[str, str] = {}
    for key_written, text in written.items():
        key = f"domains.{key_written}"
        if not isinstance(text, str):
            raise source.mistake(key, f"{key} must be a hostlist, such as node[01-16]")
        try:
            name, nodes = check_name(key_written), expand(text)
        except CkptlessError as error:
            raise source.mistake(key, f"{key}: {error}") from error
        if not nodes:
            raise source.mistake(key, f"{key} has no nodes: name them, as in node[01-16], or leave it out")
        twice = next((node for node in nodes if home.setdefault(node, name) != name), None)
        if twice is not None:
            raise source.mistake(key, f"{key} has {twice}, which is in {home[twice]} already")
        found[name] = nodes
    return found


def _given(source: Source, timeouts: Overrides) -> frozenset[str]:
    """Keys that the file sets; a timeout that is null is left to `max_stall`."""
    left = {f"timeouts.{name[:-2]}" for name, value in structs.asdict(timeouts).items() if value is None}
    return frozenset(WANTED.keys() & source.lines.keys() - left)


def _overridden(derived: Timeouts, own: Overrides) -> Timeouts:
    by_hand = {name: value for name, value in structs.asdict(own).items() if value is not None}
    return structs.replace(derived, **by_hand)


def _check_timeouts(source: Source, times: Timeouts, found: SettingsFile) -> None:
    """The order that the timeouts must stand in; raises UsageError at the one that was set by hand."""
    own = found.timeouts

    def text(name: str) -> str:
        by_hand = getattr(own, f"{name}_s") is not None
        value = duration(getattr(times, f"{name}_s"))
        return f"timeouts.{name} ({value}{'' if by_hand else ', derived from max_stall'})"

    def mistake(low: str, high: str, rule: str) -> UsageError:
        at = low if getattr(own, f"{low}_s") is not None else high
        return source.mistake(f"timeouts.{at}", f"{text(low)} must be {rule} {text(high)}")

    if times.beat_s >= times.dark_s / 3:
        raise mistake("beat", "dark", "less than a third of")
    # Else a node would end its ranks while nobody missed it yet.
    if times.dark_s >= times.lease_s:
        raise mistake("dark", "lease", "less than")
    for name in ("dark", "pong", "leave", "lease"):
        if getattr(times, f"{name}_s") >= times.stall_s:
            raise mistake(name, "stall", "less than")
    for name in ("join", "stall"):
        if getattr(times, f"{name}_s") > found.max_stall_s:
            limit = f"max_stall ({duration(found.max_stall_s)})"
            raise source.mistake(f"timeouts.{name}", f"{text(name)} must not be more than {limit}")


def needs_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Keys that differ and that a reload cannot take over."""
    return tuple(key for key in _RESTART_KEYS if _at(old, key) != _at(new, key))


def _at(settings: Settings, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)
