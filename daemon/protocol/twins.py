"""Pure: the digest by which twins' versions of a step are compared, made of the chunks' digests.

Hex: 16 digits of how the payload is laid out and what of it is compared, 16 of what is there. "" is a
version that is compared with nothing.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import xxhash

from ckptless.daemon.protocol import version

Span: TypeAlias = tuple[int, int]
Likeness: TypeAlias = Literal["equal", "differ", "incomparable"]

_HALF = 16


def shape_of(digest: str) -> str:
    """Return what two digests must have alike to be compared."""
    return digest[:_HALF]


def compare(one: str, other: str) -> Likeness:
    """Two digests: only payloads that are laid out alike can be told apart."""
    if not one or not other or shape_of(one) != shape_of(other):
        return "incomparable"
    return "equal" if one == other else "differ"


def twin_digest(header: version.Header, payload: memoryview, own: Sequence[Span] = ()) -> str:
    """Return the digest of the version that `header` heads; `own` bytes of the payload are each rank's own.

    `own` ascends, without overlaps. The payload is read in the chunks that these lie in, and nowhere else.
    """
    shape = struct.pack("<QI", header.nbytes, header.chunk_nbytes) + bytes.fromhex(header.layout)
    shape += b"".join(struct.pack("<QQ", *span) for span in own)
    chunks = list(header.chunks)
    size = header.chunk_nbytes
    touched = {index for start, end in own for index in range(start // size, -(-end // size))}
    for index in touched:
        chunks[index] = _without(payload, (index * size, min((index + 1) * size, header.nbytes)), own)
    what = xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(chunks)}Q", *chunks))
    return xxhash.xxh3_64_hexdigest(shape) + what


def _without(payload: memoryview, chunk: Span, own: Sequence[Span]) -> int:
    """The digest of a chunk, but for what is own."""
    first, last = chunk
    inside = [(max(start, first), min(end, last)) for start, end in own if start < last and end > first]
    hasher = xxhash.xxh3_64()
    for (_, start), (end, _) in pairwise([(first, first), *inside, (last, last)]):
        hasher.update(payload[start:end])
    return hasher.intdigest()
