"""Keeps the memory of ended agents for the next start of their job: takes memfds, and gives them back.

What may be kept, how long and for whom is `requeue_table`'s to say. No byte of it is read here.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptless.daemon.ckptlessd.requeue_table import Entry, EntryTable, NotKeptError, allocation_of, is_short
from ckptless.daemon.ckptlessd.unix_server import Client, close_all
from ckptless.daemon.protocol import keeping as k
from ckptless.daemon.protocol.codec import check_protocol
from ckptless.daemon.protocol.errors import PeerError, ProtocolError
from ckptless.daemon.settings.config import KeepConfig

logger = logging.getLogger(__name__)

# From the first message of a transfer to its last.
DEADLINE_S = 10.0
LOOK_S = 1.0
# For which the end of the daemon waits for memory to be freed.
FREE_S = 10.0
MEMINFO = Path("/proc/meminfo")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RequeueMemory:
    """Owned by the daemon's event loop. `on_event(entry, kind, text)` hears what became of what was kept."""

    def __init__(self, config: KeepConfig, now: Callable[[], float]) -> None:
        self.table = EntryTable(config.nbytes, config.ttl_s)
        self.now = now
        self._fds: dict[int, list[int]] = {}
        self._closing: set[threading.Thread] = set()
        self._count = 0
        self._looked = 0.0
        self.on_event: Callable[[Entry, str, str], None] = lambda _entry, _kind, _text: None

    # -------------------------------------------------------------------------------- take, give

    async def take(self, asked: k.Keep, who: tuple[int, int], link: Client) -> None:
        """Keep what the agent of `who`, (uid, node of its run), hands over; it hears whether.

        Raises OSError, CkptlessError.
        """
        self._count += 1
        entry = Entry(
            number=self._count,
            job=allocation_of(asked.run),
            uid=who[0],
            node=who[1],
            program=asked.program,
            run=asked.run,
            restarts=asked.restarts,
            nbytes=sum(asked.nbytes),
            pieces=len(asked.nbytes),
            since_s=self.now(),
        )
        try:
            check_protocol(asked.protocol, "the agent")
            if _node_is_short():
                raise NotKeptError("the node is short of memory")
            gone = self.table.put(entry)
        except (NotKeptError, ProtocolError) as error:
            await link.send(k.KeepAnswer(verdict="refused", text=str(error)))
            return
        for old in gone:
            self._free(old, f"the same user's run {asked.run} needs the room")
        fds: list[int] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                link.take_descriptors()
                await link.send(k.KeepAnswer(verdict="go"))
                for nbytes in asked.nbytes:
                    fds.append(fd := await link.receive_fd())
                    _check(fd, nbytes)
        except BaseException:
            self.table.drop(entry)
            # One may be anything, and to close it may take as long as somebody wants.
            link.discard(fds)
            raise
        self._fds[entry.number] = fds
        self.table.settled(entry)
        self.on_event(entry, "memory-kept", f"{entry.nbytes} bytes, for at most {self.table.ttl_s:.0f} s")
        with contextlib.suppress(OSError):  # it is here; whoever does not wait to hear it has lost nothing
            await link.send(k.KeepAnswer(verdict="kept"))

    async def give(self, asked: k.Claim, uid: int, link: Client) -> None:
        """Give an agent of user `uid` what its job has left here. Raises OSError, CkptlessError."""
        check_protocol(asked.protocol, "the agent")
        owner = (allocation_of(asked.run), uid, asked.program)
        entry = self.table.lend(owner, asked.restarts)
        if entry is None:
            await link.send(k.Claimed())
            return
        fds = self._fds[entry.number]
        try:
            async with asyncio.timeout(DEADLINE_S):
                await link.send(k.Claimed(nbytes=tuple(os.fstat(fd).st_size for fd in fds)))
                for fd in fds:
                    await link.send_fd(fd)
                await link.receive(k.Taken)
        except BaseException:
            self.table.settled(entry)
            raise
        self._free(entry, f"given to run {asked.run}", kind="memory-given")

    # -------------------------------------------------------------------------------------- drop

    def look(self) -> None:
        """Now and then: what is too old, or in the node's way, is dropped."""
        now = self.now()
        if not self._fds or now - self._looked < LOOK_S:
            return
        self._looked = now
        for entry in self.table.expired(now):
            self._free(entry, f"nobody came for it in {self.table.ttl_s:.0f} s")
        if _node_is_short() and (resting := self.table.resting):
            # The next one, if need be, at the next look: how much this gives is seen then.
            self._free(resting[0], "the node is short of memory")

    def limit(self, config: KeepConfig) -> None:
        """Set how much is kept, from the next entry on, and for how long, also for those that are here."""
        self.table.limit_nbytes, self.table.ttl_s = config.nbytes, config.ttl_s

    def drop(self, is_over: Callable[[Entry], str]) -> None:
        """Drop what is wanted no more, for the reason that `is_over` gives."""
        for entry in self.table.resting:
            if why := is_over(entry):
                self._free(entry, why)

    def _free(self, entry: Entry, why: str, kind: str = "memory-dropped") -> None:
        self.table.drop(entry)
        self._close(self._fds.pop(entry.number, ()))
        self.on_event(entry, kind, why)

    def _close(self, fds: Sequence[int]) -> None:
        """Close it in a thread: the kernel frees a few GB of memory in a second."""
        self._closing = {thread for thread in self._closing if thread.is_alive()}
        thread = threading.Thread(target=close_all, args=(fds,), name="free")
        self._closing.add(thread)
        thread.start()

    def close(self) -> None:
        """All of it goes."""
        for fds in self._fds.values():
            close_all(fds)
        self._fds.clear()
        for thread in self._closing:
            thread.join(FREE_S)

    # -------------------------------------------------------------------------------------- show

    def shown(self, uid: int) -> k.KeptList:
        """Return what user `uid` may see of it: root and the daemon's own user all, others their own."""
        now = self.now()
        kept = tuple(
            k.KeptMemory(
                run=entry.run,
                uid=entry.uid,
                restarts=entry.restarts,
                nbytes=entry.nbytes,
                age_s=now - entry.since_s,
                left_s=max(0.0, entry.since_s + self.table.ttl_s - now),
            )
            for entry in self.table.entries
            if uid in (0, os.getuid(), entry.uid)
        )
        return k.KeptList(kept=kept, limit_nbytes=self.table.limit_nbytes)


def _check(fd: int, nbytes: int) -> None:
    """Only memory of exactly this size, for good. Raises PeerError."""
    try:
        # First of all: of a file on a network, or of the user's own making, even fstat may never return.
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size if seals & _SEALS == _SEALS else -1
    except OSError:
        size = -1
    if size != nbytes:
        raise PeerError(f"it is no memory of {nbytes} bytes whose size is sealed")


def _node_is_short() -> bool:
    """Judge by the kernel's estimate of what could be had without swapping; not where it gives none."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(value.split()[0])
    return len(found) == 2 and is_short(found["MemAvailable"], found["MemTotal"])
