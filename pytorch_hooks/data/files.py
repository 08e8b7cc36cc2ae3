"""Files that are read at random for days, and must stay what they were when they were opened.

Entries of an encrypted cache can be read by the job's processes only: AES-256-GCM, in chunks for random
access. Such a file has a header (magic "CKSEALED", version u16, zero u16, bytes of a chunk u32, id of the
key, salt) and chunks of a fixed size, the last one shorter, each followed by its tag. Its key is derived from
the job's and the salt, so none encrypts two files; a chunk's nonce is its number, and whether it is the last.
Header and the entry's name are authenticated with every chunk: none of another file, entry or place is taken.
"""

from __future__ import annotations

import hmac
import io
import os
import secrets
import struct
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ckptless.daemon.protocol.errors import DataError, ProtocolError, UsageError

MAGIC, VERSION = b"CKSEALED", 1
CHUNK_NBYTES = 64 << 10
TAG_NBYTES = 16
# Decrypted chunks that a process keeps of a file.
KEPT_CHUNKS = 32

_HEADER = struct.Struct("<8sHHI16s32s")
HEADER_NBYTES = _HEADER.size
_NONCE = struct.Struct("<Q?3x")


class Stamp(msgspec.Struct, frozen=True):
    """The signs by which a changed file is known: name, size in bytes, time of the last change in ns."""

    path: str
    nbytes: int
    changed_ns: int

    def same_content(self) -> tuple[str, int]:
        """The part that is the same for a copy of the file on another node."""
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


# ------------------------------------------------------------------------------------------- encrypted


def _aes(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise UsageError(
            f"Cache(encrypt=True) needs cryptography: pip install 'ckptless[data-encrypted]' ({error})"
        ) from error
    return AESGCM(key)


def _derived(key: bytes, what: bytes) -> bytes:
    """32 bytes (HKDF-Expand, RFC 5869, of one block)."""
    return hmac.digest(key, b"ckptless cache " + what + b"\x01", "sha256")


class _Chunks:
    """Encrypts and decrypts the chunks of one file."""

    def __init__(self, key: bytes, header: bytes, name: str) -> None:
        self._aes = _aes(_derived(key, b"file " + header[-32:]))
        self._bound = header + name.encode()

    def seal(self, number: int, data: bytes, *, last: bool) -> bytes:
        sealed: bytes = self._aes.encrypt(_NONCE.pack(number, last), data, self._bound)
        return sealed

    def open(self, number: int, data: bytes, *, last: bool) -> bytes:
        """Raises ProtocolError."""
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._aes.decrypt(_NONCE.pack(number, last), data, self._bound)
        except (InvalidTag, ValueError) as error:
            raise ProtocolError(f"chunk {number} is damaged or was changed") from error
        return opened


def new_header(key: bytes) -> bytes:
    """Return the header of a new file."""
    return _HEADER.pack(MAGIC, VERSION, 0, CHUNK_NBYTES, _derived(key, b"id")[:16], secrets.token_bytes(32))


def check_header(header: bytes, key: bytes) -> None:
    """Raises ProtocolError for no such file, also for one of another key."""
    if len(header) < _HEADER.size:
        raise ProtocolError("it is too short")
    magic, version, zero, chunk_nbytes, key_id, _salt = _HEADER.unpack(header)
    if (magic, version, zero, chunk_nbytes) != (MAGIC, VERSION, 0, CHUNK_NBYTES):
        raise ProtocolError(f"it is no encrypted entry of version {VERSION}")
    if not hmac.compare_digest(key_id, _derived(key, b"id")[:16]):
        raise ProtocolError("it was encrypted with another job's key")


class SealingWriter(io.RawIOBase):
    """A file whose content comes to `out` encrypted; `finish` writes the rest."""

    def __init__(self, out: BinaryIO, key: bytes, name: str) -> None:
        super().__init__()
        header = new_header(key)
        self._out, self._chunks = out, _Chunks(key, header, name)
        self._waiting = bytearray()
        self._number = self._nbytes = 0
        out.write(header)

    def writable(self) -> bool:
        """True: it is only written."""
        return True

    def write(self, data: Any) -> int:
        """Take some more of what is to be encrypted."""
        with memoryview(data) as view, view.cast("B") as given:
            count = len(given)
            self._waiting += given
        self._nbytes += count
        # The last one is written by `finish`, which alone knows that it is.
        while len(self._waiting) > CHUNK_NBYTES:
            self._put(bytes(self._waiting[:CHUNK_NBYTES]), last=False)
            del self._waiting[:CHUNK_NBYTES]
        return count

    def tell(self) -> int:
        """Bytes that were written, before encryption."""
        return self._nbytes

    def _put(self, data: bytes, *, last: bool) -> None:
        self._out.write(self._chunks.seal(self._number, data, last=last))
        self._number += 1

    def finish(self) -> None:
        """Finish the file: no more comes."""
        self._put(bytes(self._waiting), last=True)
        self._waiting.clear()


class SealedFile(DataFile):
    """An encrypted entry, read like any file; `name` is the entry's. Several processes may, forked from one.

    Raises DataError, and ProtocolError where it cannot be the whole file that it was.
    """

    def __init__(self, path: Path, key: bytes, name: str) -> None:
        super().__init__(path)
        header = os.pread(self._fd, _HEADER.size, 0)
        check_header(header, key)
        self._chunks = _Chunks(key, header, name)
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        # A file that was cut off has no last chunk.
        self._chunk(self._last)

    def _stamp(self) -> Stamp:
        stamp = super()._stamp()
        body = stamp.nbytes - _HEADER.size
        self._last = max(0, -(-body // (CHUNK_NBYTES + TAG_NBYTES)) - 1)
        nbytes = max(0, body - (self._last + 1) * TAG_NBYTES)
        return Stamp(stamp.path, nbytes, stamp.changed_ns)

    def _chunk(self, number: int) -> bytes:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        sealed_nbytes = CHUNK_NBYTES + TAG_NBYTES
        sealed = os.pread(self._fd, sealed_nbytes, _HEADER.size + number * sealed_nbytes)
        opened = self._chunks.open(number, sealed, last=number == self._last)
        self._kept[number] = opened
        if len(self._kept) > KEPT_CHUNKS:
            self._kept.popitem(last=False)
        return opened

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`."""
        self.check()
        if end > self.stamp.nbytes:
            raise DataError(f"{self.path} ends at byte {self.stamp.nbytes}, not at {end} or later")
        if begin >= end:
            return b""
        try:
            first, last = begin // CHUNK_NBYTES, (end - 1) // CHUNK_NBYTES
            found = b"".join([self._chunk(number) for number in range(first, last + 1)])
        except OSError as error:
            raise DataError(f"cannot read {self.path} at byte {begin}: {error.strerror}") from error
        except ProtocolError as error:
            raise DataError(f"{self.path}: {error}; remove it, and it is made again") from error
        return found[begin - first * CHUNK_NBYTES : end - first * CHUNK_NBYTES]
