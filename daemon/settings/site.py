"""An administrator's settings for a cluster: /etc/ckptless/ckptless.yaml, the same on every node.

The keys are those of the table in `options`, and `version: 1` alone is a working file. Every timeout follows
from one knob, `max_stall`; one that is set by hand must fit the others, or the file is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct, structs

from ckptless.daemon.protocol.errors import CkptlessError, UsageError
from ckptless.daemon.protocol.model import Limits
from ckptless.daemon.replication.failure_domains import check_name
from ckptless.daemon.settings import file as settings_file
from ckptless.daemon.settings.config import Timers
from ckptless.daemon.settings.file import SettingsText
from ckptless.daemon.settings.option_kinds import duration, endpoint
from ckptless.daemon.settings.options import KEYS, MetricsSettings, Overrides, Row, SettingsFile
from ckptless.daemon.slurm.hostlist import compress, expand

DEFAULT_FILE = Path("/etc/ckptless/ckptless.yaml")
SLURM_PORTS = range(6817, 6821)  # slurmctld, slurmd, slurmdbd, and slurmrestd's usual one


@dataclass(frozen=True, kw_only=True)
class Timeouts(Overrides):
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
        dark_s = round(min(5.0, max(1.5, max_stall_s / 200)), 3)
        limits = Limits.from_max_stall(max_stall_s)
        return cls(beat_s=round(dark_s / 6, 3), dark_s=dark_s, **_deadlines(limits))


def _deadlines(of: Limits | Timeouts) -> dict[str, float]:
    """The timeouts that a job has, by their names."""
    return {name: getattr(of, name) for name in ("pong_s", "leave_s", "join_s", "stall_s", "lease_s")}


@dataclass(frozen=True, kw_only=True)
class Settings(SettingsFile):
    """Checked settings: what the file says, and what follows from it.

    `file` is None where there is none; `given` are the keys it sets ("daemon.port"). `domains` are the nodes
    of every failure domain; None where the file leaves that to Slurm's topology.
    """

    file: Path | None
    given: frozenset[str]
    domains: dict[str, tuple[str, ...]] | None
    timeouts: Timeouts

    def limits(self, max_stall_s: float | None = None, start_tries: int = 0) -> Limits:
        """Deadlines of a job: from the knob of its own (seconds) where it has one, else the site's.

        The budgets are the site's in either case, but for `start_tries`, which is the job's.
        """
        limits = Limits.from_max_stall(max_stall_s or self.max_stall_s, start_tries)
        own = {} if max_stall_s is not None else _deadlines(self.timeouts)
        return structs.replace(limits, **vars(self.budgets), **own)

    @property
    def timers(self) -> Timers:
        """The times by which daemons watch each other."""
        return Timers(beat_s=self.timeouts.beat_s, dark_s=self.timeouts.dark_s)


def load_settings(path: Path | None = None) -> Settings:
    """The settings of a file; None is the default file, or the defaults where that is missing.

    Raises UsageError: one sentence with the file, the line and the key.
    """
    if path is None:
        if not DEFAULT_FILE.exists():
            return default_settings()
        path = DEFAULT_FILE
    source = settings_file.read(path)
    return _settled(source, settings_file.parse(source, SettingsFile), path)


def default_settings() -> Settings:
    """The settings without any file."""
    return _settled(SettingsText(DEFAULT_FILE, {"version": 1}, {}), SettingsFile(version=1), None)


def _settled(source: SettingsText, found: SettingsFile, file: Path | None) -> Settings:
    if found.daemon.port in SLURM_PORTS:
        text = f"daemon.port is {found.daemon.port}, which is one of Slurm's own: choose another"
        raise source.mistake("daemon.port", text)
    _check_metrics(source, found.metrics)
    by_hand = {name: value for name, value in vars(found.timeouts).items() if value is not None}
    timeouts = replace(Timeouts.derive(found.max_stall_s), **by_hand)
    _check_timeouts(source, timeouts, found)
    derived = {key for key, row in KEYS.items() if row.section == "timeouts" and row.name not in by_hand}
    own = {
        "file": file,
        "given": frozenset(KEYS.keys() & source.lines.keys() - derived),
        "domains": _domains(source, found.domains),
        "timeouts": timeouts,
    }
    return Settings(**{**vars(found), **own})


def _check_metrics(source: SettingsText, metrics: MetricsSettings) -> None:
    """Raises UsageError where everybody could read them."""
    at = endpoint(metrics.listen) if metrics.listen is not None else None
    if at is not None and not at[0].is_loopback and not metrics.allow:
        text = f"metrics.listen is {metrics.listen}, which others reach: say who may read, in metrics.allow"
        raise source.mistake("metrics.listen", text)


def _domains(
    source: SettingsText, written: Mapping[object, object] | None
) -> dict[str, tuple[str, ...]] | None:
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
            text = f"{key} has {twice}, which is in {home[twice]} already: name it in one of them"
            raise source.mistake(key, text)
        found[name] = nodes
    return found


def _check_timeouts(source: SettingsText, times: Timeouts, found: SettingsFile) -> None:
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
    return tuple(k for k, row in KEYS.items() if row.option.restart and _at(old, row) != _at(new, row))


def _at(settings: Settings, row: Row) -> Any:
    return getattr(getattr(settings, row.section) if row.section else settings, row.name)


# ------------------------------------------------------------------------- what is in force, shown

DEFAULT, FILE, DERIVED = "default", "file", "derived"


class Shown(Struct, frozen=True, kw_only=True):
    """One key. A duration's `value` is in seconds and its `unit` "s", a size's is "B",
    a rate's in bytes per second and its `unit` "B/s"; other values have no unit.
    """

    key: str
    value: str | int | float | bool | tuple[str, ...] | Mapping[str, str] | None
    source: str
    unit: str | None = None

    @property
    def text(self) -> str:
        """The value as the file would have it."""
        plain = dict(self.value) if isinstance(self.value, Mapping) else self.value
        write = KEYS[self.key].option.shown
        if write is not None and plain is not None:
            return write(plain)
        # Its first line: behind a bare value, YAML would end the document with "...". A mapping has one too.
        return yaml.safe_dump(
            plain, width=float("inf"), allow_unicode=True, default_flow_style=True, sort_keys=False
        ).splitlines()[0]


def shown(settings: Settings) -> tuple[Shown, ...]:
    """Every key in the order of the file."""
    return tuple(_shown(settings, row) for row in KEYS.values())


def _shown(settings: Settings, row: Row) -> Shown:
    value = _at(settings, row)
    if row.key == "domains" and value is not None:
        value = {name: compress(nodes) for name, nodes in value.items()}
    absent = DERIVED if row.section == "timeouts" else DEFAULT
    source = FILE if row.path in settings.given else absent
    return Shown(key=row.path, value=value, source=source, unit=row.option.unit)


def as_yaml(settings: Settings) -> str:
    """A file that says all of it, the source behind each value."""
    lines = [f"# {settings.file or 'no file: the defaults'}"]
    section = ""
    for one in shown(settings):
        head, dot, key = one.key.rpartition(".")
        if head != section:
            lines.append(f"{head}:")
            section = head
        source = "derived from max_stall" if one.source == DERIVED else one.source
        lines.append(f"{'  ' if dot else ''}{key}: {one.text}  # {source}")
    return "\n".join(lines) + "\n"
