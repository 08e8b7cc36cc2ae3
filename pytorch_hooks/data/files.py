"""A data file that is read at random for days, and must stay what it was when it was opened."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import msgspec

from ckptless.daemon.api.errors import DataError


class Stamp(msgspec.Struct, frozen=True):
    """By what a changed file is known: name, size in bytes, time of the last change in ns."""

    path: str
    nbytes: int
    changed_ns: int

    def same_content(self) -> tuple[str, int]:
        """What is the same for a copy of the file on another node."""
        return Path(self.path).name, self.nbytes


class DataFile:
    """An open file, read by several processes (it has no position); `close` closes it. Raises DataError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"cannot open {self.path}: {error.strerror}") from error
        self.close = weakref.finalize(self, os.close, self._fd)
        self.stamp = self._stamp()

    def _stamp(self) -> Stamp:
        status = os.fstat(self._fd)
        return Stamp(str(self.path), status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Raises DataError if the file is not what it was."""
        now = self._stamp()
        if now != self.stamp:
            raise DataError(
                f"{self.path} was changed while it was read: it had {self.stamp.nbytes} bytes and has "
                f"{now.nbytes}"
                if now.nbytes != self.stamp.nbytes
                else f"{self.path} was changed while it was read"
            )

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`."""
        self.check()
        try:
            data = os.pread(self._fd, end - begin, begin)
        except OSError as error:
            raise DataError(f"cannot read {self.path} at byte {begin}: {error.strerror}") from error
        if len(data) != end - begin:
            raise DataError(f"{self.path} ends at byte {begin + len(data)}, not at {end} or later")
        return data
