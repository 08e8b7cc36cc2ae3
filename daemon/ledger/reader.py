"""Answers what people ask of a ledger, beside the event loop: in one thread, page by page, in time."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.codec import check_protocol, encode
from ckptless.daemon.protocol.errors import LedgerError, PeerError
from ckptless.daemon.protocol.requests import Read

PAGE_ROWS = 1000
PAGE_NBYTES = 1 << 20
DEADLINE_S = 5.0
# One user's questions that wait, so that those of others are not behind any number of them.
MAX_WAITING = 4


class LedgerReader:
    """Owns the thread and a connection of its own, which can only read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger-reader")
        self._ledger: tuple[int, Ledger] | None = None
        self._waiting: Counter[int] = Counter()

    async def answer(self, wanted: Read, uid: int, *, sees_all: bool) -> bytes:
        """Return the encoded Page for `uid`. Raises CkptlessError."""
        check_protocol(wanted.protocol, "ckptctl")
        if self._waiting[uid] >= MAX_WAITING:
            raise PeerError(f"uid {uid} asks more than is answered at once: ask again")
        self._waiting[uid] += 1
        loop = asyncio.get_running_loop()
        try:
            # The thread goes on after the deadline, and is waited for by whoever comes next, no longer.
            work = loop.run_in_executor(self._thread, self._read, wanted, None if sees_all else uid)
            work.add_done_callback(lambda _: self._done(uid))
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.shield(work)
        except TimeoutError as error:
            raise LedgerError(f"{self._path} could not be read in {DEADLINE_S:.0f} s") from error

    def _done(self, uid: int) -> None:
        self._waiting[uid] -= 1
        if not self._waiting[uid]:
            del self._waiting[uid]

    def _read(self, wanted: Read, uid: int | None) -> bytes:
        return encode(self._opened().page(wanted, uid, PAGE_ROWS, PAGE_NBYTES))

    def _opened(self) -> Ledger:
        """The ledger's file as it is now: one that was damaged is set aside, and another one begun."""
        try:
            inode = self._path.stat().st_ino
        except OSError as error:
            raise LedgerError(f"{self._path}: {error.strerror}") from error
        if self._ledger is None or self._ledger[0] != inode:
            self._shut()
            self._ledger = inode, Ledger.open_readonly(self._path)
        return self._ledger[1]

    def _shut(self) -> None:
        if self._ledger is not None:
            self._ledger[1].close()
            self._ledger = None

    def close(self) -> None:
        """Take no more questions. One that is being answered is not waited for."""
        self._thread.submit(self._shut)
        self._thread.shutdown(wait=False)
