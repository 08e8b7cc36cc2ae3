"""Unix sockets: their names, and who is at the other end by the kernel's word.

A name is a path, or "@name" for Linux's abstract namespace, which leaves no file behind.
"""

import os
import socket
import stat
import struct
from pathlib import Path

from ckptless.daemon.protocol.errors import PeerError

_UCRED = struct.Struct("3i")


def unix_address(name: str) -> str:
    """Return what bind(2) and connect(2) take for `name` (unix(7): abstract ones begin with a zero byte)."""
    return "\0" + name[1:] if name.startswith("@") else name


def is_abstract(name: str) -> bool:
    """Whether there is no file to remove or to protect."""
    return name.startswith("@")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected (SO_PEERCRED, unix(7))."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid), int(uid)


def daemon_credentials(sock: socket.socket, name: str) -> tuple[int, int]:
    """(pid, uid) of the daemon that listens on the Unix socket `name`, to which `sock` is connected.

    It must be root, this user, or the user to whom root has given the socket's folder. Raises PeerError:
    whoever else listens there would get the job's state and key.
    """
    pid, uid = peer_credentials(sock)
    if uid not in (0, os.geteuid()) and uid != _owner_by_root(name):
        raise PeerError(
            f"uid {uid} listens on {name}, which is neither root, nor this user, nor the owner of a folder "
            "there that root has made: it is not believed"
        )
    return pid, uid


def _owner_by_root(name: str) -> int | None:
    """The owner of the socket's folder, where nobody but root could have made that folder."""
    if is_abstract(name):
        return None
    folder = Path(name).parent
    try:
        found, above = folder.lstat(), folder.parent.stat()
    except OSError:
        return None
    by_root = above.st_uid == 0 and not above.st_mode & 0o022
    return found.st_uid if by_root and stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022 else None
