"""Existing datasets and loaders of PyTorch as sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckptless.daemon.protocol.errors import DataError, UsageError
from ckptless.pytorch_hooks.data.identity import identify
from ckptless.pytorch_hooks.data.sources import Source


class MapStyle(Source):
    """A dataset with `__len__` and `__getitem__`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def get(self, index: int) -> Any:
        """See Source."""
        return self._dataset[index]

    def where(self, index: int) -> str:
        """See Source."""
        return f"sample {index} of {type(self._dataset).__name__}"

    def describe(self, *, strict: bool) -> object:
        """See Source."""
        known = [type(self._dataset).__qualname__, len(self._dataset)]
        return [*known, identify(self._dataset)] if strict else known


class Stream:
    """Samples one after the other: an iterable that can be begun again, with torchdata's protocol or without.

    `batched`: what comes are a replica's batches already, as of a DataLoader.
    """

    def __init__(self, iterable: Iterable[Any], *, batched: bool) -> None:
        # Not by `iter`, with which a DataLoader would start its workers here.
        if hasattr(iterable, "__next__"):
            raise UsageError(
                f"a {type(iterable).__name__} can be read once only: give the loader an object with __iter__"
            )
        self._iterable = iterable
        self._iterator: Iterator[Any] | None = None
        self.batched = batched

    @property
    def name(self) -> str:
        """Return a name for the reader of an error message."""
        return type(self._iterable).__name__

    def begin(self, epoch: int, state: object, seed: int) -> Iterator[Any]:
        """Iterate over an epoch, from `state` on if it is not None. Generators of its own get `seed`."""
        for part in _parts(self._iterable):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            # Of what it drew in other epochs a process that begins here knows nothing.
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed)
        held: Any = self._iterable
        if state is not None and _stateful(held):
            held.load_state_dict(state)
        self._iterator = iter(held)
        if state is not None and not _stateful(held):
            living: Any = self._iterator
            if not _stateful(living):
                raise DataError(f"the position has a state of {self.name}, which has no load_state_dict now")
            living.load_state_dict(state)
        return self._iterator

    def state(self) -> object:
        """Return the position of the iteration, None if it cannot say."""
        for one in (self._iterable, self._iterator):
            if _stateful(one):
                held: Any = one
                return held.state_dict()
        return None

    def describe(self, *, strict: bool) -> object:
        """See Source."""
        return [self.name, identify(self._iterable)] if strict else [self.name]


def _parts(iterable: Any) -> list[Any]:
    """Return the loader, and what a DataLoader consists of."""
    parts = [iterable, *(getattr(iterable, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    parts.append(getattr(parts[2], "sampler", None))
    return [part for part in parts if part is not None]


def _stateful(one: object) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def as_source(given: Any) -> Source | Stream:
    """Whatever a user gave, as a source. Raises UsageError."""
    if all(hasattr(given, name) for name in ("open", "get", "where", "describe", "close", "__len__")):
        found: Source = given
        return found
    if isinstance(given, DataLoader) or type(given).__name__ == "StatefulDataLoader":
        return Stream(given, batched=True)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, IterableDataset):
        return MapStyle(given)
    if hasattr(given, "__iter__"):
        return Stream(given, batched=False)
    raise UsageError(
        f"a {type(given).__name__} is no source of samples: give JsonLines, Json, Arrow, a Dataset, an "
        f"iterable or "
        "a DataLoader"
    )
