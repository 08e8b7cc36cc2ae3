"""The sources of a loader's samples: their protocol, sources of files, and files of JSON.

Where the records of a file of JSON lines begin is found once, and kept in the cache. A line of white space is
no record.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ckptless.daemon.protocol.errors import BadRecordError, DataError, UsageError
from ckptless.pytorch_hooks.data.cache import Cache, Numbers, key, put
from ckptless.pytorch_hooks.data.files import DataFile

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Part = TypeVar("Part")

READ_NBYTES = 8 << 20
BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
_SPACE = np.frombuffer(b" \t\r\n\v\f", dtype=np.uint8)
COPY_NBYTES = 1 << 20
GZIP = b"\x1f\x8b"
# How much larger a file is unpacked: only a guess of the room that is wanted.
UNPACKED = 6


class Source(Protocol):
    """Samples that can be had by number. Used in several processes, forked after `open`."""

    def open(self) -> None:
        """Get ready; a second time it does nothing. Raises DataError, UsageError."""
        return

    def __len__(self) -> int:
        """Return how many samples there are, once it is open."""

    def get(self, index: int) -> Any:
        """One sample. Raises BadRecordError where only this one is bad, DataError otherwise."""

    def where(self, index: int) -> str:
        """Return where the sample is, for a reader of an error message."""

    def describe(self, *, strict: bool) -> object:
        """Return what it is made of, as plain data: equal only where the samples are.

        `strict`: also what differs between copies of the same files, such as their times.
        """

    def close(self) -> None:
        """Give back what `open` took."""
        return


def path_list(paths: Paths) -> list[Path]:
    """Read `paths`: one path or several. Raises UsageError for none."""
    found = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    if not found:
        raise UsageError("a data source needs at least one file")
    return found


class FileSource(Generic[Part]):
    """The half of a Source that does not depend on the format. A file has parts, a part has samples."""

    def __init__(self, paths: Paths, cache: Cache | None) -> None:
        self._paths = path_list(paths)
        self.cache = cache or Cache()
        self._parts: list[Part] = []
        self._firsts = np.zeros(1, dtype=np.int64)
        # What was given, and what it was turned into.
        self._given: list[DataFile] = []
        self._held: list[DataFile] = []

    def open(self) -> None:
        """See Source."""
        if self._given:
            return
        counts = [0]
        try:
            for path in self._paths:
                given = self._hold(DataFile(path))
                self._given.append(given)
                for part, count in self._open(given):
                    self._parts.append(part)
                    counts.append(count)
        except BaseException:
            self.close()
            raise
        self._firsts = np.cumsum(counts, dtype=np.int64)

    def _open(self, given: DataFile) -> Iterator[tuple[Part, int]]:
        """The parts of one file, and how many samples each has. Raises DataError, UsageError."""
        raise NotImplementedError

    def _hold(self, file: DataFile) -> DataFile:
        """Have `close` close it."""
        self._held.append(file)
        return file

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _find(self, index: int) -> tuple[Part, int]:
        """The part that has a sample, and the sample's number in it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._parts[at], index - int(self._firsts[at])

    def describe(self, *, strict: bool) -> list[object]:
        """See Source."""
        stamps = [file.stamp for file in self._given]
        files = [msgspec.structs.astuple(s) if strict else s.same_content() for s in stamps]
        return [type(self).__name__, len(self), files]

    def close(self) -> None:
        """See Source."""
        for file in self._held:
            file.close()
        self._parts, self._given, self._held = [], [], []


# ------------------------------------------------------------------------------------------------ JSON


class _Lines:
    """One file of JSON lines, unpacked, with its index."""

    def __init__(self, given: Path, file: DataFile, offsets: Numbers, damage: str) -> None:
        self.given, self.file, self.offsets, self.damage = given, file, offsets, damage
        self.count = len(offsets) - 1

    def get(self, number: int) -> bytes:
        """The bytes of a record."""
        return self.file.read(int(self.offsets[number]), int(self.offsets[number + 1]))

    def where(self, number: int) -> str:
        """File, line and byte of a record; reads the file up to there."""
        begin = int(self.offsets[number])
        lines = 1
        for at in range(0, begin, COPY_NBYTES):
            lines += self.file.read(at, min(at + COPY_NBYTES, begin)).count(b"\n")
        unpacked = "" if self.file.path == self.given else " of what is unpacked"
        return f"{self.given}, line {lines} (byte {begin}{unpacked})"


class JsonLines(FileSource[_Lines]):
    """Files with one JSON value in each line, UTF-8; what is gzip is unpacked into the cache first.

    A sample is what the line says. NaN and Infinity are no JSON. `keep_damaged`: of a gzip that ends too
    early the records before the break are used, and `damage` says what was lost; else `open` raises
    DataError.
    """

    def __init__(self, paths: Paths, *, cache: Cache | None = None, keep_damaged: bool = False) -> None:
        super().__init__(paths, cache)
        self._keep_damaged = keep_damaged

    @property
    def damage(self) -> list[str]:
        """The samples missing of damaged files, one sentence for each."""
        return [lines.damage for lines in self._parts if lines.damage]

    def _open(self, given: DataFile) -> Iterator[tuple[_Lines, int]]:
        plain, damage = self._plain(given)
        if damage and not self._keep_damaged:
            raise DataError(damage)
        lines = _Lines(given.path, plain, _index(plain, self.cache), damage)
        yield lines, lines.count

    def _plain(self, given: DataFile) -> tuple[DataFile, str]:
        """The file as lines of JSON, and what of it is damaged."""
        if given.read(0, min(2, given.stamp.nbytes)) != GZIP:
            return given, ""
        file, damage = _unpacked(given, self.cache)
        return self._hold(file), damage

    def get(self, index: int) -> Any:
        """See Source."""
        lines, number = self._find(index)
        try:
            return msgspec.json.decode(lines.get(number))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRecordError(f"{lines.where(number)}: {error}") from error

    def where(self, index: int) -> str:
        """See Source."""
        lines, number = self._find(index)
        return lines.where(number)


class Json(JsonLines):
    """Files that each hold one JSON array, whose elements are the samples; or gzip of such.

    A file is read into memory as a whole once, when it is first used: JSON lines are for what is larger.
    """

    def _plain(self, given: DataFile) -> tuple[DataFile, str]:
        found, damage = super()._plain(given)
        if damage:
            # Half an array is none.
            raise DataError(damage)
        stamp = given.stamp
        name = f"{key('array', given.path.resolve(), stamp.nbytes, stamp.changed_ns)}.jsonl"

        def make(out: BinaryIO) -> None:
            try:
                elements = msgspec.json.decode(found.read(0, found.stamp.nbytes), type=list[msgspec.Raw])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(f"{given.path} is no JSON array: {error}") from error
            for element in elements:
                # A line break in JSON is white space: within strings it is escaped.
                out.write(bytes(element).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")

        return self._hold(self.cache.open(name, make, nbytes=found.stamp.nbytes)), ""


def _index(file: DataFile, cache: Cache) -> Numbers:
    stamp = file.stamp
    name = f"{key('lines', file.path.resolve(), stamp.nbytes, stamp.changed_ns)}.index"
    offsets = cache.numbers(name, lambda: offsets_of(file))
    if not len(offsets) or offsets[0] < 0 or offsets[-1] != stamp.nbytes or (np.diff(offsets) <= 0).any():
        raise DataError(f"{cache.folder / name} is no index of {file.path}: remove it, and it is made again")
    return offsets


def offsets_of(file: DataFile, read_nbytes: int = READ_NBYTES) -> Numbers:
    """Find the records: (records + 1) offsets. Raises DataError."""
    size = file.stamp.nbytes
    first = len(BOM) if file.read(0, min(size, len(BOM))) == BOM else 0
    begins: list[Numbers] = [np.empty(0, dtype=np.int64)]
    doubtful: list[npt.NDArray[np.bool_]] = [np.empty(0, dtype=bool)]
    at_start = True
    for begin in range(first, size, read_nbytes):
        data = np.frombuffer(file.read(begin, min(begin + read_nbytes, size)), dtype=np.uint8)
        lines = np.flatnonzero(data == _NEWLINE) + 1
        if at_start:
            lines = np.concatenate([[0], lines])
        at_start = len(lines) > 0 and lines[-1] == len(data)
        lines = lines[:-1] if at_start else lines
        begins.append(lines + begin)
        doubtful.append(np.isin(data[lines], _SPACE))
    found, blank = np.concatenate(begins), np.concatenate(doubtful)
    ends = np.append(found[1:], size)
    for at in np.flatnonzero(blank):
        blank[at] = not file.read(int(found[at]), int(ends[at])).strip()
    return np.append(found[~blank], size)


def _unpacked(given: DataFile, cache: Cache) -> tuple[DataFile, str]:
    """The file without gzip, and what of it is damaged."""
    stamp = given.stamp
    name = f"{key('gzip', given.path.resolve(), stamp.nbytes, stamp.changed_ns)}.jsonl"
    damage_name = name.removesuffix(".jsonl") + ".damage"

    def unpack(out: BinaryIO) -> None:
        with given.path.open("rb") as packed:
            damage = _unpack(given.path, packed, out)
        given.check()
        # Before the other: whoever finds that one finds this one too.
        cache.drop(damage_name)
        cache.entry(damage_name, lambda note: put(note, damage.encode()))

    file = cache.open(name, unpack, nbytes=stamp.nbytes * UNPACKED)
    return file, cache.read(damage_name, lambda note: _find_damage(note, given.path)).decode()


def _find_damage(out: BinaryIO, path: Path) -> None:
    """The note of an unpacked file was lost: find out again."""
    with path.open("rb") as packed, Path(os.devnull).open("wb") as nowhere:
        put(out, _unpack(path, packed, nowhere).encode())


def _unpack(path: Path, packed: BinaryIO, out: BinaryIO) -> str:
    """Unpack what can be, in whole lines; what is wrong with the rest, "" if nothing is."""
    done = 0
    tail = b""
    try:
        with gzip.open(packed) as unpacked:
            while data := unpacked.read1(COPY_NBYTES):
                done += len(data)
                whole, newline, rest = (tail + data).rpartition(b"\n")
                out.write(whole + newline)
                tail = rest
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return f"{path} is a damaged gzip: after {done} bytes unpacked (at least): {error}"
    out.write(tail)
    return ""
