"""`MappedLoader`: batches in an order that a position leads back into, made by processes in the
background.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypedDict, Unpack

import msgspec

from ckptless.daemon.api.errors import DataError, ProtocolError, RecoveryError, UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.data import pack as packing
from ckptless.pytorch_hooks.data.cache import Cache, key
from ckptless.pytorch_hooks.data.identity import Manifest, identify
from ckptless.pytorch_hooks.data.order import Layout, Position, position_of
from ckptless.pytorch_hooks.data.pack import Pack
from ckptless.pytorch_hooks.data.production import Function, Production, Recipe
from ckptless.pytorch_hooks.data.seeding import untouched
from ckptless.pytorch_hooks.data.streams import Stream, as_source
from ckptless.pytorch_hooks.data.workers import Worker, WorkerDied

logger = logging.getLogger(__name__)

FORMAT = 1
TIMEOUT_S = 600.0
DEATHS_IN_A_ROW = 3


class Options(TypedDict, total=False):
    """The keywords of `MappedLoader`."""

    batch_size: int | None
    seed: int
    shuffle: bool
    drop_last: bool
    transform: Function | None
    pack: Pack | None
    collate: Function | None
    on_error: str
    version: str
    cache: Cache | None
    workers: int
    replica: int | None
    replicas: int | None
    timeout_s: float


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `state_dict` gives."""

    format: int
    order: str
    position: Any


class MappedLoader:
    """Batches of a source, in an order that is a pure function of data, seed and epoch.

    `source`: JsonLines, Json or Arrow, a map-style Dataset, an iterable, or a whole DataLoader.
    `batch_size`: samples in a global batch, of all replicas together. `transform`: sample to sample (with
    `pack`: document to token list); `collate`: list of samples to batch, else PyTorch's default. Both run in
    `workers` processes (0: in this one), and whatever they draw from the global random generators is the
    same for the same sample. `on_error`: "raise", or "skip" what is wrong with single records. `version`:
    any word; another one is another data set. `replica` of `replicas`: else rank and world size.
    `timeout_s`: so long may a batch take.

    Iterating gives one epoch, or the rest of it after `load_state_dict`. Main thread only. Raises UsageError,
    DataError.
    """

    def __init__(self, source: Any, **options: Unpack[Options]) -> None:
        self._workers = options.pop("workers", 1)
        self._timeout_s = options.pop("timeout_s", TIMEOUT_S)
        self._replica, self._replicas = options.pop("replica", None), options.pop("replicas", None)
        try:
            self._recipe = Recipe(**options)  # type: ignore[misc]  # the rest of the keywords
        except TypeError as error:
            raise UsageError(f"MappedLoader: {error}") from error
        self._source = as_source(source)
        self._recipe.check(self._source)
        if self._workers < 0 or (
            self._workers > 1 and isinstance(self._source, Stream) and self._source.batched
        ):
            raise UsageError("workers must be 0 or more, and at most 1 for a DataLoader, which has its own")
        self._production: Production | None = None
        self._manifest: Manifest | None = None
        self._epoch = 0
        self._position = Position()
        self._resumed = False
        self._turn = 0
        self._pool: list[Worker] = []
        self._pool_at: tuple[Layout, int, int] | None = None
        weakref.finalize(self, _close, self._pool)

    # ----------------------------------------------------------------------------------------- what it is

    @property
    def layout(self) -> Layout:
        """Which replica this process is now."""
        found = env.read()
        replica = found.rank if self._replica is None else self._replica
        return Layout(replica, found.world_size if self._replicas is None else self._replicas)

    @property
    def production(self) -> Production:
        """What makes the batches of the present layout, opened."""
        if self._production is None or self._production.layout != self.layout:
            made = Production(self._source, self._recipe, self.layout)
            made.open(lambda: self._table(made))
            self._production, self._manifest = made, made.manifest()
        return self._production

    @property
    def manifest(self) -> Manifest:
        """What the batches depend on."""
        made = self.production
        return self._manifest or made.manifest()

    def __len__(self) -> int:
        batches = self.production.batches
        if batches is None:
            raise TypeError("this loader's source has no length")
        return batches

    @property
    def skipped(self) -> int:
        """How many records of this epoch this replica has skipped up to here."""
        return self._position.skipped

    # ------------------------------------------------------------------------------------------ position

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was given out."""
        position = msgspec.structs.asdict(self._position)
        return {"format": FORMAT, "order": self.manifest.order_digest, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on there. ProtocolError for no such state, RecoveryError for other data."""
        try:
            saved = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"a loader's state: {error}") from error
        if saved.format != FORMAT:
            raise ProtocolError(f"a loader's state of format {saved.format}, not {FORMAT}")
        position = position_of(saved.position)
        if saved.order != self.manifest.order_digest:
            raise RecoveryError(
                "the position is one in other data: files, seed, batch_size, shuffle, drop_last, pack or "
                "version of the "
                "loader are not what they were"
            )
        self._position, self._epoch, self._resumed = position, position.epoch, True

    # ----------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Any]:
        position = self._position if self._resumed else Position(epoch=self._epoch)
        self._resumed = False
        self._position = position
        self._turn += 1
        return self._epoch_from(self._turn, position)

    def _epoch_from(self, turn: int, position: Position) -> Iterator[Any]:
        batches = self._in_pool if self._workers else self._in_process
        for batch, after, skipped in batches(position):
            if turn != self._turn:
                raise UsageError("another iteration over this loader has begun: make a second loader for it")
            for why in skipped:
                logger.warning("skipped: %s", why)
            self._position = after
            yield batch
        self._epoch = position.epoch + 1

    def _in_process(self, position: Position) -> Iterator[tuple[Any, Position, Any]]:
        batches = self.production.produce(position)
        while True:
            with untouched():
                made = next(batches, None)
            if made is None:
                return
            yield made.batch, made.after, made.skipped

    def _in_pool(self, position: Position) -> Iterator[tuple[Any, Position, Any]]:
        production = self.production
        here = (production.layout, position.epoch, position.batch)
        if self._pool_at != here:
            self.close()
            self._pool.extend(self._worker(production, position, turn) for turn in range(self._workers))
        while True:
            # Until the batch is there: nobody else may take this pool for one that stands somewhere.
            self._pool_at = None
            found = self._from_pool(production, position)
            if found is None:
                break
            batch, stream, skipped = found
            skips = position.skipped + len(skipped)
            position = Position(position.epoch, position.batch + 1, skips, stream)
            self._pool_at = (production.layout, position.epoch, position.batch)
            yield batch, position, skipped
        # The other workers, too, have come to the end of the epoch.
        for turn in range(self._workers):
            if turn != position.batch % self._workers:
                self._end_of_epoch(production, position, turn)
        self._pool_at = (production.layout, position.epoch + 1, 0)

    def _worker(self, production: Production, position: Position, turn: int) -> Worker:
        return Worker(lambda: _produce(production, position, turn, self._workers))

    def _from_pool(self, production: Production, position: Position) -> tuple[Any, Any, Any] | None:
        turn = position.batch % self._workers
        for _ in range(DEATHS_IN_A_ROW):
            try:
                found = self._pool[turn].next(self._timeout_s)
            except WorkerDied as death:
                why = f"the producer of batch {position.batch} of epoch {position.epoch} {death}"
                logger.warning("%s; another one takes its place", why)
                self._pool[turn].close()
                self._pool[turn] = self._worker(production, position, turn)
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
            found = self._pool[turn].next(self._timeout_s)
        except WorkerDied:
            self._pool[turn].close()
            self._pool[turn] = self._worker(production, Position(epoch=position.epoch + 1), turn)
            return
        except BaseException:
            self.close()
            raise
        if found is not None:
            self.close()
            raise DataError(
                f"the producers do not agree on where epoch {position.epoch} ends: {found[:2]} is there"
            )

    # ------------------------------------------------------------------------------------- table of blocks

    def _table(self, production: Production) -> packing.Rows:
        """How many sequences each block makes, from the cache or counted now."""
        recipe, cache = self._recipe, self._recipe.cache or Cache()
        how = recipe.pack
        assert how is not None
        assert not isinstance(self._source, Stream)
        source = self._source
        count = packing.blocks(len(source), how)
        parts = (
            source.describe(strict=True),
            how,
            recipe.seed,
            recipe.shuffle,
            recipe.on_error,
            recipe.version,
        )
        name = f"{key('blocks', packing.VERSION, repr(parts), identify(recipe.transform))}.table"
        for _ in range(2):
            path = cache.entry(name, lambda out: packing.write_table(out, self._counts(production, count)))
            try:
                return packing.read_table(path.read_bytes(), count)
            except (ProtocolError, OSError):
                cache.drop(name)
        raise DataError(f"the table {path} cannot be read back after it was written: is the disk sound?")

    def _counts(self, production: Production, count: int) -> list[int]:
        if not self._workers:
            with untouched():
                return [rows for _block, rows in production.count_blocks(0, 1)]
        counts = [0] * count
        workers = [Worker(_counting(production, turn, self._workers)) for turn in range(self._workers)]
        try:
            for number in range(count):
                block, counts[number] = workers[number % self._workers].next(self._timeout_s)
                if block != number:
                    raise DataError(f"a producer counted block {block}, not {number}")
        except WorkerDied as death:
            raise DataError(f"a producer that counted tokens {death}") from death
        finally:
            for worker in workers:
                worker.close()
        return counts

    def close(self) -> None:
        """End the producers; iterating starts new ones."""
        self._pool_at = None
        _close(self._pool)


def _close(pool: list[Worker]) -> None:
    while pool:
        pool.pop().close()


def _produce(production: Production, position: Position, turn: int, turns: int) -> Iterator[Any]:
    """In a worker: its batches of this epoch and all that follow, None at the end of each."""
    while True:
        for made in production.produce(position, turn=turn, turns=turns):
            after = made.after
            yield after.epoch, after.batch - 1, made.batch, after.stream, list(made.skipped)
        yield None
        position = Position(epoch=position.epoch + 1)


def _counting(production: Production, turn: int, turns: int) -> Callable[[], Iterator[tuple[int, int]]]:
    return lambda: production.count_blocks(turn, turns)
