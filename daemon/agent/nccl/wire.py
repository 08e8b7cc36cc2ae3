"""The bytes of NCCL's bootstrap: unique ids, what a rank tells its root, and what it is answered.

No input or output here. A rank connects to the address in its unique id, sends an opening (`u64 magic`, `u32`
socket type, `i32` length) and that many bytes, and hangs up. It is answered over a connection of its own, in
the same form. All of it is little endian, but for the ports. The layouts are those of NCCL's sources from
2.12 to 2.30 and of its binaries up to 2.32; the length tells which it is.
"""

import ipaddress
import struct
from collections.abc import Sequence

from msgspec import Struct

from ckptless.daemon.protocol.errors import ProtocolError

ID_NBYTES = 128
MAGIC_NBYTES, OPENING_NBYTES = 8, 16
# ncclSocketTypeBootstrap, the same in every version.
SOCKET_TYPE = 1
SOCKADDR_NBYTES = 28

_AF_INET, _AF_INET6 = 2, 10
_OPENING = struct.Struct("<QIi")


class UnknownLayoutError(ProtocolError):
    """A message of a length that no known NCCL sends: it is a version that ckptless has not seen."""


class Address(Struct, frozen=True):
    """A numeric address and a TCP port; `scope` is the interface of a link-local IPv6 address, else 0."""

    host: str
    port: int
    scope: int = 0


class UniqueId(Struct, frozen=True):
    """The content of an ncclUniqueId."""

    magic: int
    root: Address


class Opening(Struct, frozen=True):
    """The first 16 bytes of a connection."""

    magic: int
    nbytes: int


class Layout(Struct, frozen=True):
    """The offsets in a check-in. Before `listen_at` stand integers: rank, number of ranks, and so on."""

    versions: str
    ints: struct.Struct
    listen_at: int
    next_nbytes: int


LAYOUTS = {
    64: Layout("2.12 to 2.22", struct.Struct("<2i"), 8, SOCKADDR_NBYTES),
    172: Layout("2.23 to 2.28", struct.Struct("<4i"), 16, 128),
    176: Layout("2.29 to 2.32", struct.Struct("<5i"), 20, 128),
}


class CheckIn(Struct, frozen=True):
    """A rank's check-in: `listen` is where it wants its answer, `connect` what the rank before needs.

    `connect` is opaque to a root. `root` and `roots` are this root's number, and how many there are; `offset`
    is that of a communicator that is made larger (ncclCommGrow), else 0.
    """

    rank: int
    ranks: int
    root: int
    roots: int
    offset: int
    listen: Address
    connect: bytes


# ------------------------------------------------------------------------------------- addresses


def encode_address(address: Address) -> bytes:
    """A `union ncclSocketAddress`. Raises ValueError where the host is no numeric address."""
    host = ipaddress.ip_address(address.host)
    if isinstance(host, ipaddress.IPv4Address):
        return struct.pack("<H", _AF_INET) + struct.pack(">H", address.port) + host.packed + bytes(20)
    head = struct.pack("<H", _AF_INET6) + struct.pack(">H", address.port) + bytes(4)
    return head + host.packed + struct.pack("<I", address.scope)


def decode_address(data: bytes) -> Address:
    """Raises ProtocolError."""
    if len(data) != SOCKADDR_NBYTES:
        raise ProtocolError(f"a socket address of {len(data)} bytes")
    (family,), (port,) = struct.unpack_from("<H", data), struct.unpack_from(">H", data, 2)
    if port == 0:
        raise ProtocolError("a socket address without a port")
    # What follows an IPv4 address is padding, and NCCL does not always clear it.
    if family == _AF_INET:
        return Address(str(ipaddress.IPv4Address(data[4:8])), port)
    if family == _AF_INET6:
        (scope,) = struct.unpack_from("<I", data, 24)
        return Address(str(ipaddress.IPv6Address(data[8:24])), port, scope)
    raise ProtocolError(f"a socket address of family {family}")


# ----------------------------------------------------------------------------------- unique ids


def encode_id(unique_id: UniqueId) -> bytes:
    """An ncclUniqueId, as every NCCL from 2.16 on reads it (from 2.29 on with `nRanks`, here 0)."""
    handle = struct.pack("<Q", unique_id.magic) + encode_address(unique_id.root)
    return handle.ljust(ID_NBYTES, b"\0")


# -------------------------------------------------------------------------------------- messages


def decode_opening(data: bytes) -> Opening:
    """Raises ProtocolError; UnknownLayoutError where a rank of an unknown NCCL speaks."""
    magic, kind, nbytes = _OPENING.unpack(data)
    if kind != SOCKET_TYPE:
        raise ProtocolError(f"a connection of type {kind}")
    if nbytes not in LAYOUTS:
        raise UnknownLayoutError(f"a check-in of {nbytes} bytes; known are {describe(list(LAYOUTS))}")
    return Opening(magic, nbytes)


def describe(lengths: Sequence[int]) -> str:
    """The layouts of these lengths, in words."""
    return ", ".join(f"{nbytes} (NCCL {LAYOUTS[nbytes].versions})" for nbytes in lengths)


def decode_check_in(data: bytes) -> CheckIn:
    """Raises ProtocolError; UnknownLayoutError."""
    layout = LAYOUTS.get(len(data))
    if layout is None:
        raise UnknownLayoutError(f"a check-in of {len(data)} bytes; known are {describe(list(LAYOUTS))}")
    rank, ranks, *more = layout.ints.unpack_from(data)
    root, roots, offset = (*more, 0)[:3] if more else (0, 1, 0)
    next_at = layout.listen_at + SOCKADDR_NBYTES
    listen = decode_address(data[layout.listen_at : next_at])
    return CheckIn(rank, ranks, root, roots, offset, listen, data[next_at:])


def encode_message(magic: int, payload: bytes) -> bytes:
    """An opening and what it announces: a check-in, or the answer to one."""
    return _OPENING.pack(magic, SOCKET_TYPE, len(payload)) + payload
