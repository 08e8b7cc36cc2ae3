"""Reads a YAML file into structs, strictly: a mistake is one sentence with the file, the line and the key.

What YAML would let pass is a mistake too: an unknown key, a key that stands twice, a duration or a size
without a unit.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from ckptless.daemon.api.errors import UsageError

T = TypeVar("T", bound=msgspec.Struct)

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?(ms|s|m|h)", re.ASCII)
_RATE_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_RATE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s?(k|M|G|Ki|Mi|Gi|)B/s", re.ASCII)
_UNITS_NBYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})\s?(B|KiB|MiB|GiB|TiB)", re.ASCII)
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")


@dataclass(frozen=True)
class Source:
    """A file's text as values; `lines` gives the line of each key by its path ("daemon.port")."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def mistake(self, key: str, text: str) -> UsageError:
        """The error that says what is wrong with `key`, and where it stands."""
        line = self.lines.get(key)
        return UsageError(f"{self.path}{'' if line is None else f', line {line}'}: {text}")


# What YAML's own constructors raise for a value that is not of its (given) type, and for one nested too deep.
CONSTRUCTION = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def read(path: Path) -> Source:
    """The file as it stands. Raises UsageError where it cannot be read or is no YAML mapping."""
    try:
        mode = path.stat().st_mode
        text = path.read_bytes().decode()
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            lines: dict[str, int] = {}
            _note_lines(path, node, "", lines)
            values = {} if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8: save the file as UTF-8") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}{_mark(error)}: this is no YAML: {_problem(error)}") from error
    except CONSTRUCTION as error:
        raise UsageError(f"{path}: a value in it is none: {str(error)[:80]}") from error
    if mode & 0o002:
        raise UsageError(f"{path} can be written by every user: chmod o-w it")
    if not isinstance(values, dict):
        raise UsageError(f"{path}: it must consist of keys with values, as in `version: 1`")
    return Source(path, values, lines)


def _mark(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}"


def _problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
    return " ".join(str(problem).split())


def _note_lines(path: Path, node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> None:
    """Fill `lines`; refuse a key that stands twice, of which YAML would silently take the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value if isinstance(key_node, yaml.ScalarNode) else '?'}"
        line = key_node.start_mark.line + 1
        if key in lines:
            raise UsageError(f"{path}, line {line}: {key} stands here again, first in line {lines[key]}")
        lines[key] = line
        if (
            prefix.count(".") < 4
        ):  # deeper than any key of ours; an alias may even lead back to its own anchor
            _note_lines(path, value_node, f"{key}.", lines)


def parse(source: Source, kind: type[T], wanted: Mapping[str, str]) -> T:
    """The struct that a file describes; `wanted` says in words what each key's value must be.

    A field `name_s` whose key is `name` is a duration: text with a unit in the file, seconds in the struct;
    `name_rate` is the same in bytes per second, and `name_nbytes` a size. Raises UsageError.
    """
    values = _prepared(source, source.values, kind, "", wanted)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _refusal(source, str(error), wanted) from error


def _refusal(source: Source, text: str, wanted: Mapping[str, str]) -> UsageError:
    """msgspec's words as ours."""
    place = _PLACE.search(text)
    key = place.group(1) if place else ""
    missing = _MISSING.search(text)
    if missing:
        key = f"{key}.{missing.group(1)}" if key else missing.group(1)
        return source.mistake(key, f"{key} is missing: it must be {wanted.get(key, 'there')}")
    return _unfit(source, key, wanted)


def _unfit(source: Source, key: str, wanted: Mapping[str, str]) -> UsageError:
    found: Any = source.values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return source.mistake(key, f"{key} is {_word(found)}: it must be {wanted.get(key, 'another')}")


def _word(value: object) -> str:
    """A value as a message shows it: short, on one line."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping | list):
        return "a section" if isinstance(value, Mapping) else "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _prepared(
    source: Source, values: Mapping[str, Any], kind: type, prefix: str, wanted: Mapping[str, str]
) -> dict[str, Any]:
    """The same values, with durations in seconds; unknown keys are refused, empty sections dropped."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    ready: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        field = fields.get(key)
        if field is None:
            raise source.mistake(path, _unknown(path, str(key), list(fields)))
        section = field.type if isinstance(field.type, type) else None
        if section is not None and issubclass(section, msgspec.Struct):
            if value is None:
                continue  # the section's name, with everything under it commented out
            if not isinstance(value, Mapping):
                raise source.mistake(path, f"{path} is a section: write its keys under it, indented")
            ready[key] = _prepared(source, value, section, f"{path}.", wanted)
        elif value is not None and field.name in (f"{key}_s", f"{key}_rate", f"{key}_nbytes"):
            ready[key] = _number_of(field.name, value)
            if ready[key] is None:
                raise _unfit(source, path, wanted)
        else:
            ready[key] = value
    return ready


def _number_of(name: str, written: object) -> float | None:
    """What a field of that name is written as, in its unit; None where it is not one."""
    if name.endswith("_s"):
        return seconds(written)
    return rate(written) if name.endswith("_rate") else nbytes(written)


def _unknown(path: str, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"is it {near[0]}?" if near else f"the keys here are {', '.join(known)}"
    return f"there is no key {path}: {hint}"


def seconds(written: object) -> float | None:
    """A duration as it is written, "250ms" or "1.5h", in seconds; None where it is not one."""
    match = _DURATION.fullmatch(written) if isinstance(written, str) else None
    return None if match is None else round(float(match.group(1)) * _UNITS_S[match.group(2)], 9)


def duration(value_s: float) -> str:
    """Seconds as a file has them, in the largest unit that gives a whole number, else seconds or ms."""
    for unit in ("h", "m"):
        if value_s and value_s % _UNITS_S[unit] == 0:
            return f"{value_s / _UNITS_S[unit]:.0f}{unit}"
    if value_s >= 1 or value_s == 0:
        return f"{value_s:.15g}s"
    return f"{round(value_s * 1000, 6):.15g}ms"


def rate(written: object) -> float | None:
    """A rate as it is written, "200MB/s" or "1.5GiB/s", in bytes per second; None where it is not one."""
    match = _RATE.fullmatch(written) if isinstance(written, str) else None
    return None if match is None else round(float(match.group(1)) * _RATE_UNITS[match.group(2)], 3)


def rate_text(value: float) -> str:
    """Bytes per second as a file has them, in the largest unit that gives a whole number."""
    fits = [unit for unit, factor in _RATE_UNITS.items() if value % factor == 0]
    unit = max(fits, key=lambda unit: _RATE_UNITS[unit], default="")
    return f"{value / _RATE_UNITS[unit]:.15g}{unit}B/s"


def nbytes(written: object) -> int | None:
    """A size as it is written, "512MiB" or 0, in bytes; None where it is not one."""
    if written == 0 and not isinstance(written, bool):
        return 0
    match = _SIZE.fullmatch(written) if isinstance(written, str) else None
    return None if match is None else int(match.group(1)) * _UNITS_NBYTES[match.group(2)]


def size(value_nbytes: int) -> str:
    """Bytes as a file has them, in the largest unit that gives a whole number."""
    for unit in reversed(_UNITS_NBYTES):
        if value_nbytes and value_nbytes % _UNITS_NBYTES[unit] == 0:
            return f"{value_nbytes // _UNITS_NBYTES[unit]}{unit}"
    return "0"
