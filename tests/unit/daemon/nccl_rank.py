"""What a rank of NCCL knows and says: the other ends of `nccl.wire` and `nccl.blocks`, for tests."""

import struct

from ckptless.daemon.agent.nccl.wire import (
    ID_NBYTES,
    LAYOUTS,
    SOCKADDR_NBYTES,
    CheckIn,
    UniqueId,
    decode_address,
    encode_address,
)
from ckptless.daemon.protocol.errors import ProtocolError


def root_of(rank: int, ranks: int, roots: int) -> int:
    """The root whose block a rank is in."""
    size, larger = divmod(ranks, roots)
    in_larger = larger * (size + 1)
    return rank // (size + 1) if rank < in_larger else larger + (rank - in_larger) // size


def decode_id(data: bytes) -> UniqueId:
    """Raises ProtocolError for what `encode_id` does not make."""
    if len(data) != ID_NBYTES:
        raise ProtocolError(f"a unique id of {len(data)} bytes")
    (magic,) = struct.unpack_from("<Q", data)
    if any(data[8 + SOCKADDR_NBYTES :]):
        raise ProtocolError("a unique id with something behind its address")
    return UniqueId(magic, decode_address(data[8 : 8 + SOCKADDR_NBYTES]))


def encode_check_in(check_in: CheckIn, nbytes: int) -> bytes:
    """Return the bytes that a rank sends after its opening, in the layout of that length."""
    layout = LAYOUTS[nbytes]
    ints = (check_in.rank, check_in.ranks, check_in.root, check_in.roots, check_in.offset)
    head = layout.ints.pack(*ints[: layout.ints.size // 4])
    return head + encode_address(check_in.listen) + check_in.connect.ljust(layout.next_nbytes, b"\0")
