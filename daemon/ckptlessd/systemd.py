"""The daemon's talk with systemd; without libsystemd, and silent without systemd.

sd_listen_fds(3): sockets that systemd opened for the daemon and keeps open over its restarts.

sd_notify(3): tells systemd that the daemon is ready, reloads, stops, lives, and in words how it stands.
Without NOTIFY_SOCKET in the environment every call does nothing. A message that systemd does not take in time
is lost and logged once; the daemon goes on.

The watchdog: systemd hears from the daemon only while the daemon gets on. A timer that says "alive" proves
that a timer runs. This one sends WATCHDOG=1 only after the event loop has carried a byte through its
selector, and after every part that is watched has got on since the time before.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.peercred import unix_address

logger = logging.getLogger(__name__)

FIRST_FD = 3
SEND_S = 0.5  # how long a full queue at systemd may hold the caller up
STATUS_LIMIT = 400
# Looks in one WatchdogSec: the first one finds nothing to compare with, and one may come late.
LOOKS = 4


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
        """Return where systemd listens. Takes NOTIFY_SOCKET out, so that no child speaks for the daemon."""
        return cls(environment.pop("NOTIFY_SOCKET", None) or None)

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
        """A sign of life; see `Watchdog` for who may give it."""
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


class Judge:
    """Whether every counter has advanced between two looks. Pure; the first look passes nothing."""

    def __init__(self) -> None:
        self._before: Mapping[str, int] | None = None

    def stuck(self, counts: Mapping[str, int]) -> tuple[str, ...] | None:
        """Names that have not advanced since the last look, () when all have, None at the first look.

        A counter that is new is not yet known to advance: it counts as stuck once.
        """
        before, self._before = self._before, dict(counts)
        if before is None:
            return None
        return tuple(sorted(name for name, count in counts.items() if count <= before.get(name, count)))


@dataclass(frozen=True)
class Watched:
    """A part that must get on: `count` only ever grows.

    `poke` gives a part that may be idle something to count (the ledger's writer: an empty batch). It is
    called at every look, from the event loop, and must not block.
    """

    name: str
    count: Callable[[], int]
    poke: Callable[[], None] | None = None


def period_s(environment: MutableMapping[str, str]) -> float | None:
    """Seconds after which systemd ends a silent daemon, or None where it does not watch this process.

    Takes WATCHDOG_USEC and WATCHDOG_PID out of the environment, so that no child is taken for watched.
    """
    usec = environment.pop("WATCHDOG_USEC", "")
    pid = environment.pop("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or pid not in ("", str(os.getpid())):
        return None
    return int(usec) / 1e6


class Watchdog:
    """Looks `LOOKS` times per `period_s` (seconds), and lets systemd know when all is well."""

    def __init__(self, notifier: Notifier, period_s: float, parts: Sequence[Watched]) -> None:
        self._notifier = notifier
        self._interval_s = period_s / LOOKS
        self._parts = tuple(parts)
        self._judge = Judge()
        self._said: tuple[str, ...] = ()

    async def run(self) -> None:
        """Watch until cancelled. Raises OSError where no socket pair can be had."""
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            far.setblocking(False)
            while True:
                await self._look(near, far)
                await asyncio.sleep(self._interval_s)

    async def _look(self, near: socket.socket, far: socket.socket) -> None:
        for part in self._parts:
            if part.poke is not None:
                part.poke()
        await _round_trip(near, far)
        stuck = self._judge.stuck({part.name: part.count() for part in self._parts})
        if stuck == ():
            self._notifier.watchdog()
        if stuck is not None:
            self._tell(stuck)

    def _tell(self, stuck: tuple[str, ...]) -> None:
        """Say it once when something gets stuck, and once when all is well again."""
        if stuck == self._said:
            return
        self._said = stuck
        if stuck:
            logger.error("no progress for %.1f s: %s", self._interval_s, ", ".join(stuck))
            self._notifier.status(f"no progress: {', '.join(stuck)}")
        else:
            logger.info("progress again")
            self._notifier.status("progress again")


async def _round_trip(near: socket.socket, far: socket.socket) -> None:
    """One byte out and in, waited for at the selector: a reader is registered before the byte is written."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.create_task(loop.sock_recv(far, 1))
    try:
        await asyncio.sleep(0)  # the task has found nothing to read by now, and waits
        # no deadline: none by intent: where this does not return the daemon hangs, and systemd ends it
        await loop.sock_sendall(near, b".")
        # no deadline: none by intent: where this does not return the daemon hangs, and systemd ends it
        await arrived
    finally:
        arrived.cancel()
