"""Writes the ledger from an event loop: one thread, in order.

A disk that is full or read-only is said once, and once when it is over. Rows wait for it; a vote is not
waited for, as none is told of before it is on the disk, and the control core asks again. A ledger that is
damaged is set aside, and a new one begun.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypeVar

from ckptless.daemon.ledger.aside import set_aside
from ckptless.daemon.ledger.engine import beside
from ckptless.daemon.ledger.store import Ledger, Owner
from ckptless.daemon.protocol.errors import (
    BadRowError,
    CkptlessError,
    DamagedLedgerError,
    LedgerError,
    NewerLedgerError,
    UsageError,
)
from ckptless.daemon.protocol.health import VerdictRecord
from ckptless.daemon.protocol.peers.agreement import Durable
from ckptless.daemon.protocol.records import Record

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 10.0
# A vote that takes longer has failed: a disk that hangs is as good as none, and others must know.
VOTE_DEADLINE_S = 3.0
# Between two tries to write: the first pause, and the longest.
FIRST_S, MOST_S = 0.1, 2.0
# So many rows wait for a disk: the newest.
MOST_ROWS = 10_000
# In one life of the daemon. A disk that damages one ledger after the other takes none.
MOST_SET_ASIDE = 3

T = TypeVar("T")
# What is to be on the disk, and what is called once it is, or with the reason why not.
_Vote: TypeAlias = tuple[tuple[str, Durable], Callable[[], None], Callable[[str], None]]


class LedgerWriter:
    """Owns the ledger and the thread that writes it. Only `start`, `vote` and `save_now` wait for the disk.

    `prepare` is called in the thread before the file is opened; it may raise UsageError and LedgerError.
    `trouble` says why something cannot be written, "" while all is well. `on_set_aside` hears in one sentence
    that a damaged ledger was replaced by an empty one. `lost`: rows that found no room while the disk took
    nothing, ever; `nbytes`: the file's size, with its log, after the last write.
    """

    def __init__(self, path: Path, prepare: Callable[[], None] = lambda: None) -> None:
        self._path, self._prepare = path, prepare
        self._ledger: Ledger | None = None  # of the thread
        self._asides = 0
        self._words: deque[str] = deque()  # from the thread, of damaged ledgers
        self._rows: deque[Record] = deque()
        self._lost_rows = self.lost = 0
        self.nbytes = 0
        # Votes of each job that wait, and jobs of which one is being written; `_tasks` write them.
        self._votes: dict[str, list[_Vote]] = {}
        self._saving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.trouble = ""
        self.on_set_aside: Callable[[str], None] = lambda _text: None
        self.passes = 0  # grows with every turn of the thread; the watchdog looks at it

    async def start(self) -> None:
        """Open the file; a disk that takes nothing is no error. Raises NewerLedgerError, UsageError."""
        try:
            await self.call(lambda _: None)
        except NewerLedgerError:
            raise
        except LedgerError as error:
            self._failed(error)

    def write(self, records: Sequence[Record]) -> None:
        """Queue rows; they are written in the order of the calls."""
        self._rows += records
        while len(self._rows) > MOST_ROWS:
            self._rows.popleft()
            self._lost_rows += 1
            self.lost += 1
        if not self._closing.is_set() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._write_all())

    @property
    def waiting(self) -> int:
        """Return how many rows wait for the disk."""
        return len(self._rows)

    def save_verdict(self, boot: str, record: VerdictRecord) -> None:
        """See `Ledger.save_verdict`; where the disk does not take it, it is said and left at that."""
        task = asyncio.get_running_loop().create_task(self._save_verdict(boot, record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save_verdict(self, boot: str, record: VerdictRecord) -> None:
        try:
            await self.call(lambda ledger: ledger.save_verdict(boot, record))
        except (LedgerError, UsageError) as error:
            logger.warning("a verdict on this node's health is not kept: %s", error)

    async def vote(self, job: str) -> tuple[str, Durable] | None:
        """See `Ledger.vote`. Raises LedgerError."""
        return await self.call(lambda ledger: ledger.vote(job))

    async def save_now(self, job: str, identity: str, durable: Durable) -> None:
        """Keep it, or raise LedgerError: for a job of which nothing is promised yet."""
        try:
            await self.call(lambda ledger: ledger.save_vote(job, identity, durable))
        except (LedgerError, UsageError) as error:
            self._failed(error)
            raise
        self._worked()

    async def own(self, job: str, owner: Owner, *, anew: bool) -> Owner | None:
        """See `Ledger.own`; what waits to be written of another run goes, too. Raises LedgerError."""
        before = await self.call(lambda ledger: ledger.own(job, owner, anew=anew))
        if before is not None and anew:
            self._rows = deque(row for row in self._rows if row.job != job)
        return before

    def save_vote(
        self,
        job: str,
        memory: tuple[str, Durable],
        then: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """Keep `memory`, (identity, durable); then call `then` in the event loop, in the order of the calls.

        Where that fails, `failed` instead, with the reason: without it on the disk nobody may hear of it.
        Each holds all of those before it, so one write takes all that has come during the last: whoever asks
        again, and again, adds no write to a disk that takes a second for each. One that has not answered in
        VOTE_DEADLINE_S has failed, whatever comes of it.
        """
        self._votes.setdefault(job, []).append((memory, then, failed))
        if job not in self._saving:
            self._saving.add(job)
            task = asyncio.get_running_loop().create_task(self._save_votes(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _save_votes(self, job: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            while votes := self._votes.pop(job, None):
                newest, _, _ = votes[-1]
                write = loop.create_task(self.save_now(job, *newest))
                await asyncio.wait((write,), timeout=VOTE_DEADLINE_S)
                if not write.done():
                    text = f"{self._path}: the disk has not taken a vote in {VOTE_DEADLINE_S:.0f} s"
                    self._failed(LedgerError(text))
                    _tell_failed(votes, self.trouble)
                    votes = []
                try:
                    await write  # no deadline: the thread ends it, or nothing does
                except (LedgerError, UsageError) as error:
                    _tell_failed(votes, str(error))
                else:
                    for _, then, _ in votes:
                        loop.call_soon(then)
        finally:
            self._saving.discard(job)

    def poke(self) -> None:
        """Have the thread count once, also where nothing is to be written."""
        self._thread.submit(self._count)

    def _count(self) -> None:
        self.passes += 1

    # --------------------------------------------------------------------------------- event loop

    async def _write_all(self) -> None:
        """Write the rows that wait, as often as it takes."""
        pause_s = FIRST_S
        while self._rows:
            try:
                await self._write_rows()
            except (LedgerError, UsageError) as error:
                self._failed(error)
                if await self._is_closed_in(pause_s):
                    return
                pause_s = min(2 * pause_s, MOST_S)
            else:
                self._worked()
                pause_s = FIRST_S

    async def _write_rows(self) -> None:
        batch = tuple(self._rows)
        self._rows.clear()
        try:
            refused = await self.call(lambda ledger: _write(ledger, batch))
        except (LedgerError, UsageError):
            self._rows.extendleft(reversed(batch))
            raise
        if refused:
            logger.error("%d rows were refused: %s", len(refused), refused[0])

    async def _is_closed_in(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return False
        return True

    def _failed(self, error: CkptlessError) -> None:
        if not self.trouble:
            self.trouble = str(error)
            logger.error("%s; it is tried again, and until then nothing is voted for here", error)

    def _worked(self) -> None:
        # Where rows wait, only a part of what is to be written has found room.
        if self.trouble and not self._rows:
            lost, self._lost_rows = self._lost_rows, 0
            logger.warning("%s: the ledger can be written again; rows lost: %d", self._path, lost)
            self.trouble = ""

    async def call(self, work: Callable[[Ledger], T]) -> T:
        """Have its thread do `work` on the ledger. Raises LedgerError, and what `work` does."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._do, work)
        finally:
            while self._words:
                text = self._words.popleft()
                logger.error("%s", text)
                loop.call_soon(self.on_set_aside, text)

    async def close(self) -> None:
        """Write what is queued, as far as the disk takes it, then close the file."""
        self._closing.set()
        if tasks := {*self._tasks, *((self._task,) if self._task is not None else ())}:
            await asyncio.wait(tasks, timeout=CLOSE_DEADLINE_S)
        if self._rows:
            logger.error("%d rows were not written", len(self._rows))
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    # -------------------------------------------------------------------------------- its thread

    def _do(self, work: Callable[[Ledger], T]) -> T:
        """Run `work` on the ledger, or on a new one where that is damaged. Raises LedgerError."""
        while True:
            try:
                if self._ledger is None:
                    self._prepare()
                    self._ledger = Ledger.open(self._path)
                done = work(self._ledger)
                self._measure()
                return done
            except DamagedLedgerError as error:
                if self._asides == MOST_SET_ASIDE:
                    raise
                self._asides += 1
                self._close()
                aside = set_aside(self._path)
                self._words.append(f"{error}: the ledger is set aside as {aside.name}, and a new one begun")

    def _measure(self) -> None:
        nbytes = 0
        for path in (self._path, beside(self._path)[0]):
            with contextlib.suppress(OSError):  # there is no log yet, or the disk is why work has failed
                nbytes += path.stat().st_size
        self.nbytes = nbytes

    def _close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


def _tell_failed(votes: Sequence[_Vote], reason: str) -> None:
    for _, _, failed in votes:
        asyncio.get_running_loop().call_soon(failed, reason)


def _write(ledger: Ledger, batch: Sequence[Record]) -> list[BadRowError]:
    """All of it, but what cannot be written whatever the disk does; of that, why. Raises LedgerError."""
    try:
        ledger.write(batch)
    except BadRowError as error:
        if len(batch) == 1:
            return [error]
        half = len(batch) // 2
        return _write(ledger, batch[:half]) + _write(ledger, batch[half:])
    return []
