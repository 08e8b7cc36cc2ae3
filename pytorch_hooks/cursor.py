"""Where a rank stands in its data, so that after a fault no batch is seen twice and none is left out.

The order of batches is the loader's own. A loader with state_dict/load_state_dict (torchdata's stateful
protocol) is asked for its position; any other iterable is begun again with the random state it was begun
with, and the batches already seen are passed over. A process that lives keeps its iterator, and repeats from
memory what it had taken but not committed.

A loader may talk to the other ranks' as it begins (Accelerate's makes its generator rank 0's), or for each
batch. Where that was noticed, every process begins the epoch again, and all of them talk as they did.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ckptless.daemon.api.errors import ProtocolError
from ckptless.pytorch_hooks.state import rng

# How many commits back a recovery may go: one more than can be under way.
REMEMBERED_COMMITS = 3


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`index` batches of epoch `epoch` are done. Once one is, exactly one of `loader` and `begun` is set.

    `loader`: its state_dict then. `begun`: the random state that the epoch began with, and `own` that of the
    generators that the loader itself has.
    """

    epoch: int = 0
    index: int = 0
    loader: Any = None
    begun: Any = None
    own: list[Any] | None = None


@dataclass(frozen=True)
class _Taken:
    """A batch that was given out, and what the world was like right after it was fetched.

    `after` is the batch that was given out before it, as (epoch, index), maybe of the epoch before.
    """

    position: Position
    after: tuple[int, int]
    batch: Any
    # None where to fetch it moved no generator.
    random: rng.Snapshot | None


class Cursors:
    """The positions of a script's loaders, by name; "" is the one without. Main thread only.

    `calls()`: how many collectives this process has begun.
    """

    def __init__(self, calls: Callable[[], int] = lambda: 0) -> None:
        self._calls = calls
        self._named: dict[str, Cursor] = {"": Cursor(calls)}

    @property
    def position(self) -> Position:
        """Where the loader stands that is not named."""
        return self._named[""].position

    def batches(self, loader: Iterable[Any], epochs: int, name: str) -> Iterator[Any]:
        """See Cursor."""
        return self._named.setdefault(name, Cursor(self._calls)).batches(loader, epochs)

    def committed(self) -> dict[str, Any]:
        """All positions, for the record."""
        return {name: cursor.committed() for name, cursor in self._named.items()}

    def oldest(self, name: str) -> Position | None:
        """The oldest position of a loader that a recovery can ask for; None before the first commit."""
        cursor = self._named.get(name)
        return cursor.oldest if cursor is not None else None

    def restore(self, saved: Any) -> None:
        """Go back to committed positions; what was not begun then is begun anew. Raises ProtocolError."""
        if type(saved) is not dict:
            raise ProtocolError("the record's data positions are no dict")
        for name in self._named.keys() | saved.keys():
            position = saved.get(name, msgspec.structs.asdict(Position()))
            self._named.setdefault(name, Cursor(self._calls)).restore(position)


class Cursor:
    """The position of one loader; `calls` as for Cursors. Main thread only."""

    def __init__(self, calls: Callable[[], int] = lambda: 0) -> None:
        self.position = Position()
        self._calls = calls
        # Whether the loader has talked to other ranks', and whether it can be asked for its state (None: not
        # known yet).
        self._talks = False
        self._tells: bool | None = None
        # Of the newest epochs: what the loader's own generators were like as each began.
        self._own: dict[int, list[Any]] = {}
        self._iterator: Iterator[Any] | None = None
        self._source: Iterable[Any] | None = None
        self._layout: object = None
        # Whether the next batch moves no generator, and whether those after it do not.
        self._draws_nothing = self._drawless = False
        self._fetched = Position()
        self._epoch_end: Position | None = None
        self._last = (0, 0)
        self._taken: deque[_Taken] = deque()
        self._commits: deque[Position] = deque(maxlen=REMEMBERED_COMMITS)

    # ------------------------------------------------------------------------------------ commit

    def committed(self) -> dict[str, Any]:
        """The position for the record; what is older than any recovery can ask for is forgotten."""
        if self.position.index == 0 and self._source is not None:
            # The next epoch has not begun: what its generators will begin with is known here only.
            own = self._own.get(self.position.epoch, _drawn(self._source))
            self.position = msgspec.structs.replace(self.position, own=own or None)
        self._commits.append(self.position)
        oldest = self._commits[0]
        while self._taken and _order(self._taken[0].position) <= _order(oldest):
            self._taken.popleft()
        return msgspec.structs.asdict(self.position)

    @property
    def oldest(self) -> Position | None:
        """The oldest position that a recovery can ask for; None before the first commit."""
        return self._commits[0] if self._commits else None

    def restore(self, saved: Any) -> None:
        """Go back (or on, in a new process) to a committed position. Raises ProtocolError."""
        try:
            self.position = msgspec.convert(saved, Position)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the record's data position: {error}") from error
        self._last = _order(self.position)
        if self.position.own is not None:
            self._own = {**self._own, self.position.epoch: self.position.own}
        if self._talks:
            # A process that is new talks from the begin of the epoch on: so does this one.
            self._iterator = self._epoch_end = None
            self._taken.clear()
        # It may be asked for again until as many commits have followed it as ever.
        self._commits.clear()
        self._commits.append(self.position)

    # ---------------------------------------------------------------------------------- batches

    def batches(self, loader: Iterable[Any], epochs: int) -> Iterator[Any]:
        """Batches from the position on, to the end of `epochs` epochs from the current one's begin."""
        for _ in range(epochs):
            yield from self._rest_of_epoch(loader)
            self.position = Position(epoch=self.position.epoch + 1)

    def _rest_of_epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        if self._is_epoch_end():
            return
        yield from self._repeat(loader)
        if not self._stands_at_position(loader):
            self._begin(loader)
        assert self._iterator is not None
        while True:
            calls = self._calls()
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator, self._epoch_end = None, self.position
                return
            except BaseException:
                # A generator that has raised would say from now on that the epoch ends here.
                self._iterator = None
                raise
            self._talks |= self._calls() != calls
            self._fetched = self._after_batch(loader)
            self.position = self._fetched
            # To read them is half of what all of this costs.
            random = None if self._draws_nothing else rng.snapshot()
            self._draws_nothing = self._drawless
            self._taken.append(_Taken(self.position, self._last, batch, random))
            self._last = _order(self.position)
            yield batch

    def _stands_at_position(self, loader: Iterable[Any]) -> bool:
        """Whether the living iterator's next batch is the one after the position."""
        begun = self.position.index > 0 and _order(self._fetched) == _order(self.position)
        return begun and self._iterator is not None and self._is_source(loader)

    def _is_source(self, loader: Iterable[Any]) -> bool:
        """Whether it is the loader that the living iterator is of, and has the same part of the batches."""
        return self._source is loader and self._layout == getattr(loader, "layout", None)

    def _is_epoch_end(self) -> bool:
        """Whether this process knows that the epoch has no batch after the position."""
        here = _order(self.position)
        gone_on = any(t.after == here and t.position.epoch > here[0] for t in self._taken)
        return gone_on or (self._epoch_end is not None and _order(self._epoch_end) == here)

    def _repeat(self, loader: Iterable[Any]) -> Iterator[Any]:
        """What this process had taken beyond the position, in the same order and random states."""
        if self._iterator is None or not self._is_source(loader):
            return
        for taken in [t for t in self._taken if _order(t.position) > _order(self.position)]:
            if _order(taken.position) != (self.position.epoch, self.position.index + 1):
                return
            if taken.random is not None:
                rng.restore(taken.random.tree())
            self.position = taken.position
            self._last = _order(self.position)
            yield taken.batch

    def _after_batch(self, loader: Iterable[Any]) -> Position:
        here, state = self.position, None
        if self._tells is None:
            self._tells = _tells(loader)
        if self._tells:
            state = loader.state_dict()  # type: ignore[attr-defined]
            return Position(epoch=here.epoch, index=here.index + 1, loader=state)
        return msgspec.structs.replace(here, index=here.index + 1)

    def _begin(self, loader: Iterable[Any]) -> None:
        """Start an epoch's iterator and bring it to the position."""
        self._taken.clear()
        if self._source is not loader:
            self._tells = None
        self._source, self._layout = loader, getattr(loader, "layout", None)
        # Most draw a seed where they begin.
        self._draws_nothing, self._drawless = False, _is_drawless(loader)
        for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(self.position.epoch)
        calls = self._calls()
        if self.position.loader is not None:
            loader.load_state_dict(self.position.loader)  # type: ignore[attr-defined]
            self._iterator = iter(loader)
        else:
            self._pass_over(loader)
        self._talks |= self._calls() != calls
        self._fetched = self.position

    def _pass_over(self, loader: Iterable[Any]) -> None:
        now, epoch = rng.capture(), self.position.epoch
        # Of an epoch that this process or another one has begun before.
        if epoch in self._own:
            _redraw(loader, self._own[epoch])
        own = _drawn(loader)
        self._own = {e: states for e, states in self._own.items() if e > epoch - REMEMBERED_COMMITS} | {
            epoch: own
        }
        if self.position.index == 0:
            self.position = Position(epoch=epoch, begun=now, own=own or None)
            self._iterator = iter(loader)
            return
        rng.restore(self.position.begun)
        self._iterator = iter(loader)
        for passed in range(self.position.index):
            if next(self._iterator, _END) is _END:
                raise ProtocolError(f"the loader ended after {passed} batches, before the committed position")
        rng.restore(now)


_END = object()


def _order(position: Position) -> tuple[int, int]:
    return position.epoch, position.index


def _is_drawless(loader: Any) -> bool:
    """Whether it is known that to fetch a batch moves none of this process's random generators."""
    if type(loader) is not DataLoader:
        return type(loader) in (list, tuple) or getattr(loader, "drawless", False) is True
    if not loader.num_workers:
        return False
    drawn = [loader.sampler] if loader.batch_sampler is None else [loader.sampler, loader.batch_sampler]
    return isinstance(loader.dataset, IterableDataset) or all(type(one) in _DRAWLESS for one in drawn)


# Those that shuffle have a generator of their own, seeded where they begin.
_DRAWLESS = (SequentialSampler, RandomSampler, DistributedSampler, BatchSampler)


def _tells(loader: Any) -> bool:
    """Whether it can be asked for its position: some have state_dict only to say that they cannot."""
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False
    try:
        loader.state_dict()
    except (AttributeError, NotImplementedError):
        return False
    return True


def _generators(loader: Any) -> list[torch.Generator]:
    """Those that a loader, its samplers and a loader inside it have for themselves."""
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    queue = [loader]
    while queue:
        one = queue.pop(0)
        seen.add(id(one))
        for key, value in getattr(one, "__dict__", {}).items():
            if isinstance(value, torch.Generator):
                found[id(value)] = value
            elif isinstance(value, (Sampler, DataLoader)) or key == "base_dataloader":
                queue += [value] if id(value) not in seen else []
    return list(found.values())


def _drawn(loader: Any) -> list[Any]:
    return [one.get_state() for one in _generators(loader)]


def _redraw(loader: Any, states: list[Any]) -> None:
    generators = _generators(loader)
    if len(generators) != len(states):
        raise ProtocolError(
            f"the loader has {len(generators)} generators where the position has {len(states)}"
        )
    for one, state in zip(generators, states, strict=True):
        one.set_state(state)
