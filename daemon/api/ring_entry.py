"""An entry of a ring as it lies in its memfd: a header, the position after the batch, the batch itself.

Pure. The header says which batch of which data it is, and has an xxh3_128 of all that follows it; it ends
with an xxh3_64 of itself. So an entry can be verified wherever it comes from: a producer, or another node.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from ckptless.daemon.api.errors import BadEntryError

MAGIC = b"ckptBTCH"
FORMAT = 1
ALIGN_NBYTES = 64
POSITION_LIMIT = 1 << 20
ENTRY_LIMIT = 1 << 40
SEQ_LIMIT = 1 << 62

# magic, format, zero, bytes of the position; manifest; stream, sequence number, bytes of the batch; digest of
# what follows the header. Then zeros, and the header's own digest.
_FIXED = struct.Struct("<8sHHI16sQQQ16s")
HEADER_NBYTES = 128
_OWN = struct.Struct("<Q")


@dataclass(frozen=True)
class EntryHeader:
    """Which batch it is: number `seq` of `stream`, of data whose `manifest` has this digest (32 hex digits).

    `position_nbytes` and `batch_nbytes` are the sizes of what follows, `digest` (hex) that of all of it.
    """

    manifest: str
    stream: int
    seq: int
    position_nbytes: int
    batch_nbytes: int
    digest: str

    @property
    def batch_at(self) -> int:
        """Where the batch begins."""
        return batch_at(self.position_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole entry."""
        return self.batch_at + self.batch_nbytes

    def check(self, manifest: str, stream: int, seq: int) -> None:
        """Raise BadEntryError where it is another one."""
        if (self.manifest, self.stream, self.seq) != (manifest, stream, seq):
            raise BadEntryError(
                f"batch {self.seq} of stream {self.stream}, manifest {self.manifest[:8]}, in place of batch "
                f"{seq} of stream {stream}, manifest {manifest[:8]}"
            )


def batch_at(position_nbytes: int) -> int:
    """Where the batch of an entry begins."""
    return -(-(HEADER_NBYTES + position_nbytes) // ALIGN_NBYTES) * ALIGN_NBYTES


def body_digest(position: bytes, batch_nbytes: int, parts: Iterable[tuple[int, memoryview | bytes]]) -> str:
    """The digest of what follows the header, hex; `parts` of the batch as `batch_codec.Encoded` has them."""
    body = xxhash.xxh3_128(position)
    body.update(bytes(batch_at(len(position)) - HEADER_NBYTES - len(position)))
    end = 0
    for offset, part in parts:
        body.update(bytes(offset - end))
        body.update(part)
        end = offset + len(part)
    body.update(bytes(batch_nbytes - end))
    return body.hexdigest()


def encode(header: EntryHeader) -> bytes:
    """The header's bytes. Raises BadEntryError where a field is beyond its limits."""
    _check(header)
    fixed = _FIXED.pack(
        *(MAGIC, FORMAT, 0, header.position_nbytes, bytes.fromhex(header.manifest)),
        *(header.stream, header.seq, header.batch_nbytes, bytes.fromhex(header.digest)),
    )
    body = fixed.ljust(HEADER_NBYTES - _OWN.size, b"\0")
    return body + _OWN.pack(xxhash.xxh3_64_intdigest(body))


def decode(data: memoryview | bytes) -> EntryHeader:
    """The header that `data`, which is exactly one entry, begins with. Raises BadEntryError."""
    if len(data) < HEADER_NBYTES:
        raise BadEntryError(f"an entry of {len(data)} bytes has no header")
    head = bytes(data[:HEADER_NBYTES])
    body, own = head[: -_OWN.size], _OWN.unpack_from(head, HEADER_NBYTES - _OWN.size)[0]
    magic, form, zero, position_nbytes, manifest, stream, seq, batch_nbytes, digest = _FIXED.unpack_from(head)
    if magic != MAGIC:
        raise BadEntryError("no entry of a ring: the magic number is wrong")
    if form != FORMAT:
        raise BadEntryError(f"an entry of format {form}; this is {FORMAT}")
    if xxhash.xxh3_64_intdigest(body) != own:
        raise BadEntryError("the entry's header does not match its own digest")
    if zero or any(body[_FIXED.size :]):
        raise BadEntryError("the entry's header has something where it must be empty")
    found = EntryHeader(manifest.hex(), stream, seq, position_nbytes, batch_nbytes, digest.hex())
    _check(found)
    if found.nbytes != len(data):
        raise BadEntryError(f"an entry of {len(data)} bytes; its header says {found.nbytes}")
    return found


def verify(data: memoryview, manifest: str, stream: int, seq: int) -> EntryHeader:
    """Check all of an entry, of exactly these bytes. Raises BadEntryError. The GIL is released meanwhile."""
    header = decode(data)
    header.check(manifest, stream, seq)
    with data[HEADER_NBYTES:] as body:
        if xxhash.xxh3_128_hexdigest(body) != header.digest:
            raise BadEntryError(f"batch {seq} of stream {stream} does not match its digest")
    return header


def position_of(data: memoryview, header: EntryHeader) -> bytes:
    """The position after the batch of an entry."""
    return bytes(data[HEADER_NBYTES : HEADER_NBYTES + header.position_nbytes])


def _check(header: EntryHeader) -> None:
    if not 0 <= header.position_nbytes <= POSITION_LIMIT:
        raise BadEntryError(f"a position of {header.position_nbytes} bytes; the limit is {POSITION_LIMIT}")
    if not 0 <= header.batch_nbytes <= ENTRY_LIMIT:
        raise BadEntryError(f"a batch of {header.batch_nbytes} bytes; the limit is {ENTRY_LIMIT}")
    if not (0 <= header.stream < SEQ_LIMIT and 0 <= header.seq < SEQ_LIMIT):
        raise BadEntryError(f"batch {header.seq} of stream {header.stream}")
