"""sd_notify(3): tells systemd that the daemon is ready, reloads, stops, lives, and in words how it stands.

Without NOTIFY_SOCKET in the environment every call does nothing. A message that systemd does not take in time
is lost and logged once; the daemon goes on.
"""

import logging
import socket
import time
from collections.abc import MutableMapping

from ckptless.daemon.api.unixpath import unix_address

logger = logging.getLogger(__name__)

SEND_S = 0.5  # how long a full queue at systemd may hold the caller up
STATUS_LIMIT = 400


class Notifier:
    """The messages. `address` is a path, "@name" of the abstract namespace, or None: nobody listens."""

    def __init__(self, address: str | None) -> None:
        if address is not None and address[:1] not in ("/", "@"):
            logger.warning("systemd is not told anything: NOTIFY_SOCKET=%s is no Unix socket", address)
            address = None
        self._address = address
        self._failed = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> "Notifier":
        """Where systemd listens. Takes NOTIFY_SOCKET out, so that no child speaks for the daemon."""
        return cls(environment.pop("NOTIFY_SOCKET", None) or None)

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return self._address is not None

    def ready(self, status: str = "") -> bool:
        """The daemon serves; also the end of a reload."""
        return self._send("READY=1", *_status(status))

    def reloading(self) -> bool:
        """The configuration is being read again; `ready` follows, whether it was good or not."""
        return self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        """The daemon was told to end, and does."""
        return self._send("STOPPING=1", *_status(status))

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(*_status(text))

    def watchdog(self) -> bool:
        """A sign of life; see `watchdog.Watchdog` for who may give it."""
        return self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> bool:
        """Whether systemd's socket took the message."""
        if self._address is None or not lines:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(SEND_S)
                out.connect(unix_address(self._address))
                out.sendall("\n".join(lines).encode())
        except OSError as error:  # a timeout too
            if not self._failed:
                logger.warning("systemd did not take %s on %s: %s", lines[0], self._address, error)
            self._failed = True
            return False
        self._failed = False
        return True


def _status(text: str) -> tuple[str, ...]:
    """A line break in it would begin another assignment."""
    return (f"STATUS={' '.join(text.split())[:STATUS_LIMIT]}",) if text else ()
