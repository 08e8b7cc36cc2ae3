"""A version as it lies in a slot and goes over the wire: a header in pages of its own, then the payload.

Pure. The header binds job, run, shard, writer, step, generation and layout to the xxh3_64 of every chunk of
the payload, and ends with an xxh3_128 of itself, by which it is known. Whoever writes a version invalidates
what was in the slot first and writes the header last, so that a half written slot holds no version.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ckptless.daemon.protocol.errors import BadVersionError
from ckptless.daemon.protocol.model import NO_RUN

MAGIC = b"ckptVERS"
FORMAT = 1
PAGE_NBYTES = 4096
CHUNK_NBYTES = 16 << 20
# Versions of a shard that a node keeps, its own or a replica: the one being written, the newest committed
# one, and one more, since a rank may be a step behind when another has gone on (docs/design/restoring.md).
SLOTS = 3
JOB_LIMIT = 256
"""Bytes of a job's name in UTF-8."""
PAYLOAD_LIMIT = 1 << 46
HEADER_LIMIT = 64 << 20

# magic, format, bytes of the job's name, of the header, of a chunk; shard, rank; step, generation, bytes of
# the payload; layout, twins' digest, run, job. The chunks' digests follow; last is the header's own.
_FIXED = struct.Struct(f"<8sHHIIIIQQQ16s16s16s{JOB_LIMIT}s")
_DIGEST_NBYTES = 16
STEP_LIMIT = 1 << 62


class Origin(NamedTuple):
    """The owner of a state: the job's name, and JobSpec.run_id (32 hex digits), as names are used again."""

    job: str
    run: str = NO_RUN

    def __str__(self) -> str:
        return f"job {self.job} ({self.run[:8]})"


@dataclass(frozen=True)
class Header:
    """The header of a version. `layout`, `digest`, `run` are hex (32 digits), `nbytes` those of the payload.

    `chunks` are xxh3_64, of `chunk_nbytes` bytes each; the last one may be shorter. Versions of twins are
    compared by `twins` (`api.twins`, hex), unless it is "". `digest` is the header's own, "" before it is
    encoded.
    """

    job: str
    shard: int
    rank: int
    step: int
    generation: int
    layout: str
    nbytes: int
    chunks: tuple[int, ...]
    chunk_nbytes: int = CHUNK_NBYTES
    digest: str = ""
    run: str = NO_RUN
    twins: str = ""

    @property
    def origin(self) -> Origin:
        """The owner of the state."""
        return Origin(self.job, self.run)

    @property
    def header_nbytes(self) -> int:
        """Bytes before the payload."""
        return header_nbytes(self.nbytes, self.chunk_nbytes)

    @property
    def total_nbytes(self) -> int:
        """Bytes of header and payload."""
        return self.header_nbytes + self.nbytes

    def is_like(self, other: "Header") -> bool:
        """Whether it heads the same payload: a twin's version, of the same step of the same shard."""
        mine = (self.origin, self.shard, self.step, self.layout, self.nbytes, self.chunk_nbytes, self.chunks)
        theirs = (other.origin, other.shard, other.step, other.layout, other.nbytes, other.chunk_nbytes)
        return mine == (*theirs, other.chunks)

    def is_twin_of(self, other: "Header") -> bool:
        """Whether it is the same but for what each rank has for itself, such as batch norm's statistics."""
        mine = (self.origin, self.shard, self.step, self.layout, self.nbytes, self.twins)
        theirs = (other.origin, other.shard, other.step, other.layout, other.nbytes, other.twins)
        return self.twins != "" and mine == theirs

    def check_chunk(self, index: int, digest: int) -> None:
        """Raise BadVersionError unless that is the digest of this chunk."""
        if digest != self.chunks[index]:
            text = (
                f"chunk {index} of {len(self.chunks)} of step {self.step}, shard {self.shard}, does not match"
            )
            raise BadVersionError(text, index)

    def check(self, origin: Origin, shard: int, step: int, newest: int) -> None:
        """Raise BadVersionError unless it is this step of this shard, of generation `newest` at most."""
        if (self.origin, self.shard, self.step) != (origin, shard, step):
            raise BadVersionError(
                f"a version of step {self.step}, shard {self.shard}, {self.origin}, "
                f"in place of step {step}, shard {shard}, {origin}"
            )
        if self.generation > newest:
            raise BadVersionError(
                f"a version of generation {self.generation}, and the newest that there is is {newest}"
            )


def header_nbytes(nbytes: int, chunk_nbytes: int = CHUNK_NBYTES) -> int:
    """Bytes of the header of a payload of `nbytes`: whole pages."""
    count = -(-nbytes // chunk_nbytes)
    return -(-(_FIXED.size + 8 * count + _DIGEST_NBYTES) // PAGE_NBYTES) * PAGE_NBYTES


def slot_nbytes(nbytes: int) -> int:
    """Bytes of the slot for a payload of `nbytes` with its header: whole pages."""
    return -(-(header_nbytes(nbytes) + nbytes) // PAGE_NBYTES) * PAGE_NBYTES


def spans(nbytes: int, chunk_nbytes: int = CHUNK_NBYTES) -> Iterator[tuple[int, int]]:
    """Yield where each chunk of a payload begins and ends."""
    for start in range(0, nbytes, chunk_nbytes):
        yield start, min(start + chunk_nbytes, nbytes)


def digest_of(chunk: memoryview | bytes) -> int:
    """xxh3_64 of one chunk; the GIL is released meanwhile."""
    return xxhash.xxh3_64_intdigest(chunk)


def invalidate(slot: memoryview) -> None:
    """Before a slot is written to: whatever lies there is no version any more."""
    start = min(len(slot), _FIXED.size)
    slot[:start] = bytes(start)


def encode(header: Header) -> bytes:
    """The header's bytes. Raises BadVersionError where a field is beyond its limits."""
    job = header.job.encode()
    total = header_nbytes(header.nbytes, header.chunk_nbytes)
    if len(header.chunks) != -(-header.nbytes // header.chunk_nbytes):
        raise BadVersionError(f"{len(header.chunks)} digests for a payload of {header.nbytes} bytes")
    _check_fields(header, len(job), total)
    fixed = _FIXED.pack(
        *(MAGIC, FORMAT, len(job), total, header.chunk_nbytes, header.shard, header.rank),
        *(header.step, header.generation, header.nbytes, bytes.fromhex(header.layout)),
        *(bytes.fromhex(header.twins), bytes.fromhex(header.run), job),
    )
    chunks = struct.pack(f"<{len(header.chunks)}Q", *header.chunks)
    body = (fixed + chunks).ljust(total - _DIGEST_NBYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def write_header(slot: memoryview, header: Header) -> str:
    """Put the header where it belongs, when the payload is there; its digest, hex. Raises BadVersionError."""
    encoded = encode(header)
    slot[: len(encoded)] = encoded
    return encoded[-_DIGEST_NBYTES:].hex()


def decode(data: memoryview | bytes, told: str | None = None) -> Header:
    """The header that `data` begins with, which must have the digest `told`. Raises BadVersionError."""
    total = _length(data)
    if len(data) < total:
        raise BadVersionError(f"a header of {total} bytes is cut off after {len(data)}")
    head = bytes(data[:total])
    body, digest = head[:-_DIGEST_NBYTES], head[-_DIGEST_NBYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        raise BadVersionError("the header does not match its own digest")
    if told is not None and digest.hex() != told:
        raise BadVersionError("the header is sound, and is not the one that was told of")
    _, _, job_nbytes, _, chunk_nbytes, *rest = _FIXED.unpack_from(body)
    shard, rank, step, generation, nbytes, layout, twins, run, job = rest
    count = -(-nbytes // chunk_nbytes)
    end = _FIXED.size + 8 * count
    if any(job[job_nbytes:]) or body[end:].strip(b"\0"):
        raise BadVersionError("the header has something where it must be empty")
    try:
        name = job[:job_nbytes].decode()
    except UnicodeDecodeError as error:
        raise BadVersionError(f"the header's job is no text: {error}") from error
    chunks = struct.unpack_from(f"<{count}Q", body, _FIXED.size)
    compared = twins.hex() if any(twins) else ""
    found = Header(
        *(name, shard, rank, step, generation, layout.hex(), nbytes, chunks, chunk_nbytes, digest.hex()),
        run=run.hex(),
        twins=compared,
    )
    _check_fields(found, job_nbytes, total)
    return found


def _length(data: memoryview | bytes | bytearray) -> int:
    """Bytes of the header that begins here, checked as far as the first fields go."""
    if len(data) < _FIXED.size:
        raise BadVersionError(f"a version of {len(data)} bytes has no header")
    magic, form, job_nbytes, total, chunk_nbytes, _, _, _, _, nbytes, *_ = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise BadVersionError("no version lies here, or it was not written to its end")
    if form != FORMAT:
        raise BadVersionError(f"a version of format {form}; this is {FORMAT}")
    _check_sizes(nbytes, chunk_nbytes, job_nbytes)
    if total != header_nbytes(nbytes, chunk_nbytes) or total > HEADER_LIMIT:
        raise BadVersionError(f"a header of {total} bytes for a payload of {nbytes}")
    return int(total)


def _check_sizes(nbytes: int, chunk_nbytes: int, job_nbytes: int) -> None:
    if not 0 <= nbytes <= PAYLOAD_LIMIT:
        raise BadVersionError(f"a payload of {nbytes} bytes; the limit is {PAYLOAD_LIMIT}")
    if not PAGE_NBYTES <= chunk_nbytes <= 1 << 30 or chunk_nbytes % PAGE_NBYTES:
        raise BadVersionError(f"chunks of {chunk_nbytes} bytes")
    if not 0 < job_nbytes <= JOB_LIMIT:
        raise BadVersionError(f"a job's name of {job_nbytes} bytes; the limit is {JOB_LIMIT}")


def _check_fields(header: Header, job_nbytes: int, total: int) -> None:
    _check_sizes(header.nbytes, header.chunk_nbytes, job_nbytes)
    if total > HEADER_LIMIT:
        raise BadVersionError(f"a header of {total} bytes; the limit is {HEADER_LIMIT}")
    if "\0" in header.job:
        raise BadVersionError("the job's name has a NUL in it")
    if not (0 <= header.shard < 1 << 32 and 0 <= header.rank < 1 << 32):
        raise BadVersionError(f"a version of shard {header.shard}, rank {header.rank}")
    if not (0 <= header.step < STEP_LIMIT and 0 <= header.generation < STEP_LIMIT):
        raise BadVersionError(f"a version of step {header.step}, generation {header.generation}")


class ChunkDigests:
    """Makes the digests of a payload's chunks while the payload is being written, from its begin to its end.

    One thread at a time; the GIL is released meanwhile.
    """

    def __init__(self, payload: memoryview, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._payload, self._chunk_nbytes = payload, chunk_nbytes
        self._chunk, self._at = xxhash.xxh3_64(), 0
        self._found: list[int] = []

    def came(self, upto: int) -> None:
        """Note that what lies before offset `upto` is there, and stays as it is."""
        while self._at < upto:
            end = min((len(self._found) + 1) * self._chunk_nbytes, len(self._payload))
            until = min(upto, end)
            self._chunk.update(self._payload[self._at : until])
            self._at = until
            if until == end:
                self._found.append(self._chunk.intdigest())
                self._chunk.reset()

    def finish(self) -> tuple[int, ...]:
        """All of it is there: xxh3_64 of each chunk."""
        self.came(len(self._payload))
        return tuple(self._found)


def verify(slot: memoryview, told: str) -> Header:
    """Check a version that lies in `slot`, its header and every chunk. Raises BadVersionError.

    `slot` is exactly the version. The GIL is released while a chunk is read.
    """
    header = decode(slot, told)
    if header.total_nbytes != len(slot):
        raise BadVersionError(f"{len(slot)} bytes; the header says {header.total_nbytes}")
    check_chunks(slot, header, 0, header.nbytes)
    return header


def check_chunks(slot: memoryview, header: Header, start: int, end: int) -> None:
    """Check bytes `start` to `end` of the payload, which are whole chunks. Raises BadVersionError.

    `slot` is exactly the version. The GIL is released while a chunk is read.
    """
    base, size = header.header_nbytes, header.chunk_nbytes
    for index in range(start // size, -(-end // size)):
        first, last = index * size, min((index + 1) * size, header.nbytes)
        with slot[base + first : base + last] as chunk:
            header.check_chunk(index, digest_of(chunk))
