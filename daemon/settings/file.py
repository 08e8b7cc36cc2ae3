"""Reads a YAML file into structs, strictly: a mistake is one sentence with the file, the line and the key.

What YAML would let pass is a mistake too: an unknown key, a key that stands twice, a duration or a size
without a unit.
"""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.options import Row, rows

T = TypeVar("T")


@dataclass(frozen=True)
class SettingsText:
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


def read(path: Path) -> SettingsText:
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
    return SettingsText(path, values, lines)


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


def parse(source: SettingsText, part: type[T], section: str = "") -> T:
    """The part of the table that a file describes. Raises UsageError."""
    written = source.values[section] if section else source.values
    known = {row.key: row for row in rows(part, section) if row.section == section}
    sections = {one.name: one.type for one in fields(cast(Any, part)) if is_dataclass(one.type)}
    found: dict[str, Any] = {}
    for key, value in written.items():
        path = f"{section}.{key}" if section else f"{key}"
        if key in sections:
            if value is None:
                continue  # the section's name, with everything under it commented out
            if not isinstance(value, Mapping):
                raise source.mistake(path, f"{path} is a section: write its keys under it, indented")
            found[key] = parse(source, cast(type, sections[key]), key)
        elif key in known:
            found[known[key].name] = _value(source, known[key], value)
        else:
            raise source.mistake(path, _unknown(path, str(key), [*known, *sections]))
    for row in known.values():
        if row.default is MISSING and row.name not in found:
            raise source.mistake(row.path, f"{row.path} is missing: it must be {row.wanted}")
    return part(**found)


def _value(source: SettingsText, row: Row, written: object) -> Any:
    if written is None and row.optional:
        return None
    found = row.option.read(written)
    if found is None:
        shown = _word(written, quoted=row.option.quoted)
        raise source.mistake(row.path, f"{row.path} is {shown}: it must be {row.wanted}")
    return found


def _word(value: object, *, quoted: bool) -> str:
    """A value as a message shows it: short, on one line."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping | list):
        return "a section" if isinstance(value, Mapping) else "a list"
    text = repr(value) if isinstance(value, str) and quoted else " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown(path: str, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"is it {near[0]}?" if near else f"the keys here are {', '.join(known)}"
    return f"there is no key {path}: {hint}"
