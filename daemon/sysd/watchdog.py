"""The watchdog: systemd hears from the daemon only while the daemon gets on.

A timer that says "alive" proves that a timer runs. This one sends WATCHDOG=1 only after the event loop has
carried a byte through its selector, and after every part that is watched has got on since the time before.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from ckptless.daemon.sysd.notify import Notifier

logger = logging.getLogger(__name__)

# Looks in one WatchdogSec: the first one finds nothing to compare with, and one may come late.
LOOKS = 4


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
