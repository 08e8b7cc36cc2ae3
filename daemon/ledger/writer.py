"""Writes the ledger from an event loop: one thread, in order, several batches to a transaction."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptless.daemon.api.errors import LedgerError
from ckptless.daemon.api.records import JobRecord, Record
from ckptless.daemon.control.decree import Durable
from ckptless.daemon.ledger.store import Ledger

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 10.0


class LedgerWriter:
    """Owns the ledger and the thread that writes it. `write` never blocks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pending: list[Record] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._task: asyncio.Task[None] | None = None
        self.passes = 0  # grows with every turn of the thread; the watchdog looks at it

    def write(self, records: Sequence[Record]) -> None:
        """Queue rows; they are written in the order of the calls."""
        self._pending += records
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._flush())

    async def vote(self, job: str) -> tuple[str, Durable] | None:
        """See `Ledger.vote`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.vote, job)

    async def close_jobs(self, close: Callable[[JobRecord], JobRecord | None]) -> tuple[JobRecord, ...]:
        """See `Ledger.close_jobs`. Raises LedgerError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.close_jobs, close)

    def save_vote(
        self,
        job: str,
        identity: str,
        durable: Durable,
        then: Callable[[], None],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Keep it, in the order of the calls; then call `then` in the event loop.

        Where that fails, `failed` instead, with the reason; it is logged where nobody is to be told.
        """

        def saved(future: asyncio.Future[None]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                then()
            elif failed is not None and isinstance(error, LedgerError):
                failed(str(error))
            else:
                # Without a vote on the disk this daemon must not speak of it: the others go on without it.
                logger.error("job %s: a vote was not written: %s", job, error)

        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._ledger.save_vote, job, identity, durable)
        future.add_done_callback(saved)

    def poke(self) -> None:
        """Have the thread count once, also where nothing is to be written."""
        self._thread.submit(self._count)

    def _count(self) -> None:
        self.passes += 1

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await loop.run_in_executor(self._thread, self._ledger.write, batch)
            except LedgerError:
                # The job goes on without its story; that it is incomplete must be seen.
                logger.exception("%d rows were not written", len(batch))

    async def close(self) -> None:
        """Write what is queued, then close the file."""
        if self._task is not None:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self._task
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._ledger.close)
        self._thread.shutdown()
