"""The folder of what is made from data files once and used by every process: record indices, unpacked copies.

An entry is a file that is complete or is not there: it is written under another name and renamed. Who makes
one holds a lock on a file beside it, so that the ranks of a node do not all unpack the same archive; the
lock ends with the process. What is over the budget goes, the longest unused first; whoever has it open keeps
what it has.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import xxhash

from ckptless.daemon.protocol.errors import DataError, ProtocolError
from ckptless.pytorch_hooks.agent_session import job_key
from ckptless.pytorch_hooks.data.files import (
    HEADER_NBYTES,
    DataFile,
    SealedFile,
    SealingWriter,
    check_header,
)

VARIABLE = "CKPTLESS_DATA_CACHE"
BUDGET_NBYTES = 256 << 30
LOCK_DEADLINE_S = 3600.0
LOCK_POLL_S = 0.05
SEALED = ".sealed"
REMADE = "data-cache-remade"

Numbers = npt.NDArray[np.int64]
# Magic "CKNR", version u16, zero u16, how many numbers u64, xxh3_64 of them u64; then the numbers, i64 each.
_NUMBERS = struct.Struct("<4sHHQQ")
_NUMBERS_MAGIC, _NUMBERS_VERSION = b"CKNR", 1


def default_folder() -> Path:
    """$CKPTLESS_DATA_CACHE, or ckptless/data in the user's cache folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptless" / "data"


class Cache:
    """A folder with a budget in bytes; nodes may share it.

    `folder`: if none is named CKPTLESS_DATA_CACHE, else ckptless/data in the user's cache folder. `encrypt`:
    entries are encrypted with the job's key; those of another key are made again. `told`: what was made
    again, as (kind of an event, text).
    """

    def __init__(
        self, folder: Path | None = None, budget_nbytes: int = BUDGET_NBYTES, *, encrypt: bool = False
    ) -> None:
        self.folder = folder or default_folder()
        self._budget_nbytes = budget_nbytes
        self.encrypts = encrypt
        self.told: list[tuple[str, str]] = []

    def open(self, name: str, make: Callable[[BinaryIO], None], *, nbytes: int = 0) -> DataFile:
        """`entry`, opened to be read. Raises DataError."""
        if not self.encrypts:
            return DataFile(self.entry(name, make, nbytes=nbytes))
        for _ in range(2):
            path = self.entry(name, make, nbytes=nbytes)
            try:
                return SealedFile(path, job_key.get(), path.name)
            except ProtocolError as error:
                self.told.append((REMADE, f"{path}: {error}"))
                self.drop(name)
        raise DataError(f"{path} cannot be read back after it was written: is the disk sound?")

    def read(self, name: str, make: Callable[[BinaryIO], None]) -> bytes:
        """All of an entry. Raises DataError."""
        file = self.open(name, make)
        try:
            return file.read(0, file.stamp.nbytes)
        finally:
            file.close()

    def numbers(self, name: str, make: Callable[[], Numbers]) -> Numbers:
        """An entry that is a row of numbers; made again where it is damaged. Raises DataError."""
        for _ in range(2):
            data = self.read(name, lambda out: put(out, pack_numbers(make())))
            try:
                return unpack_numbers(data)
            except ProtocolError:
                self.drop(name)
        raise DataError(f"{self.folder / name} cannot be read back after it was written: is the disk sound?")

    def _path(self, name: str) -> Path:
        return self.folder / (name + SEALED if self.encrypts else name)

    def entry(self, name: str, make: Callable[[BinaryIO], None], *, nbytes: int = 0) -> Path:
        """The file `name`; if it is not there, `make` writes it into the open file that it is given.

        `nbytes` is how large it is likely to be. Raises DataError: no room, no right to write, another
        process that has been making it for an hour, and what `make` raises.
        """
        path = self._path(name)
        try:
            if self._unusable(path) is None:
                return path
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(path):
                why = self._unusable(path)
                if why is not None:
                    self._make_room(nbytes, path)
                    self._write(path, make)
                if why:
                    self.told.append((REMADE, f"{path}: {why}"))
        except OSError as error:
            raise DataError(f"cannot write {path}: {error}; name a folder with room in {VARIABLE}") from error
        return path

    def drop(self, name: str) -> None:
        """Forget an entry that turned out to be bad."""
        self._path(name).unlink(missing_ok=True)

    def _unusable(self, path: Path) -> str | None:
        """Return why it cannot be used: "" where it is not there, None where it can be.

        Its age is the time of its last use; that of the last change is part of what it is.
        """
        try:
            # Another user's, readable: only who may write to it keeps its age.
            with contextlib.suppress(PermissionError):
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            if self.encrypts:
                with path.open("rb") as file:
                    check_header(file.read(HEADER_NBYTES), job_key.get())
        except FileNotFoundError:
            return ""
        except ProtocolError as error:
            return str(error)
        return None

    @staticmethod
    @contextlib.contextmanager
    def _locked(path: Path) -> Iterator[None]:
        limit = time.monotonic() + LOCK_DEADLINE_S
        with path.with_name(path.name + ".lock").open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > limit:
                        raise DataError(
                            f"another process has been making {path} for {LOCK_DEADLINE_S:.0f} s"
                        ) from None
                    time.sleep(LOCK_POLL_S)
            # The name stays: whoever waits for it has it open, and must not lock a file that is gone.
            yield

    def _write(self, path: Path, make: Callable[[BinaryIO], None]) -> None:
        # Under the lock a half-written one is of a process that is dead.
        scratch = path.with_name(path.name + ".part")
        try:
            with scratch.open("wb") as file:
                if self.encrypts:
                    writer = SealingWriter(file, job_key.get(), path.name)
                    make(cast(BinaryIO, writer))
                    writer.finish()
                else:
                    make(file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            if size > self._budget_nbytes:
                raise DataError(
                    f"{path} has {size} bytes, over the budget of {self._budget_nbytes}: raise it"
                )
            scratch.rename(path)
        finally:
            scratch.unlink(missing_ok=True)

    def _make_room(self, nbytes: int, but: Path) -> None:
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.suffix not in {".lock", ".part"} and path != but:
                    status = path.stat()
                    found.append((status.st_atime, status.st_size, path))
        taken = sum(size for _time, size, _path in found)
        for _time, size, path in sorted(found):
            if taken + nbytes <= self._budget_nbytes:
                return
            path.unlink(missing_ok=True)
            taken -= size


def put(out: BinaryIO, data: bytes) -> None:
    """Write a small entry."""
    out.write(data)


def key(*words: object) -> str:
    """A name for what is made of these."""
    return xxhash.xxh3_128_hexdigest("\0".join(map(str, words)).encode("utf-8", "surrogatepass"))


def pack_numbers(numbers: Numbers) -> bytes:
    """Encode a row of numbers."""
    content = numbers.astype("<i8").tobytes()
    digest = xxhash.xxh3_64_intdigest(content)
    return _NUMBERS.pack(_NUMBERS_MAGIC, _NUMBERS_VERSION, 0, len(numbers), digest) + content


def unpack_numbers(data: bytes) -> Numbers:
    """Decode what `pack_numbers` made. Raises ProtocolError for anything else."""
    if len(data) < _NUMBERS.size:
        raise ProtocolError("a row of numbers is cut off")
    magic, version, zero, count, digest = _NUMBERS.unpack_from(data)
    content = memoryview(data)[_NUMBERS.size :]
    if (magic, version, zero) != (_NUMBERS_MAGIC, _NUMBERS_VERSION, 0) or len(content) != 8 * count:
        raise ProtocolError(f"no row of numbers of version {_NUMBERS_VERSION}")
    if xxhash.xxh3_64_intdigest(content) != digest:
        raise ProtocolError("a row of numbers is damaged")
    return np.frombuffer(content, dtype="<i8").astype(np.int64)
