"""Makes batches: for a position, the batches of an epoch from there on, one replica's part of each.

What is in a batch depends on the recipe, the source, the replica and the position, on nothing else: not on
the process, how many there are, or what was made before. So any process can go on with it anywhere.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from ckptless.daemon.protocol.errors import BadRecordError, CkptlessError, DataError, UsageError
from ckptless.pytorch_hooks.data import pack as packing
from ckptless.pytorch_hooks.data.cache import Cache
from ckptless.pytorch_hooks.data.identity import FORMAT, DataIdentity, digest, identify, versions
from ckptless.pytorch_hooks.data.order import Batches, DataPosition, DataReplica, Indices, PlainOrder, mixed
from ckptless.pytorch_hooks.data.pack import Pack, PackedOrder
from ckptless.pytorch_hooks.data.sources import Source
from ckptless.pytorch_hooks.data.streams import Stream
from ckptless.pytorch_hooks.elastic.batches import check
from ckptless.pytorch_hooks.state import rng

# What a seed is for.
_SAMPLE, _COLLATE, _STREAM, _DOCUMENT = range(1, 5)

Function = Callable[[Any], Any]

KEPT_BLOCKS = 8


@dataclass(frozen=True)
class Recipe:
    """The recipe for making batches of a source: the keywords of `MappedLoader`."""

    batch_size: int | None = None
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    transform: Function | None = None
    pack: Pack | None = None
    collate: Function | None = None
    on_error: str = "raise"
    version: str = ""
    cache: Cache | None = None

    def check(self, source: Source | Stream) -> None:
        """Raises UsageError for what does not fit together."""
        if self.on_error not in ("raise", "skip"):
            raise UsageError(f"on_error must be 'raise' or 'skip', not {self.on_error!r}")
        if isinstance(source, Stream) and source.batched:
            given = [n for n in ("batch_size", "shuffle", "drop_last", "collate", "pack") if getattr(self, n)]
            if given:
                raise UsageError(f"a DataLoader makes its own batches: leave {', '.join(given)} out")
            return
        if self.batch_size is None or self.batch_size < 1:
            raise UsageError("batch_size must be 1 or more: the samples of all replicas together")
        if isinstance(source, Stream) and (self.shuffle or self.pack):
            what = "shuffle" if self.shuffle else "pack"
            raise UsageError(f"{what} needs a source with a length; {source.name} has none")
        if self.pack and self.transform is None:
            raise UsageError("pack needs a transform that makes tokens of a document")


class Produced(NamedTuple):
    """A batch, the position after it, and of each record left out of it why."""

    batch: Any
    after: DataPosition
    skipped: Sequence[str]


class Production:
    """Batches of one replica. `open` first; then in any process forked from here."""

    def __init__(self, source: Source | Stream, recipe: Recipe, layout: DataReplica) -> None:
        recipe.check(source)
        self.source, self.recipe, self.layout = source, recipe, layout
        self._order: PlainOrder | PackedOrder | None = None
        self._packed: PackedOrder | None = None
        # A batch takes several sequences of each.
        self._blocks = lru_cache(KEPT_BLOCKS)(self._block)
        self._batches: Batches | None = None
        # Of the virtual replicas that this one has, once they are asked for.
        self._virtual: list[Production] = []

    # ---------------------------------------------------------------------------------------- opening

    def open(self, firsts: Callable[[], packing.Rows]) -> None:
        """Get ready; `firsts` gives the table of blocks where one is needed. Raises DataError, UsageError."""
        if isinstance(self.source, Stream) or self._batches is not None:
            return
        self.source.open()
        recipe = self.recipe
        if recipe.pack:
            self._packed = PackedOrder(firsts(), recipe.seed, shuffle=recipe.shuffle)
        self._order = order = self._packed or PlainOrder(len(self.source), recipe.seed, recipe.shuffle)
        batches = Batches(order.count, recipe.batch_size or 1, recipe.drop_last)
        batches.check(self.layout)
        self._batches = batches

    def of(self, layout: DataReplica) -> Production:
        """Return the maker of another replica's batches, open as this is; the source is shared."""
        other = Production(self.source, self.recipe, layout)
        other._order, other._packed, other._batches = self._order, self._packed, self._batches
        return other

    @property
    def _parts(self) -> list[Production]:
        """The makers of the parts that a batch of this replica is a list of: those of virtual replicas."""
        if not self._virtual:
            self._virtual = [self.of(part) for part in self.layout.parts]
        return self._virtual

    @property
    def batches(self) -> int | None:
        """The number of batches of an epoch; None where only the end of the stream tells."""
        return self._batches.number if self._batches else None

    def check(self, replicas: int) -> None:
        """Raise UsageError where so many replicas could not share every batch; of a stream its whole ones."""
        if self._batches is not None:
            self._batches.check(DataReplica(0, replicas))
        elif self.recipe.batch_size is not None:
            check(self.recipe.batch_size, replicas)

    def manifest(self) -> DataIdentity:
        """Return the facts that the batches depend on."""
        recipe = self.recipe
        order = {
            "source": digest(self.source.describe(strict=False)),
            "batches": digest([recipe.batch_size, recipe.drop_last]),
            "order": digest([recipe.seed, recipe.shuffle]),
            "version": digest(recipe.version),
        }
        if self._packed:
            how = recipe.pack
            assert how
            order["pack"] = digest([how.length, how.separator, how.block, how.tail, self._packed.count])
        # As before there were virtual ones, where there are none.
        virtual = [self.layout.virtual] if self.layout.virtual else []
        replica = digest([self.layout.replica, self.layout.replicas, *virtual])
        if isinstance(self.source, Stream) and self.source.batched:
            order["replica"] = replica
        made = {
            "files": digest(self.source.describe(strict=True)),
            "transform": identify(recipe.transform),
            "collate": identify(recipe.collate),
            "padding": digest(recipe.pack.padding if recipe.pack else 0),
            "on_error": digest(recipe.on_error),
            "replica": replica,
            "versions": digest(versions()),
        }
        return DataIdentity(format=FORMAT, order=order, made=made)

    # --------------------------------------------------------------------------------------- batches

    def produce(self, position: DataPosition, *, turn: int = 0, turns: int = 1) -> Iterator[Produced]:
        """The rest of the position's epoch; of `turns` processes that share the work this one's batches.

        Moves the generators of this process. Raises DataError, UsageError (of a layout that does not fit).
        """
        makes = self._of_stream if isinstance(self.source, Stream) else self._of_order
        skipped = position.skipped
        for batch, state, value, why in makes(position, turn, turns):
            skipped += len(why)
            after = DataPosition(position.epoch, batch + 1, skipped, state)
            yield Produced(value, after, why)

    def _of_order(
        self, position: DataPosition, turn: int, turns: int
    ) -> Iterator[tuple[int, None, Any, list[str]]]:
        assert self._batches is not None
        begin = position.batch + (turn - position.batch) % turns
        for batch in range(begin, self._batches.number, turns):
            yield batch, None, *self._batch(position.epoch, batch)

    def _batch(self, epoch: int, batch: int) -> tuple[Any, list[str]]:
        if self.layout.virtual:
            return _joined([part._batch(epoch, batch) for part in self._parts])
        assert self._batches is not None
        assert self._order is not None
        places = self._batches.places(batch, self.layout)
        values, skipped = [], []
        for sample in self._order.at(epoch, places).tolist():
            try:
                value, why = (
                    self._packed_sample(sample) if self._packed else (self._sample(epoch, sample), [])
                )
                values.append(value)
                skipped += why
            except BadRecordError as error:
                skipped.append(self._skip(error))
        where = f"batch {batch} of epoch {epoch}"
        return self._collated(values, (epoch, batch, int(places[0])), where), skipped

    def _skip(self, error: BadRecordError) -> str:
        if self.recipe.on_error == "raise":
            raise error
        return str(error)

    def _collated(self, values: list[Any], seeds: tuple[int, ...], where: str) -> Any:
        if not values:
            raise DataError(
                f"every record of replica {self.layout.replica}'s part of {where} was skipped: mend the "
                f"data, "
                "or take a larger batch_size"
            )
        seed_all(self.recipe.seed, _COLLATE, *seeds)
        try:
            return (self.recipe.collate or default_collate)(values)
        except CkptlessError:
            raise
        except Exception as error:  # the user's function: its failure is told with its place
            raise _told(DataError, f"{where} cannot be collated: {error!r}", error) from error

    def _sample(self, epoch: int, sample: int) -> Any:
        seed_all(self.recipe.seed, _SAMPLE, epoch, sample)
        assert not isinstance(self.source, Stream)
        source = self.source
        value = _guarded(source.get, sample, lambda: source.where(sample), "cannot be read")
        return self._transformed(value, lambda: source.where(sample))

    def _transformed(self, value: Any, where: Callable[[], str]) -> Any:
        transform = self.recipe.transform
        return value if transform is None else _guarded(transform, value, where, "the transform failed")

    # --------------------------------------------------------------------------------------- packing

    def _packed_sample(self, sample: int) -> tuple[Any, list[str]]:
        assert self._packed is not None
        number, row, count = self._packed.find(sample)
        rows, skipped = self._blocks(number)
        if len(rows) != count:
            raise DataError(
                f"block {number} makes {len(rows)} sequences and made {count} when they were counted: the "
                "transform depends on something that the loader does not see; give it another version="
            )
        # What was left out of a block counts once, where it begins.
        return rows[row], skipped if row == 0 else []

    def _block(self, number: int) -> tuple[list[dict[str, Indices]], list[str]]:
        """The sequences of a packed block, and of each document that was skipped why."""
        how, recipe = self.recipe.pack, self.recipe
        assert how is not None
        assert not isinstance(self.source, Stream)
        chosen = packing.documents_of(number, len(self.source), how, recipe.seed, shuffle=recipe.shuffle)
        documents: list[Indices] = []
        skipped = []
        for document in chosen.tolist():
            try:
                documents.append(self._tokens(document))
            except BadRecordError as error:
                skipped.append(self._skip(error))
        return packing.pack(documents, how), skipped

    def _tokens(self, document: int) -> Indices:
        assert not isinstance(self.source, Stream)
        source = self.source
        # Of the document alone: it has the same tokens in every epoch, as its sequences were counted once.
        seed_all(self.recipe.seed, _DOCUMENT, document)
        value = _guarded(source.get, document, lambda: source.where(document), "cannot be read")
        made = self._transformed(value, lambda: source.where(document))
        try:
            return packing.tokens_of(made, "")
        except BadRecordError as error:
            raise BadRecordError(f"{source.where(document)}{error}") from error

    def count_blocks(self, turn: int, turns: int) -> Iterator[tuple[int, int]]:
        """The blocks of this turn and how many sequences they make."""
        assert not isinstance(self.source, Stream)
        assert self.recipe.pack
        for number in range(turn, packing.blocks(len(self.source), self.recipe.pack), turns):
            yield number, len(self._block(number)[0])

    # --------------------------------------------------------------------------------------- streams

    def _of_stream(
        self, position: DataPosition, turn: int, turns: int
    ) -> Iterator[tuple[int, Any, Any, list[str]]]:
        assert isinstance(self.source, Stream)
        seed, epoch, size = self.recipe.seed, position.epoch, self.recipe.batch_size or 1
        seed_all(seed, _STREAM, epoch)
        state = position.stream if position.batch else None
        begun = self.source.begin(epoch, state, mixed(seed, _STREAM, epoch))
        items = _named(begun, self.source.name)
        batch = 0 if state is None else position.batch
        while True:
            # Anew for each batch: who comes to it with a state draws what one draws who has read all before.
            seed_all(seed, _STREAM, epoch, batch)
            taken = list(islice(items, size))
            whole = len(taken) == size
            if not taken or (self.recipe.drop_last and not whole):
                break
            if batch >= position.batch and batch % turns == turn:
                yield batch, self.source.state(), *self._of_items(epoch, batch, taken)
            batch += 1
            if not whole:
                break
        if batch < position.batch:
            raise DataError(
                f"{self.source.name} ended after {batch} batches, before the position {position.batch}"
            )

    def _of_items(self, epoch: int, batch: int, taken: list[Any]) -> tuple[Any, list[str]]:
        if self.layout.virtual:
            return _joined([part._of_items(epoch, batch, taken) for part in self._parts])
        assert isinstance(self.source, Stream)
        name, size = self.source.name, self.recipe.batch_size
        if size is None:
            return self._transformed(taken[0], lambda: f"batch {batch} of {name}"), []
        first, last = self.layout.slice(len(taken))
        if first == last:
            raise DataError(
                f"{name} ended with {len(taken)} samples for {self.layout.replicas} replicas: set "
                f"drop_last=True"
            )
        values: list[Any] = []
        skipped: list[str] = []
        for place in range(first, last):
            number = batch * size + place
            seed_all(self.recipe.seed, _SAMPLE, epoch, number)
            where = partial("sample {} of {}".format, number, name)
            try:
                values.append(self._transformed(taken[place], where))
            except BadRecordError as error:
                skipped.append(self._skip(error))
        return self._collated(values, (epoch, batch, first), f"batch {batch} of epoch {epoch}"), skipped


def _joined(parts: list[tuple[Any, list[str]]]) -> tuple[Any, list[str]]:
    """Return a list of what virtual replicas have of a batch, and all that was left out of them."""
    return [value for value, _skipped in parts], [why for _value, skipped in parts for why in skipped]


def _guarded(function: Function, value: Any, where: Callable[[], str], what: str) -> Any:
    """Call what may be a user's. Of a record that it fails on the neighbours may be sound; of a disk not."""
    try:
        return function(value)
    except CkptlessError:
        raise
    except OSError as error:
        raise _told(DataError, f"{where()}: {what}: {error}", error) from error
    except Exception as error:  # the user's function: its failure is told with its place
        raise _told(BadRecordError, f"{where()}: {what}: {error!r}", error) from error


def _told(kind: type[DataError], text: str, error: Exception) -> DataError:
    """Return the error with its traceback as a note, which survives the way to another process."""
    found = kind(text)
    found.add_note("".join(traceback.format_exception(error)))
    return found


def _named(items: Iterator[Any], name: str) -> Iterator[Any]:
    for number in range(1 << 62):
        try:
            yield next(items)
        except StopIteration:
            return
        except CkptlessError:
            raise
        except Exception as error:  # the user's iterator: its failure is told with its place
            raise _told(DataError, f"{name} failed after {number} samples: {error!r}", error) from error


# ------------------------------------------------------------------------------------------- random numbers


def seed_all(*numbers: int) -> None:
    """Seed Python's, torch's CPU and numpy's global generator: what a transform draws depends on these
    only.
    """
    seed = mixed(*numbers)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def untouched() -> Iterator[None]:
    """Put this process's generators back afterwards."""
    before = rng.capture()
    try:
        yield
    finally:
        rng.restore(before)
