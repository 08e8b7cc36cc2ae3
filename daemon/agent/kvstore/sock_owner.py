"""Find the user who owns the other end of a TCP connection within this machine, as the kernel knows it.

It is asked for exactly one socket over NETLINK_SOCK_DIAG (see sock_diag(7)), which costs some microseconds
and takes no privilege; where that is not permitted, as under some seccomp filters, /proc/net/tcp is read.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = 0xFFFFFFFF
_TCP_LISTEN = 10
_HEADER = struct.Struct("=IHHII")
# struct inet_diag_req_v2: what is asked for, then the socket's own port and address, then its peer's.
_REQUEST = struct.Struct("=BBBxI2s2s16s16sIII")
# struct inet_diag_msg: the state and the ports, and at the end uid and inode.
_REPLY = struct.Struct("=BB2x2s2s16s16s3I3III")
_MAX_REPLY_NBYTES = 8192
_PROC_NET = Path("/proc/net")

Endpoint: TypeAlias = tuple[str, int]
Asker: TypeAlias = Callable[[Endpoint, Endpoint], "Owner | None"]


class Owner(NamedTuple):
    """The owner of a socket: the user that made it, and the number that names it in /proc/PID/fd."""

    uid: int
    inode: int


class CannotAskError(OSError):
    """The kernel does not answer this way."""


def best_asker() -> Asker | None:
    """The first way that gives the right answer about a connection of our own; None where none does."""
    for ask in (from_netlink, from_proc):
        with contextlib.suppress(OSError):
            if _is_right(ask):
                return ask
    return None


def _is_right(ask: Asker) -> bool:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
    ):
        found = ask(ours.getsockname(), server.getsockname())
        return found == Owner(os.getuid(), os.fstat(ours.fileno()).st_ino)


# ------------------------------------------------------------------------------------- netlink


def from_netlink(own: Endpoint, peer: Endpoint) -> Owner | None:
    """The owner of the socket at `own` that is connected to `peer`; None where it is gone.

    Raises OSError where the kernel does not answer this way.
    """
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG) as sock:
        sock.connect((0, 0))  # the kernel; nobody else is heard
        sock.send(encode_request(own, peer))
        # The kernel has answered before it returned from that call.
        return decode_reply(sock.recv(_MAX_REPLY_NBYTES, socket.MSG_DONTWAIT), own, peer)


def encode_request(own: Endpoint, peer: Endpoint) -> bytes:
    """A question for one TCP socket, by its own end and its peer's."""
    family, (own_at, peer_at) = _family(own), (_packed(own), _packed(peer))
    ports = struct.pack(">H", own[1]), struct.pack(">H", peer[1])
    body = _REQUEST.pack(
        family,
        socket.IPPROTO_TCP,
        0,
        _ALL_STATES,
        *ports,
        own_at,
        peer_at,
        0,
        _NO_COOKIE,
        _NO_COOKIE,
    )
    size = _HEADER.size + len(body)
    return _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body


def decode_reply(reply: bytes, own: Endpoint, peer: Endpoint) -> Owner | None:
    """Return the owner that the kernel's answer names. Raises CannotAskError."""
    _, kind, _, _, _ = _HEADER.unpack_from(reply)
    if kind == _NLMSG_ERROR:
        (number,) = struct.unpack_from("=i", reply, _HEADER.size)
        if number == -errno.ENOENT:
            return None
        raise CannotAskError(-number, os.strerror(-number))
    if kind != _SOCK_DIAG_BY_FAMILY or len(reply) < _HEADER.size + _REPLY.size:
        raise CannotAskError(errno.EPROTO, f"an answer of type {kind}, {len(reply)} bytes")
    found = _REPLY.unpack_from(reply, _HEADER.size)
    state, sport, dport, uid, inode = found[1], found[2], found[3], found[-2], found[-1]
    # Where there is no such connection the kernel may answer with a socket that listens on the port.
    if state == _TCP_LISTEN or (sport, dport) != (struct.pack(">H", own[1]), struct.pack(">H", peer[1])):
        return None
    return _owner(uid, inode)


def _owner(uid: int, inode: int) -> Owner | None:
    """A closed socket that still has something to say has no inode any more, and its user is given as 0."""
    return Owner(uid, inode) if inode else None


def _family(endpoint: Endpoint) -> int:
    return socket.AF_INET6 if ipaddress.ip_address(endpoint[0]).version == 6 else socket.AF_INET


def _packed(endpoint: Endpoint) -> bytes:
    return ipaddress.ip_address(endpoint[0]).packed.ljust(16, b"\0")


# ---------------------------------------------------------------------------------------- /proc


def from_proc(own: Endpoint, peer: Endpoint) -> Owner | None:
    """The same out of /proc/net/tcp and tcp6. Raises OSError where they cannot be read."""
    for name in ("tcp", "tcp6"):
        path = _PROC_NET / name
        if name == "tcp6" and not path.exists():
            continue
        found = find_in_table(path.read_text().splitlines(), own, peer)
        if found is not None:
            return found
    return None


def find_in_table(lines: Iterable[str], own: Endpoint, peer: Endpoint) -> Owner | None:
    """The owner of one connection in the text of /proc/net/tcp or tcp6."""
    wanted = {(_in_table(own, mapped=mapped), _in_table(peer, mapped=mapped)) for mapped in (False, True)}
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and (fields[1], fields[2]) in wanted:
            return _owner(int(fields[7]), int(fields[9]))
    return None


def _in_table(endpoint: Endpoint, *, mapped: bool) -> str:
    """An end as the kernel prints it: words of 32 bits as they lie in memory. `mapped`: IPv4 in IPv6."""
    packed = ipaddress.ip_address(endpoint[0]).packed
    if mapped and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{endpoint[1]:04X}"
