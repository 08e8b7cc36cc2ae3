"""sd_listen_fds(3): sockets that systemd opened for the daemon and keeps open over its restarts."""

import os
import socket
from collections.abc import MutableMapping

from ckptless.daemon.api.errors import UsageError

FIRST_FD = 3


def inherited(environment: MutableMapping[str, str]) -> dict[str, socket.socket]:
    """Listening sockets by their name (FileDescriptorName=), not inheritable; the caller owns them.

    Empty where systemd gave none, or gave them to another process. Takes the LISTEN_* variables out of the
    environment. Raises UsageError where they do not describe sockets.
    """
    pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "")
    if pid != str(os.getpid()) or not count:
        return {}
    if not count.isdecimal():
        raise UsageError(f"LISTEN_FDS={count} is no number: start the daemon by its systemd units")
    labels = names.split(":") if names else []
    found: dict[str, socket.socket] = {}
    try:
        for index in range(int(count)):
            label = labels[index] if index < len(labels) else f"fd{FIRST_FD + index}"
            found[label] = _adopt(FIRST_FD + index)
    except OSError as error:
        for one in found.values():
            one.close()
        raise UsageError(
            f"LISTEN_FDS={count}, and descriptor {FIRST_FD + len(found)} is no socket ({error.strerror}): "
            "start the daemon by its systemd units"
        ) from error
    return found


def _adopt(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    adopted = socket.socket(fileno=fd)
    adopted.setblocking(False)
    return adopted
