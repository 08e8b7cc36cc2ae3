"""What sources of files have in common: several files, opened in order, whose samples have one numbering."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks.data.cache import Cache
from ckptless.pytorch_hooks.data.files import DataFile

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Part = TypeVar("Part")


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
        self._cache = cache or Cache()
        self._parts: list[Part] = []
        self._firsts = np.zeros(1, dtype=np.int64)
        # What was given, and what it was turned into.
        self._given: list[DataFile] = []
        self._held: list[DataFile] = []

    @property
    def cache(self) -> Cache:
        """Where its entries are."""
        return self._cache

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
