"""A job's own values for each of its sizes, from a file: `nodes: {2: {lr: 0.0006}, 4: {lr: 0.0012}}`."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.file import SettingsText, read

# What the ranks are told is in their environment, and in that of the agents' step.
LIMIT, DEPTH, MOST = 16 << 10, 6, 4096
# YAML 1.1 takes a number with an exponent for text, if it has no dot or its exponent no sign.
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", re.ASCII)


def read_policy(path: Path, sizes: tuple[int, ...]) -> str:
    """Return the entries for these numbers of nodes as JSON, by number. Raises UsageError.

    The file may have more of them, so that one does for several jobs. Entries are mappings of the user's own
    names to numbers, strings, booleans, and lists and mappings of such.
    """
    source = read(path)
    unknown = next((str(key) for key in source.values if key != "nodes"), None)
    if unknown is not None:
        raise source.mistake(unknown, f"there is no key {unknown[:60]}: a policy has nodes alone")
    entries = source.values.get("nodes")
    if not isinstance(entries, Mapping):
        raise source.mistake("nodes", "it must have nodes: and below it an entry for each size of the job")
    check = _Check(source)
    for size, entry in entries.items():
        check.entry(size, entry)
    missing = [size for size in sizes if size not in entries]
    if missing:
        size = missing[0]
        raise source.mistake(
            "nodes",
            f"it has no entry for {size} node{'' if size == 1 else 's'}, on which the job may train: add "
            f"{size}: below nodes",
        )
    encoded = msgspec.json.encode({str(size): entries[size] for size in sizes})
    if len(encoded) > LIMIT:
        raise UsageError(f"{path}: the entries for the job's sizes take {len(encoded)} bytes, of {LIMIT}")
    return encoded.decode()


class _Check:
    """Goes through the entries, and raises UsageError for what is no plain value, or too much."""

    def __init__(self, source: SettingsText) -> None:
        self._source, self._count = source, 0

    def entry(self, size: object, entry: object) -> None:
        key = f"nodes.{size}"
        if type(size) is not int or size < 1:
            raise self._source.mistake(key, f"{str(size)[:60]} is no number of nodes: those are from 1 on")
        if not isinstance(entry, Mapping):
            raise self._source.mistake(
                key, f"the entry for {size} must be names with values, as in `lr: 0.001`"
            )
        self._value(key, entry, DEPTH)

    def _value(self, key: str, value: Any, depth: int) -> None:
        # Counted here: an alias of YAML may stand for many, or for what it stands in.
        self._count += 1
        if self._count > MOST or depth < 0:
            most = f"{DEPTH} levels" if depth < 0 else f"{MOST} values"
            raise self._source.mistake(key, f"{key[:120]} is too much: a policy has {most} at most")
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if type(name) is not str:
                    text = f"{key} has the name {str(name)[:60]}, which is no text: quote it"
                    raise self._source.mistake(key, text)
                self._value(f"{key}.{name}", inner, depth - 1)
        elif isinstance(value, list):
            for inner in value:
                self._value(key, inner, depth - 1)
        elif (why := _why_not(value)) is not None:
            raise self._source.mistake(key, f"{key} {why}")


def _why_not(value: object) -> str | None:
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return f"is the text {value!r} for YAML: write a number with a dot and a sign, as in 3.0e-4 or 1.0e+6"
    whole = type(value) is int and -(1 << 63) <= value < 1 << 63
    if whole or isinstance(value, (str, bool)) or (isinstance(value, float) and math.isfinite(value)):
        return None
    return "must be a number, a string, true or false, or a list or mapping of such"
