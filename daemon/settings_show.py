"""The settings in force as YAML that is itself a good file, or as rows; each value with its source."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from msgspec import Struct, structs

from ckptless.daemon.settings import Settings, SettingsFile
from ckptless.daemon.settings_file import duration, rate_text, size
from ckptless.daemon.slurm.hostlist import compress

DEFAULT = "default"
FILE = "file"
DERIVED = "derived"
_UNITS = {"_s": "s", "_rate": "B/s", "_nbytes": "B"}


class Shown(Struct, frozen=True, kw_only=True):
    """One key. A duration's `value` is in seconds and its `unit` "s", a size's is "B",
    a rate's in bytes per second and its `unit` "B/s"; other values have no unit.
    """

    key: str
    value: str | int | float | bool | Mapping[str, str] | None
    source: str
    unit: str | None = None

    @property
    def text(self) -> str:
        """The value as the file would have it."""
        if self.unit == "s" and isinstance(self.value, float):
            return duration(self.value)
        if self.unit == "B/s" and isinstance(self.value, float):
            return rate_text(self.value)
        if self.unit == "B" and isinstance(self.value, int):
            return size(self.value)
        # Its first line: behind a bare value, YAML would end the document with "...".
        # A mapping in one line too.
        plain = dict(self.value) if isinstance(self.value, Mapping) else self.value
        return yaml.safe_dump(
            plain, width=float("inf"), allow_unicode=True, default_flow_style=True, sort_keys=False
        ).splitlines()[0]


def shown(settings: Settings) -> tuple[Shown, ...]:
    """Every key in the order of the file."""
    return tuple(_shown(settings))


def _shown(settings: Settings) -> Iterator[Shown]:
    for part in structs.fields(SettingsFile):
        value: Any = 1 if part.name == "version" else getattr(settings, part.name)
        if part.name == "domains" and value is not None:
            value = {name: compress(nodes) for name, nodes in value.items()}
        if not isinstance(value, Struct):
            yield _one(settings, part.encode_name, part.name, value)
            continue
        named = {field.name: field.encode_name for field in structs.fields(part.type)}
        for name, key in named.items():
            yield _one(settings, f"{part.encode_name}.{key}", name, getattr(value, name))


def _one(
    settings: Settings, key: str, name: str, value: str | int | float | Mapping[str, str] | None
) -> Shown:
    source = FILE if key in settings.given else DEFAULT
    if key.startswith("timeouts.") and source == DEFAULT:
        source = DERIVED
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), None)
    return Shown(key=key, value=value, source=source, unit=unit)


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
