"""`MappedLoader`: batches in an order that a position leads back into, made by processes in the
background.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypedDict, Unpack

import msgspec
import numpy as np

from ckptless.daemon.protocol.errors import DataError, PeerError, ProtocolError, RecoveryError, UsageError
from ckptless.daemon.protocol.ring import WINDOW_LIMIT
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.data import pack as packing
from ckptless.pytorch_hooks.data.cache import Cache, key
from ckptless.pytorch_hooks.data.identity import DataIdentity, identify
from ckptless.pytorch_hooks.data.order import DataPosition, DataReplica, position_of
from ckptless.pytorch_hooks.data.pack import Pack
from ckptless.pytorch_hooks.data.pinning import Pinning
from ckptless.pytorch_hooks.data.producer import Numbered
from ckptless.pytorch_hooks.data.production import Function, Production, Recipe, untouched
from ckptless.pytorch_hooks.data.ring_reader import BUDGET_NBYTES, PREFETCH, ReadAhead, RingFeed
from ckptless.pytorch_hooks.data.streams import Stream, as_source
from ckptless.pytorch_hooks.data.workers import Pool, Worker, WorkerDied

logger = logging.getLogger(__name__)

FORMAT = 1
TIMEOUT_S = 600.0
EVENTS_OF_SKIPPED = 8


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
    prefetch: int
    budget_nbytes: int
    pin_memory: bool


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The dict that `state_dict` gives."""

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
    `timeout_s`: so long may a batch take. `prefetch`: so many batches are made ahead of each replica's use on
    its node, and all of them take `budget_nbytes` bytes there at most; the site may allow less. `pin_memory`:
    give tensors in page-locked memory, where there is a CUDA device. Left out, `seed` is 0, `workers` 1,
    `on_error` "raise", `timeout_s` 600, `prefetch` 8, `budget_nbytes` 1 GiB, and True is said of nothing.

    Iterating gives one epoch, or the rest of it after `load_state_dict`. What is skipped or begun again is
    logged, and told to `on_event(kind, text)`, which `run.batches` has write it to the ledger. Main thread
    only. Raises UsageError, DataError.
    """

    # What transforms draw, they draw in other processes or with the generators put back: see cursor/.
    drawless = True

    def __init__(self, source: Any, **options: Unpack[Options]) -> None:
        self._workers = options.pop("workers", 1)
        self._timeout_s = options.pop("timeout_s", TIMEOUT_S)
        self._limits = ReadAhead(
            options.pop("prefetch", PREFETCH), options.pop("budget_nbytes", BUDGET_NBYTES)
        )
        if not 1 <= self._limits.window <= WINDOW_LIMIT or self._limits.budget_nbytes < 1:
            raise UsageError(f"prefetch must be 1 to {WINDOW_LIMIT} batches, and budget_nbytes 1 or more")
        pins = options.pop("pin_memory", False)
        self._pinning = Pinning(_telling(weakref.ref(self))) if pins else None
        self._replica, self._replicas = options.pop("replica", None), options.pop("replicas", None)
        self._virtual = 0
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
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None
        self._production: Production | None = None
        self._manifest: DataIdentity | None = None
        self._epoch = 0
        self._position = DataPosition()
        # Whether the next iteration begins at the position; whether the last one has come to its epoch's end.
        self._resumed = self._ended = False
        self._turn = 0
        self._feed: RingFeed | None = None
        # The batches as a ring has them.
        self._numbered: Numbered | None = None
        self._pool = Pool(self._workers, self._timeout_s, _telling(weakref.ref(self)))
        weakref.finalize(self, self._pool.close)

    # ----------------------------------------------------------------------------------------- what it is

    @property
    def layout(self) -> DataReplica:
        """The number of this replica, and of all."""
        found = env.read()
        replica = found.rank if self._replica is None else self._replica
        replicas = found.world_size if self._replicas is None else self._replicas
        return DataReplica(replica, replicas, self._virtual)

    def deal_virtually(self, virtual: int) -> None:
        """Give, as each batch, a list of the parts that this rank's of so many virtual ranks have of it.

        `run.batches` says this in an exact job; 0: not any more. UsageError where it cannot.
        """
        if virtual and not self.cuts_anew:
            raise UsageError(
                "the job is exact, and the batches of a DataLoader cannot be dealt to virtual ranks: give "
                "MappedLoader the dataset, and not a DataLoader of it"
            )
        if virtual and (self._replica is not None or self._replicas is not None):
            raise UsageError(
                "the job is exact, and deals batches by virtual ranks: leave replica and replicas out"
            )
        self._virtual = virtual

    @property
    def cuts_anew(self) -> bool:
        """Whether a position holds for any number of replicas: not of a DataLoader, which has one's part."""
        return not (isinstance(self._source, Stream) and self._source.batched)

    def check_replicas(self, replicas: int) -> None:
        """Raise UsageError where so many could not share every batch; not where the script says how many."""
        if self._replicas is None:
            self.production.check(replicas)

    @property
    def production(self) -> Production:
        """The maker of the batches of the present layout, opened."""
        if self._production is None or self._production.layout != self.layout:
            made = Production(self._source, self._recipe, self.layout)
            made.open(lambda: self._table(made))
            self._production, self._manifest = made, made.manifest()
            self._tell_of_caches()
        return self._production

    def _tell_of_caches(self) -> None:
        for cache in (self._recipe.cache, getattr(self._source, "cache", None)):
            if cache is None:
                continue
            told, cache.told[:] = list(cache.told), []
            for kind, text in told:
                logger.warning("%s: %s", kind, text)
                self.on_event(kind, text)

    @property
    def manifest(self) -> DataIdentity:
        """The facts that the batches depend on."""
        made = self.production
        return self._manifest or made.manifest()

    def __len__(self) -> int:
        batches = self.production.batches
        if batches is None:
            raise TypeError("this loader's source has no length")
        return batches

    @property
    def skipped(self) -> int:
        """The number of records of this epoch that this replica has skipped up to here."""
        return self._position.skipped

    # ------------------------------------------------------------------------------------------ position

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was given out; once the epoch has ended, the next one's."""
        here = DataPosition(epoch=self._epoch) if self._ended else self._position
        position = msgspec.structs.asdict(here)
        # Of what made the last batch: this is called for each of them, and to look at the layout takes long.
        manifest = self._manifest or self.manifest
        return {"format": FORMAT, "order": manifest.order_digest, "position": position}

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
        self._ended = False

    # ---------------------------------------------------------------------------------------------- ring

    def feed_from(self, feed: RingFeed | None) -> None:
        """Take batches from the node's ring from here on, where there is one for such a source.

        `run.batches` says this; None: each process makes its own, as without an agent.
        """
        self._feed = feed

    def committed(self, state: dict[str, Any]) -> None:
        """Take note that no recovery goes back behind the position of this `state_dict`."""
        if self._feed is not None and self._numbered is not None:
            self._feed.committed(self._numbered, position_of(state["position"]))

    # ----------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Any]:
        position = self._position if self._resumed else DataPosition(epoch=self._epoch)
        self._resumed = self._ended = False
        self._position = position
        self._turn += 1
        return self._epoch_from(self._turn, position)

    def _epoch_from(self, turn: int, position: DataPosition) -> Iterator[Any]:
        for made, after, skipped in self._made(position):
            if turn != self._turn:
                raise UsageError("another iteration over this loader has begun: make a second loader for it")
            self._position = after
            for number, why in enumerate(skipped, after.skipped - len(skipped) + 1):
                self._tell_skipped(number, why)
            yield made if self._pinning is None else self._pinning.batch(made)
        if turn == self._turn:
            self._epoch, self._ended = position.epoch + 1, True

    def _tell_skipped(self, number: int, why: str) -> None:
        logger.warning("skipped: %s", why)
        # Of a file that is all wrong there are too many for a ledger.
        if number <= EVENTS_OF_SKIPPED or number & (number - 1) == 0:
            self.on_event("data-skipped", f"{number} records of this epoch: {why}")

    def _made(self, position: DataPosition) -> Iterator[tuple[Any, DataPosition, Any]]:
        """The rest of an epoch: batch, the position after it, and of each record left out of it why."""
        if not self._workers:
            return self._in_process(position)
        if self._feed is not None:
            return self._in_ring(self._feed, position)
        return self._pool.epoch(self.production, position)

    def _in_process(self, position: DataPosition) -> Iterator[tuple[Any, DataPosition, Any]]:
        batches = self.production.produce(position)
        while True:
            with untouched():
                made = next(batches, None)
            if made is None:
                return
            yield made.batch, made.after, made.skipped

    def _in_ring(self, feed: RingFeed, position: DataPosition) -> Iterator[tuple[Any, DataPosition, Any]]:
        production, numbered = self.production, self._numbered
        if numbered is None or numbered.production is not production:
            numbered = Numbered(production, self.manifest, self._workers, self._timeout_s)
            self._numbered = numbered
        while not numbered.is_end(position):
            try:
                batch = feed.take(numbered, self._limits, position)
            except PeerError as error:
                self._feed = None
                feed.abandon()
                text = f"this rank makes its own batches from here on: no ring of the node's ({error})"
                logger.warning("%s", text)
                self.on_event("ring-off", text)
                yield from self._pool.epoch(production, position)
                return
            if batch is None:
                return
            for kind, text in batch.events:
                self.on_event(kind, text)
            position = batch.after
            yield batch.value, position, batch.skipped

    # ------------------------------------------------------------------------------------- table of blocks

    def _table(self, production: Production) -> packing.Rows:
        """Return how many sequences each block makes, from the cache or counted now."""
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
        name = f"{key('blocks', repr(parts), identify(recipe.transform))}.table"
        counts = cache.numbers(name, lambda: np.array(self._counts(production, count), dtype=np.int64))
        if len(counts) != count:
            raise DataError(f"{cache.folder / name} is the table of {len(counts)} blocks, not of {count}")
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

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
        """End the producers, and give what they have made ahead back; iterating starts new ones."""
        self._pool.close()
        if self._feed is not None:
            self._feed.close()


def _telling(loader: weakref.ref[MappedLoader]) -> Callable[[str, str], None]:
    """Tells by a loader that is not kept alive by this."""

    def tell(kind: str, text: str) -> None:
        found = loader()
        if found is not None:
            found.on_event(kind, text)

    return tell


def _counting(production: Production, turn: int, turns: int) -> Callable[[], Iterator[tuple[int, int]]]:
    return lambda: production.count_blocks(turn, turns)
