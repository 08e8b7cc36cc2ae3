"""Where the records of a JSON lines file begin: an index, made once and kept in the cache.

    magic "CKIX", version u16, zero u16, records u64, xxh3_64 of all that follows u64       (little-endian)
    size and time of the data file u64, i64
    records + 1 times u64: where each record's line begins; last, where the file ends

A line of white space is no record.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from ckptless.daemon.api.errors import ProtocolError
from ckptless.pytorch_hooks.data.files import DataFile, Stamp

MAGIC = b"CKIX"
VERSION = 1
READ_NBYTES = 8 << 20
BOM = b"\xef\xbb\xbf"

Offsets = npt.NDArray[np.uint64]

_HEADER = struct.Struct("<4sHHQQ")
_OF = struct.Struct("<Qq")
_NEWLINE = 10
_SPACE = np.frombuffer(b" \t\r\n\v\f", dtype=np.uint8)


def offsets_of(file: DataFile, read_nbytes: int = READ_NBYTES) -> Offsets:
    """Find the records: (records + 1) offsets. Raises DataError."""
    size = file.stamp.nbytes
    first = len(BOM) if file.read(0, min(size, len(BOM))) == BOM else 0
    begins: list[Offsets] = [np.empty(0, dtype=np.uint64)]
    doubtful: list[npt.NDArray[np.bool_]] = [np.empty(0, dtype=bool)]
    at_start = True
    for begin in range(first, size, read_nbytes):
        data = np.frombuffer(file.read(begin, min(begin + read_nbytes, size)), dtype=np.uint8)
        lines = np.flatnonzero(data == _NEWLINE) + 1
        if at_start:
            lines = np.concatenate([[0], lines])
        at_start = len(lines) > 0 and lines[-1] == len(data)
        lines = lines[:-1] if at_start else lines
        begins.append(lines.astype(np.uint64) + np.uint64(begin))
        doubtful.append(np.isin(data[lines], _SPACE))
    found, blank = np.concatenate(begins), np.concatenate(doubtful)
    ends = np.append(found[1:], np.uint64(size))
    for at in np.flatnonzero(blank):
        blank[at] = not file.read(int(found[at]), int(ends[at])).strip()
    return np.append(found[~blank], np.uint64(size))


def write(out: BinaryIO, stamp: Stamp, offsets: Offsets) -> None:
    """Write an index."""
    content = _OF.pack(stamp.nbytes, stamp.changed_ns) + offsets.astype("<u8").tobytes()
    out.write(_HEADER.pack(MAGIC, VERSION, 0, len(offsets) - 1, xxhash.xxh3_64_intdigest(content)))
    out.write(content)


def read(path: Path, stamp: Stamp) -> Offsets:
    """Read an index of the file with this stamp. Raises ProtocolError for anything else, OSError."""
    return parse(path.read_bytes(), path, stamp)


def parse(data: bytes, path: Path | str, stamp: Stamp) -> Offsets:
    """Read an index that is known as `path`. Raises ProtocolError."""
    if len(data) < _HEADER.size + _OF.size + 8:
        raise ProtocolError(f"{path} is too short for an index of records")
    magic, version, zero, count, digest = _HEADER.unpack_from(data)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        raise ProtocolError(f"{path} is no index of records of version {VERSION}")
    content = memoryview(data)[_HEADER.size :]
    if len(content) != _OF.size + 8 * (count + 1) or xxhash.xxh3_64_intdigest(content) != digest:
        raise ProtocolError(f"{path} is damaged")
    if _OF.unpack_from(content) != (stamp.nbytes, stamp.changed_ns):
        raise ProtocolError(f"{path} is the index of another version of the data file")
    offsets: Offsets = np.frombuffer(content[_OF.size :], dtype="<u8").astype(np.uint64)
    if int(offsets[-1]) != stamp.nbytes or (np.diff(offsets.astype(np.int64)) <= 0).any():
        raise ProtocolError(f"{path} has offsets that do not rise to the file's end")
    return offsets
