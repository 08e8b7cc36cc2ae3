"""The kinds of options: how a value is written, what is accepted, and in which words others are refused."""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import MOST_INTERFACES

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?(ms|s|m|h)", re.ASCII)
_RATE_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_RATE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s?(k|M|G|Ki|Mi|Gi|)B/s", re.ASCII)
_UNITS_NBYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})\s?(B|KiB|MiB|GiB|TiB)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One row of the table. Its name, type and default are those of a field, see `default`.

    Said by a row: `help` is one line for the command line, and `unsaid` says there what holds where the
    option is not given, if that is not the default. `short` and `also` are further names there.
    `torchruns`: it is torchrun's as well, and so is a variable PET_NAME. `spec` is its word in `sbatch
    --ckptless=SPEC`, which the SPANK plugin hands on in a variable. `local_only`, `slurm_only`: it belongs to
    one way to run, the latter with what is said in the other. `restart`: a daemon reads it once.

    Said by the kind, below: `words` is what is accepted, as alternatives, and `read` gives the value of what
    stands in the file (not null), or None where it is not one. `shown` writes a value as the file has it,
    where that is not plain YAML. `suffix` is the unit at the end of the field's name. `nothing` is the word
    for None, on the command line `cli_nothing`. `plain`: outside the file it is a plain number.
    """

    help: str = field(default="", kw_only=False)
    unsaid: str = ""
    short: str = ""
    also: tuple[str, ...] = ()
    metavar: str | None = None
    torchruns: bool = False
    spec: str = ""
    local_only: bool = False
    slurm_only: str = ""
    restart: bool = False

    words: tuple[str, ...] = ()
    read: Callable[[object], Any] = lambda written: written
    shown: Callable[[Any], str] | None = None
    suffix: str = ""
    unit: str | None = None
    nothing: str = "null"
    cli_nothing: str = ""
    quoted: bool = True
    plain: type[int] | type[float] | None = None
    low: float = 0
    high: float | None = None
    click_type: Any = click.STRING
    multiple: bool = False

    def default(self, value: object = None) -> Any:
        """The field of a dataclass that has this row and default."""
        return field(default=value, metadata={"option": self})

    def required(self) -> Any:
        """The same for what has no default."""
        return field(metadata={"option": self})

    def wanted(self, nothing: str = "") -> str:
        """Return what is accepted, in the words of an error message; `nothing` is one more alternative."""
        if nothing:
            return f"{', '.join(self.words)}, or {nothing}"
        return " or ".join(filter(None, (", ".join(self.words[:-1]), self.words[-1])))

    @property
    def variable(self) -> str:
        """The variable that the SPANK plugin sets."""
        return f"CKPTLESS_{self.spec.upper().replace('-', '_')}"

    def read_word(self, source: str, text: str) -> Any:
        """The value of a text that `source` (an option, a variable) gives. Raises UsageError."""
        if self.plain is not None:
            return self._number(source, text)
        if self.cli_nothing and text == self.cli_nothing:
            return 0.0
        found = self.read(text)
        if found is None:
            raise UsageError(f"{source} is {text[:60]!r}: it must be {self.wanted(self.cli_nothing)}")
        return found

    def _number(self, source: str, text: str) -> float:
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
            raise UsageError(f"{source} is {text[:40]!r}: it must be a number")
        value = float(text)
        if self.plain is int and not value.is_integer():
            raise UsageError(f"{source} is {value}: it must be a whole number")
        if value < self.low or (self.high is not None and value > self.high):
            raise UsageError(f"{source} is {value:g}: it must be from {self.low:g} to {self.high:g}")
        return int(value) if self.plain is int else value


def flag(help: str, **row: Any) -> Option:
    """There or not; on the command line only."""
    return Option(help, click_type=click.BOOL, **row)


def folder(help: str, *, file_okay: bool = True, **row: Any) -> Option:
    """A path on the command line."""
    return Option(help, metavar="DIR", click_type=click.Path(path_type=Path, file_okay=file_okay), **row)


def file(help: str, **row: Any) -> Option:
    """A file's path on the command line."""
    return Option(help, metavar="FILE", click_type=click.Path(path_type=Path, dir_okay=False), **row)


def choice(help: str = "", *, among: tuple[str, ...], **row: Any) -> Option:
    """One of some words."""
    read = lambda written: written if isinstance(written, str) and written in among else None  # noqa: E731
    return Option(help, words=among, read=read, click_type=click.Choice(among), **row)


def checked(*words: str, good: Callable[[Any], object], **row: Any) -> Option:
    """Whatever `good` accepts, as it stands."""
    return Option(words=words, read=lambda written: written if good(written) else None, **row)


def text(*words: str, good: Callable[[str], object], **row: Any) -> Option:
    """A text that `good` accepts."""
    return checked(*words, good=lambda written: isinstance(written, str) and good(written), **row)


def number(help: str = "", *, low: int = 0, high: int | None = None, **row: Any) -> Option:
    """A whole number from `low` to `high`; `what` is its name in words."""
    words = f"{row.pop('what', 'a number')} from {low} to {high}"
    return Option(
        help,
        words=(words,),
        read=lambda written: _within(low, written if type(written) is int else None, high),
        plain=int,
        click_type=click.IntRange(low, high),
        **{"metavar": "N", "low": low, "high": high, **row},
    )


def span(help: str = "", *, low: float, high: float, such_as: str, **row: Any) -> Option:
    """A duration: with a unit in the file, plain seconds on the command line and in the environment."""
    return Option(
        help,
        words=(f"a duration with its unit from {duration(low)} to {duration(high)}, such as {such_as}",),
        read=lambda written: _within(low, seconds(written), high),
        shown=duration,
        plain=float,
        click_type=click.FloatRange(low, high),
        **{"metavar": "SECONDS", "suffix": "_s", "unit": "s", "low": low, "high": high, **row},
    )


def speed(help: str = "", *, low: float, high: float, such_as: str, **row: Any) -> Option:
    """Bytes per second; no limit is `none` on the command line, where null is "nothing said"."""
    return Option(
        help,
        words=(f"a rate with its unit from {rate_text(low)} to {rate_text(high)}, such as {such_as}",),
        read=lambda written: _within(low, rate(written), high),
        shown=rate_text,
        cli_nothing="none",
        **{"metavar": "RATE", "suffix": "_rate", "unit": "B/s", "low": low, "high": high, **row},
    )


def counts(help: str, *, low: int, high: int, most: int, **row: Any) -> Option:
    """Up to `most` whole numbers from `low` to `high`, ascending and parted by colons."""
    return Option(
        help,
        words=(f"up to {most} numbers from {low} to {high} that ascend, such as 4:8:12",),
        read=lambda written: _ascending(written, low, high, most),
        **{"metavar": "N:N", **row},
    )


def memory(help: str = "", *, low: int, high: int, such_as: str, **row: Any) -> Option:
    """A number of bytes."""
    bounds = f" from {size(low)} to {size(high)}, such as {such_as}" if low else f", such as {such_as}, or 0"
    return Option(
        help,
        words=(f"a size with its unit{bounds}",),
        read=lambda written: _within(low, nbytes(written), high),
        shown=size,
        **{"metavar": "SIZE", "suffix": "_nbytes", "unit": "B", "low": low, "high": high, **row},
    )


def _within(low: float, value: float | None, high: float | None) -> Any:
    """The value, or None where it is none or out of its range."""
    return value if value is not None and low <= value and (high is None or value <= high) else None


def _ascending(written: object, low: int, high: int, most: int) -> tuple[int, ...] | None:
    if not isinstance(written, str) or not re.fullmatch(r"\d{1,5}(:\d{1,5})*", written, re.ASCII):
        return None
    found = tuple(int(part) for part in written.split(":"))
    rises = list(found) == sorted(set(found))
    return found if rises and low <= found[0] and found[-1] <= high and len(found) <= most else None


# ----------------------------------------------------------------------------------------- units


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


# --------------------------------------------------------------------------------- lists of names


def names(written: object) -> tuple[str, ...] | None:
    """A list of names, each once, as a tuple; None for what is not one."""
    return _each_once(written, re.compile(r"[^\s,]{1,64}").fullmatch)


def paths(written: object) -> tuple[str, ...] | None:
    """A list of absolute paths, each once, as a tuple; None for what is not one."""
    return _each_once(written, re.compile(r"/[^\x00-\x1f]{0,4095}").fullmatch)


def networks(written: object) -> tuple[str, ...] | None:
    """A list of networks, each once, as a tuple; None for what is not one."""
    return _each_once(written, is_network)


def _each_once(written: object, good: Callable[[str], object]) -> tuple[str, ...] | None:
    if not isinstance(written, list) or not all(isinstance(one, str) and good(one) for one in written):
        return None
    return tuple(written) if len(set(written)) == len(written) else None


def mapping(written: object, good: Callable[[str], object]) -> dict[str, str] | None:
    """A mapping of names (small letters, digits and hyphens) to texts that are `good`; None for another."""
    if not isinstance(written, Mapping):
        return None
    names_fine = all(isinstance(n, str) and re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", n) for n in written)
    texts_fine = all(isinstance(text, str) and good(text) for text in written.values())
    return dict(written) if names_fine and texts_fine else None


# ------------------------------------------------------------------------------- addresses of nodes


def is_bind(text: str) -> bool:
    """Whether it may be an address, a network or an interface."""
    # Or an interface: 15 bytes in Linux; not digits and dots alone, which is a mistyped address.
    return is_network(text) or re.fullmatch(r"(?=.*[A-Za-z])[A-Za-z0-9_.:@-]{1,15}", text) is not None


def is_network(text: str) -> bool:
    """Whether it is a network, or an address, which is one of its own."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def endpoint(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int] | None:
    """The address and port of "127.0.0.1:9821" or "[::1]:9821"; None for what is not one."""
    found = re.fullmatch(r"(?:([0-9.]+)|\[([0-9a-fA-F:.]+)\]):(\d{1,5})", text, re.ASCII)
    if found is None or not 1024 <= int(found[3]) <= 65535:
        return None
    try:
        return ipaddress.ip_address(found[1] or found[2]), int(found[3])
    except ValueError:
        return None


def is_shared_bind(text: str) -> bool:
    """Whether many nodes can have one: a network of more than one address, or an interface."""
    try:
        return ipaddress.ip_network(text).num_addresses > 1
    except ValueError:
        return is_bind(text)


def shared_binds(written: object) -> str | None:
    """A list of interfaces and networks, or a text that joins them by +, as such a text; None for another."""
    names = written.split("+") if isinstance(written, str) else written
    if not isinstance(names, list) or not all(
        isinstance(name, str) and is_shared_bind(name) for name in names
    ):
        return None
    return "+".join(names) if 0 < len(names) == len(set(names)) <= MOST_INTERFACES else None
