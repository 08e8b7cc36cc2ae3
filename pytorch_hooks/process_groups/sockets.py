"""Finds the TCP sockets that a piece of native code has opened, and cuts them from outside."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path


def open_sockets() -> dict[int, int]:
    """The sockets of this process: descriptor to inode."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            status = os.fstat(int(entry.name))
        except OSError:
            continue  # closed since the listing (the listing's own descriptor, at least)
        if stat.S_ISSOCK(status.st_mode):
            found[int(entry.name)] = status.st_ino
    return found


def _borrow(fd: int, inode: int) -> socket.socket | None:
    """A second descriptor of a TCP socket, if `fd` still is that socket.

    Duplicated first and looked at after: the number may be closed and given out again at any moment.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return None  # closed already
    try:
        same = os.fstat(copy).st_ino == inode
        sock = socket.socket(fileno=copy) if same else None
    except OSError:
        os.close(copy)
        return None
    if sock is None:
        os.close(copy)
        return None
    tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not tcp:
        sock.close()
        return None
    return sock


def _address(sock: socket.socket, *, peer: bool) -> tuple[str, int]:
    try:
        name = sock.getpeername() if peer else sock.getsockname()
    except OSError:
        return "", 0  # not connected (yet, or any more)
    return str(name[0]), int(name[1])


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Opened:
    """The TCP connections that a call opens: made before the call, frozen when it has returned.

    `port` names the peer's port when that is known (a store's connection). Without it, the connections are
    those of the address on which the call itself listens (Gloo listens before it connects), so that
    another thread's connection to somewhere else is not taken for one of them.
    """

    def __init__(self, port: int | None = None) -> None:
        self._port = port
        self._before = open_sockets()
        self._found: dict[int, int] | None = None

    def freeze(self) -> None:
        """The call has returned, or was left: what it has opened by now is all. Once frozen it stays so."""
        if self._found is None:
            self._found = self._mine()

    def shut(self) -> None:
        """Cut every connection, both ways; the native code's blocked operations fail."""
        for fd, inode in (self._mine() if self._found is None else self._found).items():
            sock = _borrow(fd, inode)
            if sock is None:
                continue
            # Where the other side has already reset it, that serves as well.
            with sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _mine(self) -> dict[int, int]:
        listening: set[str] = set()
        connected: dict[tuple[int, int], tuple[str, str, int]] = {}
        for fd, inode in open_sockets().items():
            if self._before.get(fd) == inode:
                continue
            sock = _borrow(fd, inode)
            if sock is None:
                continue
            with sock:
                host, _ = _address(sock, peer=False)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    # Never cut: Gloo's accepting thread does not expect it. It dies with its device.
                    listening.add(host)
                else:
                    connected[fd, inode] = (host, *_address(sock, peer=True))
        if self._port is not None:
            return {fd: inode for (fd, inode), (_, _, port) in connected.items() if port == self._port}
        local = any(map(_loopback, listening))
        return {
            fd: inode
            for (fd, inode), (host, peer, _) in connected.items()
            if host in listening or peer in listening or (local and _loopback(host))
        }
