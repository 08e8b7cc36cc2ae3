"""A loader's producers: worker processes that take turns at the batches of one replica."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from ckptless.daemon.api.errors import DataError
from ckptless.pytorch_hooks.data.order import Layout, Position
from ckptless.pytorch_hooks.data.production import Production
from ckptless.pytorch_hooks.data.workers import Worker, WorkerDied

logger = logging.getLogger(__name__)

DEATHS_IN_A_ROW = 3


class Pool:
    """`count` workers, 1 or more, each with a batch or more ahead. Main thread only; close it.

    `tell(kind, text)` hears of a worker that died and was replaced.
    """

    def __init__(self, count: int, timeout_s: float, tell: Callable[[str, str], None]) -> None:
        self._count, self._timeout_s, self._tell = count, timeout_s, tell
        self.workers: list[Worker] = []
        self._at: tuple[Layout, int, int] | None = None

    def epoch(self, production: Production, position: Position) -> Iterator[tuple[Any, Position, Any]]:
        """The rest of an epoch: batch, the position after it, and of each record left out of it why.

        Raises DataError, UsageError; the pool is closed then.
        """
        here = (production.layout, position.epoch, position.batch)
        if self._at != here:
            self.close()
            self.workers.extend(self._worker(production, position, turn) for turn in range(self._count))
        while True:
            # Until the batch is there: nobody else may take this pool for one that stands somewhere.
            self._at = None
            found = self._next(production, position)
            if found is None:
                break
            batch, stream, skipped = found
            skips = position.skipped + len(skipped)
            position = Position(position.epoch, position.batch + 1, skips, stream)
            self._at = (production.layout, position.epoch, position.batch)
            yield batch, position, skipped
        # The other workers, too, have come to the end of the epoch.
        for turn in range(self._count):
            if turn != position.batch % self._count:
                self._end_of_epoch(production, position, turn)
        self._at = (production.layout, position.epoch + 1, 0)

    def _worker(self, production: Production, position: Position, turn: int) -> Worker:
        return Worker(lambda: _produce(production, position, turn, self._count))

    def _next(self, production: Production, position: Position) -> tuple[Any, Any, Any] | None:
        turn = position.batch % self._count
        for _ in range(DEATHS_IN_A_ROW):
            try:
                found = self.workers[turn].next(self._timeout_s)
            except WorkerDied as death:
                why = f"the producer of batch {position.batch} of epoch {position.epoch} {death}"
                logger.warning("%s; another one takes its place", why)
                self._tell("data-producer-died", why)
                self.workers[turn].close()
                self.workers[turn] = self._worker(production, position, turn)
                continue
            except BaseException:
                self.close()
                raise
            if found is None:
                return None
            epoch, number, batch, stream, skipped = found
            if (epoch, number) != (position.epoch, position.batch):
                self.close()
                raise DataError(f"a producer made batch {number} of epoch {epoch}, not {position}")
            return batch, stream, skipped
        self.close()
        raise DataError(f"{why}, {DEATHS_IN_A_ROW} times in a row")

    def _end_of_epoch(self, production: Production, position: Position, turn: int) -> None:
        """Take a worker's end mark, or where it has died start it in the next epoch."""
        try:
            found = self.workers[turn].next(self._timeout_s)
        except WorkerDied:
            self.workers[turn].close()
            self.workers[turn] = self._worker(production, Position(epoch=position.epoch + 1), turn)
            return
        except BaseException:
            self.close()
            raise
        if found is not None:
            self.close()
            raise DataError(
                f"the producers do not agree on where epoch {position.epoch} ends: {found[:2]} is there"
            )

    def close(self) -> None:
        """End the workers; the next epoch starts new ones."""
        self._at = None
        while self.workers:
            self.workers.pop().close()


def _produce(production: Production, position: Position, turn: int, turns: int) -> Iterator[Any]:
    """In a worker: its batches of this epoch and all that follow, None at the end of each."""
    while True:
        for made in production.produce(position, turn=turn, turns=turns):
            after = made.after
            yield after.epoch, after.batch - 1, made.batch, after.stream, list(made.skipped)
        yield None
        position = Position(epoch=position.epoch + 1)
