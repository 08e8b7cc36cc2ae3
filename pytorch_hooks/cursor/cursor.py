"""A rank's position in its data, so that after a fault no batch is seen twice and none is left out.

The order of batches is the loader's own. A loader with state_dict/load_state_dict (torchdata's stateful
protocol) is asked for its position; any other iterable is begun again with the random state it was begun
with, and the batches already seen are passed over. A process that lives keeps its iterator, and repeats from
memory what it had taken but not committed. Where the script has changed tensors of these in place, the loader
gives them once more, as in a new process.

A loader may talk to the other ranks' as it begins (Accelerate's makes its generator rank 0's), or for each
batch. Where that was noticed, every process begins the epoch again, and all of them talk as they did.
"""

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.pytorch_hooks.cursor.loader_state import LoaderState, drawn, generators, redraw
from ckptless.pytorch_hooks.cursor.turns import Place, here, is_behind
from ckptless.pytorch_hooks.errors import CarriedError
from ckptless.pytorch_hooks.state import private, raw, rng
from ckptless.pytorch_hooks.state.second_look import is_due

# Elements of a tensor that its digest is of; a batch is looked into so deep.
SAMPLE = 4096
DEPTH = 8
# Of a batch so many things in all, so many items of a dict or list, and objects with attributes so deep, are
# looked at for changes in place.
THINGS, ITEMS, OBJECTS = 1000, 256, 3
# How many commits back a recovery may go: one more than can be under way.
REMEMBERED_COMMITS = 3
# Of the next batch: it draws what it draws; what the begin draws, too; or nothing, if that was all of it.
DRAWS, BEGINS, BEGUN = range(3)


class LoaderPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`index` batches of epoch `epoch` are done. Once one is, exactly one of `loader` and `begun` is set.

    `loader`: its state_dict then. `begun`: the random state that the epoch began with. `own`: in both cases,
    that of the generators that the loader itself has; `drawn`: that which they have now, where `loader` is
    set. `seen`: a digest of the begin of that batch, where `begun` is set; `before`: the random state that it
    was fetched with, where to fetch it has moved a generator. `recut`: it is that of another number of ranks,
    and says so in every commit until a loader has gone on from it. `trained`: some of its batches were
    committed, as are none of one that is only evaluated; `current`: one of the newest step; `left`: the loop
    over it was left in the middle of its epoch; `behind`: it was asked for behind the loader without a name,
    in the same turn of a loop around both.
    """

    epoch: int = 0
    index: int = 0
    loader: Any = None
    begun: Any = None
    own: list[Any] | None = None
    drawn: list[Any] | None = None
    seen: int = 0
    before: Any = None
    recut: bool = False
    trained: bool = False
    current: bool = False
    left: bool = False
    behind: bool = False


@dataclass(frozen=True)
class _Taken:
    """A batch that was given out, with containers of its own, and the world right after it was fetched.

    `after` is the batch that was given out before it, as (epoch, index), maybe of the epoch before.
    """

    position: LoaderPosition
    after: tuple[int, int]
    batch: Any
    # None where to fetch it moved no generator.
    random: dict[str, Any] | None
    # What it was like then: a script may have changed its tensors in place.
    mark: tuple[object, ...]

    @property
    def is_changed(self) -> bool:
        return _mark(self.batch) != self.mark


class Knows(NamedTuple):
    """Whether a script has asked which epoch, and which step it is in, and so asks for what is to come.

    `own`: it has an epoch of its own in the State.
    """

    epoch: bool
    step: bool
    own: bool = False


KNOWS_ALL = Knows(epoch=True, step=True, own=True)


class Cursors:
    """The positions of a script's loaders, by name; "" is the one without. Main thread only.

    `calls()`: how many collectives this process has begun. `shared()`: by id what loaders have together with
    the State. `tell`: takes a sentence for who runs the job. `over`: takes the name of a loader that was
    asked for again, and whose loop is over. `goes_on`: is called before the loop that the fault was in does.
    """

    def __init__(
        self,
        calls: Callable[[], int] = lambda: 0,
        shared: Callable[[], Container[int]] = tuple,
        tell: Callable[[str], None] = lambda _text: None,
        over: Callable[[str], None] = lambda _name: None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        self._new = partial(Cursor, calls, shared, tell)
        self._over, self._goes_on = over, goes_on
        self._named: dict[str, Cursor] = {"": self._new()}
        # Since the training function was entered: whether each loader was asked for several epochs at once or
        # for one after the other, and for how many.
        self._asked: dict[str, tuple[bool, int]] = {}
        # Of several at once, by the first of them: how many, whenever it was entered.
        self._counts: dict[tuple[str, int], int] = {}
        # Those that have given a batch since the last step; and for the record, see LoaderPosition.
        self._gave: set[str] = set()
        self._trained: set[str] = set()
        self._current: set[str] = set()
        self._left: set[str] = set()
        self._behind: set[str] = set()
        # Since the training function was entered, what was given for each loader last; the one whose loop has
        # ended last, and those of the same step, which have given no batch to another one since.
        self._found: dict[str, weakref.ref[Iterator[Any]]] = {}
        self._ended = ""
        self._beside: set[str] = set()
        # Where the one without a name was asked for last.
        self._unnamed: Place = ()
        # The loaders that what was restored is in the middle of; the same until the loop over one begins;
        # and all that have trained, until they go on.
        self._cut_off: frozenset[str] = frozenset()
        self._middle = self._cut_off
        self._restored: set[str] = set()
        # Whether what was restored is in a loop behind the one without a name, of whose epoch it still is.
        self._is_behind = False

    def enter(self) -> None:
        """The training function is entered, and asks for all of its epochs again."""
        self._asked.clear()
        self._found.clear()
        self._beside.clear()
        self._unnamed = ()

    @property
    def epoch(self) -> int:
        """The epoch of the loader without a name; the one before where a loop behind its is not over."""
        self._end_dropped()
        return self._named[""].position.epoch - self._is_behind

    def batches(
        self, loader: Iterable[Any], epochs: int, name: str, knows: Knows = KNOWS_ALL
    ) -> Iterator[Any]:
        """Batches from the position on: of one epoch the rest, of several what is left of them in the job.

        A script begins at its top again, and asks for loops that are over: of these there is no rest, and no
        next epoch. They are those that it asks for before the one that the fault was in; and as many of each
        loader as have been, where it does not know better. Of loops side by side, as zip's, all are over
        with the first of them. Raises CarriedError where a loader is asked for both one epoch and several, or
        for another number of them than before a fault.
        """
        several = epochs != 1
        before, asked = self._asked.get(name, (several, 0))
        if before != several:
            raise CarriedError(
                "run.batches gives several epochs of a loader, and single ones of the same: after a fault "
                "nobody could tell which are over. Give one of them a name: run.batches(..., name=...)"
            )
        self._end_dropped()
        if name in self._beside:
            self._end_beside(name)
        self._note_place(name, asked)
        self._asked[name] = several, asked + epochs
        cursor = self._named.setdefault(name, self._new())
        if not knows.own:
            # What it asks for is the epoch of the loader without a name.
            knows = knows._replace(epoch=knows.epoch and "" in self._trained)
        is_counted = not any(knows) and len({self._named[one].position.epoch for one in self._middle}) == 1
        goes_on = name in self._cut_off and not (is_counted and asked + epochs <= cursor.position.epoch)
        if several and self._counts.setdefault((name, asked), epochs) != epochs:
            raise CarriedError(
                f"run.batches was asked for {self._counts[name, asked]} epochs before a fault, and for "
                f"{epochs} after it. They are counted from the begin of the job: give the same number again"
            )
        if several:
            found = self._given(name, cursor.batches(loader, epochs, asked))
        else:
            found = self._unless_over(name, cursor.batches(loader), asked, knows)
        found = self._after_goes_on(found) if goes_on else found
        self._found[name] = weakref.ref(found)
        return found

    def _after_goes_on(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Only now: of loops that follow each other (chain) all may be asked for before the first begins.
        self._middle, self._is_behind = frozenset(), False
        self._goes_on()
        yield from batches

    def _end_beside(self, name: str) -> None:
        """End the epoch of a loader, as that of one beside it has ended."""
        self._beside.remove(name)
        self._left.discard(name)
        self._named[name].end_epoch()

    def _end_dropped(self) -> None:
        """End the epochs of those beside a loop that has ended that nobody can take a batch of any more."""
        for name in [name for name in self._beside if self._found[name]() is None]:
            self._end_beside(name)

    def _note_place(self, name: str, asked: int) -> None:
        if not name:
            self._unnamed = here()
        elif is_behind(self._unnamed, here(), is_later=self._asked.get("", (False, 0))[1] > asked):
            self._behind.add(name)
        else:
            self._behind.discard(name)

    def _unless_over(self, name: str, batches: Iterator[Any], asked: int, knows: Knows) -> Iterator[Any]:
        # Only now: of loaders side by side all are asked for before the first of them gives a batch.
        if name in self._restored:
            if self._is_over(name, asked, knows):
                self._over(name)
                return
            self._restored.remove(name)
        yield from self._given(name, batches)
        if name in self._current:
            beside = self._current & self._found.keys() - {name}
            self._beside = {one for one in beside if not self._asked[one][0]}
            self._ended = name

    def _is_over(self, name: str, asked: int, knows: Knows) -> bool:
        """Whether a loop over a loader, asked for so often before, was over at what was restored."""
        position = self._named[name].position
        if not name and knows.epoch:
            # That epoch is this loader's. The loop with the fault may come behind all of its epochs, too.
            was_behind, self._is_behind = self._is_behind, False
            return was_behind or (bool(self._middle) and position.index == 0)
        if name in self._middle:
            return True
        if self._middle and (position.left or position.index == 0):
            return asked < position.epoch + position.left
        # One with a name may be begun anew whenever it ends, beside another one.
        counts = not any(knows) and (position.index == 0 or not name)
        return counts and asked < position.epoch

    def _given(self, name: str, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._gave.add(name)
            self._left.discard(name)
            if name == self._ended:
                self._beside.clear()
            try:
                yield batch
            except GeneratorExit:
                self._left.add(name)
                raise

    def end_epoch(self, name: str) -> None:
        """See Cursor."""
        self._named.setdefault(name, self._new()).end_epoch()

    def passed(self) -> None:
        """A step is over that is not committed."""
        self._beside -= self._gave
        self._gave.clear()

    def committed(self) -> dict[str, Any]:
        """All positions, for the record."""
        self._end_dropped()
        saved = {name: cursor.committed() for name, cursor in self._named.items()}
        in_it = {name for name, position in saved.items() if position["index"]}
        self._current = (self._gave or self._current) & in_it
        self._trained |= self._current
        self.passed()
        for name, position in saved.items():
            position["trained"], position["current"] = name in self._trained, name in self._current
            position["left"] = name in self._left and position["index"] > 0
            position["behind"] = name in self._behind
        return saved

    def objects(self) -> dict[int, Any]:
        """Return the loaders, with their samplers and what else of them has a position, by id."""
        return {key: one for cursor in self._named.values() for key, one in cursor.objects().items()}

    def oldest(self, name: str) -> LoaderPosition | None:
        """The oldest position of a loader that a recovery can ask for; None before the first commit."""
        cursor = self._named.get(name)
        return cursor.oldest if cursor is not None else None

    def restore(self, saved: Any, *, recut: bool = False) -> None:
        """Go back to committed positions; what was not begun then is begun anew. Raises ProtocolError.

        `recut`: they are those of another number of ranks.
        """
        if type(saved) is not dict:
            raise ProtocolError("the record's data positions are no dict")
        for name in self._named.keys() | saved.keys():
            position = saved.get(name, msgspec.structs.asdict(LoaderPosition()))
            self._named.setdefault(name, self._new()).restore(position, recut=recut)
        at = {name: self._named[name].position for name in saved}
        self._trained = {name for name, position in at.items() if position.trained}
        self._current = {name for name, position in at.items() if position.current}
        self._left = {name for name, position in at.items() if position.left}
        self._behind = {name for name, position in at.items() if position.behind}
        self._gave.clear()
        self._beside.clear()
        self._restored, self._cut_off = {*self._trained}, frozenset(self._current)
        self._middle = self._cut_off
        unnamed = at.get("", LoaderPosition())
        is_after = unnamed.trained and unnamed.index == 0 < unnamed.epoch
        self._is_behind = is_after and bool(self._middle) and self._middle <= self._behind


class Cursor:
    """The position of one loader; what it is given as for Cursors. Main thread only."""

    def __init__(
        self,
        calls: Callable[[], int] = lambda: 0,
        shared: Callable[[], Container[int]] = tuple,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.position = LoaderPosition()
        self._calls, self._shared, self._tell = calls, shared, tell
        self._kept = LoaderState(())
        # What the loader's objects looked like right after a batch was fetched, now and then.
        self._fetches = 0
        self._looks: dict[str, Any] | None = None
        self._told = False
        # Whether the loader has talked to other ranks', and whether it can be asked for its state (None: not
        # known yet).
        self._talks = False
        self._tells: bool | None = None
        # What the next batch draws, of an iterator that was begun again in the middle of its epoch.
        self._again = DRAWS
        # Loaders that were begun, and have generators of their own.
        self._former: list[weakref.ref[Any]] = []
        # By id, of the samplers of a loader: the epoch that each had as an iterator was begun, or _SET.
        self._epochs: dict[int, Any] = {}
        # Of the newest epochs: what the loader's own generators were like as each began.
        self._own: dict[int, list[Any]] = {}
        self._iterator: Iterator[Any] | None = None
        self._source: Iterable[Any] | None = None
        self._layout: object = None
        # Whether the next batch moves no generator, and whether those after it do not.
        self._draws_nothing = self._drawless = False
        self._fetched = LoaderPosition()
        self._epoch_end: LoaderPosition | None = None
        self._last = (0, 0)
        self._taken: deque[_Taken] = deque()
        # A batch that is fetched once more, since the script has changed it, and the digest that it had.
        self._again_as = _NOT_AGAIN
        self._commits: deque[LoaderPosition] = deque(maxlen=REMEMBERED_COMMITS)

    def objects(self) -> dict[int, Any]:
        """See Cursors."""
        return self._kept.objects()

    # ------------------------------------------------------------------------------------ commit

    def committed(self) -> dict[str, Any]:
        """The position for the record; what is older than any recovery can ask for is forgotten."""
        self._look_at_commit()
        if self.position.index == 0 and self._source is not None:
            # The next epoch has not begun: what its generators will begin with is known here only.
            own = self._own.get(self.position.epoch, self._kept.read())
            self.position = msgspec.structs.replace(self.position, own=own or None)
        self._commits.append(self.position)
        oldest = self._commits[0]
        while self._taken and _order(self._taken[0].position) <= _order(oldest):
            self._taken.popleft()
        return msgspec.structs.asdict(self.position)

    @property
    def oldest(self) -> LoaderPosition | None:
        """The oldest position that a recovery can ask for; None before the first commit."""
        return self._commits[0] if self._commits else None

    def restore(self, saved: Any, *, recut: bool = False) -> None:
        """Go back (or on, in a new process) to a committed position. Raises ProtocolError.

        `recut`: it is one of another number of ranks, and holds only for a loader that cuts its batches anew.
        """
        try:
            self.position = msgspec.convert(saved, LoaderPosition)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the record's data position: {error}") from error
        if recut:
            self.position = msgspec.structs.replace(self.position, recut=True)
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

    def batches(self, loader: Iterable[Any], epochs: int = 1, first: int | None = None) -> Iterator[Any]:
        """Batches from the position on, to the end of `epochs` epochs; they begin with `first`, or here."""
        end = epochs + (self.position.epoch if first is None else first)
        while self.position.epoch < end:
            yield from self._rest_of_epoch(loader)
            self.position = LoaderPosition(epoch=self.position.epoch + 1)

    def end_epoch(self) -> None:
        """Leave out what the epoch has beyond the position: the next batch is the next epoch's first.

        One that has not begun is not left out: the one before has ended by itself.
        """
        if not self.position.index:
            return
        self._iterator, self._epoch_end = None, None
        self.position = LoaderPosition(epoch=self.position.epoch + 1)

    def _rest_of_epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        if self._is_epoch_end():
            return
        yield from self._repeat(loader)
        if not self._stands_at_position(loader):
            self._begin(loader)
        while True:
            try:
                batch = self._fetch(loader)
            except BaseException:
                # A generator that has raised would say from now on that the epoch ends here; and a batch that
                # came and is not among those taken would be missing.
                self._iterator = None
                raise
            if batch is _END:
                return
            yield batch

    def _fetch(self, loader: Iterable[Any]) -> Any:
        """Return the next batch, and stand behind it; _END where the epoch has no more."""
        assert self._iterator is not None
        calls = self._calls()
        before = rng.capture() if self._again != DRAWS else None
        drew_from = None if self._draws_nothing else rng.capture()
        batch = next(self._iterator, _END)
        if batch is _END:
            if before is not None:
                self._undo_begin(before)
            self._iterator, self._epoch_end = None, self.position
            # What a sampler changes as it ends is not the script's.
            self._looks = None
            return _END
        self._talks |= self._calls() != calls
        if before is not None:
            self._undo_begin(before)
        # To read them is half of what all of this costs.
        random = None if self._draws_nothing else rng.capture()
        drew = random is not None and drew_from is not None and not rng.equal(random, drew_from)
        self._fetched = self._after_batch(loader, batch, drew_from if drew else None)
        self.position = self._fetched
        self._draws_nothing = self._drawless
        self._look_at_fetch()
        self._check_again()
        kept = _copied(batch)
        self._taken.append(_Taken(self.position, self._last, kept, random, _mark(kept)))
        self._last = _order(self.position)
        return batch

    def _check_again(self) -> None:
        """Raise CarriedError where a batch that the script has changed in place comes back changed."""
        at, as_before = self._again_as
        self._again_as = _NOT_AGAIN
        if at == _order(self.position) and self.position.seen != as_before:
            raise CarriedError(
                "the script changes batches in place, and the loader gives them changed, so that after a "
                "fault they would be changed twice: change a copy (x = x * 2)"
            )

    def _undo_begin(self, before: dict[str, Any]) -> None:
        """Take back what an iterator that was begun again has drawn with its first batch. Raises UsageError.

        Where the next one draws as well nobody can tell what of that was the begin.
        """
        drew = not rng.equal(before, rng.capture())
        if drew and self._again == BEGUN:
            raise UsageError(
                "the loader draws random numbers both as it begins and with its batches, and begun again "
                "after a fault it does both at once: give its DataLoader a generator of its own "
                "(generator=torch.Generator())"
            )
        if drew:
            rng.restore(before)
        self._again = BEGUN if drew else DRAWS

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
        """Give again what this process had taken beyond the position, in the same order and random states."""
        if self._iterator is None or not self._is_source(loader):
            return
        for taken in [t for t in self._taken if _order(t.position) > _order(self.position)]:
            if _order(taken.position) != (self.position.epoch, self.position.index + 1):
                return
            if taken.is_changed:
                # The loader gives it once more, as it does in a new process.
                self._iterator, self._again_as = None, (_order(taken.position), taken.position.seen)
                return
            if taken.random is not None:
                rng.restore(taken.random)
            self.position = taken.position
            self._last = _order(self.position)
            yield _copied(taken.batch)

    def _after_batch(
        self, loader: Iterable[Any], batch: Any, before: dict[str, Any] | None
    ) -> LoaderPosition:
        """`before`: what the generators were like before the batch was fetched, where that has moved one."""
        here, state = self.position, None
        if self._tells is None:
            self._tells = _tells(loader)
        if self._tells:
            state = loader.state_dict()  # type: ignore[attr-defined]
            _refuse_inexact(loader)
            own, now = self._own.get(here.epoch) or None, drawn(loader) or None
            return LoaderPosition(epoch=here.epoch, index=here.index + 1, loader=state, own=own, drawn=now)
        if before is not None and here.index and getattr(loader, "num_workers", 0):
            raise UsageError(
                "the loader draws from this process's random generators for batches that its workers make "
                "ahead, and after a fault would draw others: give its sampler a generator of its own "
                "(generator=torch.Generator()), or take num_workers=0"
            )
        index, seen = here.index + 1, _digest(batch)
        return msgspec.structs.replace(here, index=index, seen=seen, before=before, recut=False)

    def _look_at_fetch(self) -> None:
        self._fetches += 1
        self._looks = self._kept.look() if is_due(self._fetches) and not self._told else None

    def _look_at_commit(self) -> None:
        """Note what the script has changed in the loader since its batch was fetched."""
        looks, self._looks = self._looks, None
        if looks is None:
            return
        now = self._kept.look()
        place = next((place for place in now if now[place] != looks.get(place)), None)
        if place is not None:
            self._say(
                f"{place} of the loader is changed by the script between two batches, and no commit has it: "
                "put into the State the list, dict, tensor or array that it is in"
            )

    def _tell_large(self) -> None:
        if self._kept.large is not None:
            self._say(
                f"{self._kept.large} of the loader changes from epoch to epoch, and is too large to be kept "
                "with each commit: if the order of batches depends on it, give the loader state_dict and "
                "load_state_dict"
            )

    def _tell_of_turns(self, loader: Iterable[Any]) -> None:
        """Tell where a loader with a generator of its own comes again after another: it has not been kept.

        A loader that is made anew for each epoch does not come again.
        """
        if not generators(loader):
            return
        self._former = [one for one in self._former if one() is not None]
        if any(one() is loader for one in self._former):
            self._say(
                "loaders take turns under one name, and one has a generator of its own: after a fault it "
                "would not be where it was. Give each a name: run.batches(..., name=...)"
            )
        self._former.append(weakref.ref(loader))

    def _say(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._tell(text)

    def _begin(self, loader: Iterable[Any]) -> None:
        """Start an epoch's iterator and bring it to the position. Raises UsageError."""
        if self.position.recut and self.position.index and not getattr(loader, "cuts_anew", False):
            raise UsageError(
                f"a {type(loader).__name__} stands in the middle of an epoch of another number of ranks, "
                "whose batches it cannot cut anew: take ckptless.data.MappedLoader, whose order is the same "
                "for any number, or go on with as many ranks as have saved the step"
            )
        self._taken.clear()
        self._again = DRAWS
        if self._source is not loader:
            self._tell_of_turns(loader)
            self._tells = None
            self._kept = LoaderState(loader, self._shared)
            self._epochs = {}
        self._source, self._layout = loader, getattr(loader, "layout", None)
        # Most draw a seed where they begin.
        self._draws_nothing, self._drawless = False, _is_drawless(loader)
        parts: list[Any] = [
            loader,
            getattr(loader, "sampler", None),
            getattr(loader, "batch_sampler", None),
        ]
        for part in parts:
            if hasattr(part, "set_epoch") and not self._is_set_by_script(part):
                part.set_epoch(self.position.epoch)
        calls = self._calls()
        if self.position.loader is not None:
            now = rng.capture()
            # A sampler without a state is passed over by the loader: with the same numbers.
            if self.position.own is not None:
                self._kept.put(self.position.own)
            loader.load_state_dict(self.position.loader)  # type: ignore[attr-defined]
            self._iterator = iter(loader)
            # What an iterator draws as it begins was drawn when the epoch began.
            rng.restore(now)
            # But a generator begins with the first batch.
            self._again = BEGINS if inspect.isgeneratorfunction(type(loader).__iter__) else DRAWS
            if self.position.drawn is not None and self._again == DRAWS:
                redraw(loader, self.position.drawn)
        else:
            self._pass_over(loader)
        self._talks |= self._calls() != calls
        self._epochs |= {
            id(part): part.epoch
            for part in parts
            if isinstance(part, DistributedSampler) and self._epochs.get(id(part)) != _SET
        }
        self._fetched = self.position

    def _is_set_by_script(self, part: Any) -> bool:
        """Whether the script tells a sampler its epoch, and may count otherwise: some begin at 1."""
        if not isinstance(part, DistributedSampler):
            return False
        known = self._epochs.get(id(part), 0)
        if known not in (_SET, part.epoch):
            self._epochs[id(part)] = known = _SET
        return bool(known == _SET)

    def _pass_over(self, loader: Iterable[Any]) -> None:
        now, epoch = rng.capture(), self.position.epoch
        # Generators that are in the State, too, are what they were at the commit, or since then.
        shared = self._shared()
        living = [(one, one.get_state()) for one in generators(loader) if id(one) in shared]
        # Of an epoch that this process or another one has begun before.
        if epoch in self._own:
            self._kept.put(self._own[epoch])
        if self.position.index == 0:
            _set_all(living)
        own = self._kept.read()
        self._tell_large()
        self._own = {e: states for e, states in self._own.items() if e > epoch - REMEMBERED_COMMITS} | {
            epoch: own
        }
        if self.position.index == 0:
            self.position = LoaderPosition(epoch=epoch, begun=now, own=own or None)
            self._iterator = iter(loader)
            return
        rng.restore(self.position.begun)
        self._iterator = iter(loader)
        batch: Any = None
        for passed in range(self.position.index):
            if passed == self.position.index - 1 and self.position.before is not None:
                # What a batch draws as it is fetched depends on what the training had drawn before it.
                rng.restore(self.position.before)
            batch = next(self._iterator, _END)
            if batch is _END:
                raise ProtocolError(f"the loader ended after {passed} batches, before the committed position")
        if _digest(batch) != self.position.seen:
            raise UsageError(
                f"the loader, begun again, gives another batch {self.position.index} of epoch {epoch} than "
                "before the fault: what its order depends on is not in its random generators alone. Give it "
                "state_dict and load_state_dict, or make the order follow from the epoch (set_epoch)"
            )
        rng.restore(now)
        _set_all(living)


_NOT_AGAIN = ((-1, 0), 0)
_END = object()
# In the place of an epoch that the script sets.
_SET = object()


def _set_all(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    for one, state in states:
        one.set_state(state)


def _digest(batch: Any) -> int:
    """Return a digest of the begin of each tensor and array on the CPU, and of numbers and strings."""
    hasher = xxhash.xxh3_64()
    _add(hasher, batch, 0)
    return hasher.intdigest()


def _copied(batch: Any, depth: int = 0) -> Any:
    """Return it with dicts, lists and tuples of its own: a script may take items out, or put others in."""
    if depth > DEPTH:
        return batch
    if type(batch) is dict:
        return {key: _copied(item, depth + 1) for key, item in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_copied(item, depth + 1) for item in batch)
    return batch


def _mark(batch: Any) -> tuple[object, ...]:
    """Return what tells whether a batch was changed in place: of its tensors no values are read."""
    found: list[object] = []
    _note(found, batch, 0)
    return tuple(found)


def _note(found: list[object], value: Any, depth: int) -> None:
    if len(found) > THINGS:
        return
    if isinstance(value, torch.Tensor):
        found += (id(value), private.version(value))
    elif isinstance(value, Mapping):
        found.append(len(value))
        for key, item in islice(value.items(), ITEMS):
            found.append(key)
            _note(found, item, depth + 1)
    elif isinstance(value, (list, tuple)):
        found.append(len(value))
        if depth < DEPTH:
            for item in islice(value, ITEMS):
                _note(found, item, depth + 1)
    elif isinstance(value, (bool, int, float, str, bytes)):
        found.append(value)
    else:
        found.append(id(value))
        if depth < OBJECTS and hasattr(value, "__dict__"):
            _note(found, vars(value), depth + 1)


def _add(hasher: xxhash.xxh3_64, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type == "cpu" and raw.why_not(value) is None:
            begin = value.detach().reshape(-1)[:SAMPLE] if value.is_contiguous() else value[:1]
            flat = raw.flat(begin)
            hasher.update(raw.window(flat))
        hasher.update(repr(tuple(value.shape)).encode())
    elif isinstance(value, dict):
        for key, item in value.items():
            hasher.update(str(key).encode(errors="replace"))
            _add(hasher, item, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < DEPTH:
        for item in value:
            _add(hasher, item, depth + 1)
    elif (type(value).__module__, type(value).__name__) == ("numpy", "ndarray"):
        _add(hasher, value.tolist() if value.size < SAMPLE else value.shape, depth + 1)
    elif isinstance(value, (bool, int, float, str, bytes)):
        hasher.update(repr(value).encode(errors="replace"))


def _order(position: LoaderPosition) -> tuple[int, int]:
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


def _refuse_inexact(loader: Any) -> None:
    """Raise UsageError for loaders that, given their state, do not go on as they would have."""
    if getattr(loader, "use_stateful_dataloader", False):
        raise UsageError(
            "after a fault Accelerate's loaders with use_stateful_dataloader=True do not begin again as they "
            "would have gone on: leave that out, their place is kept without it"
        )
    sampler = getattr(loader, "sampler", None)
    shared = getattr(loader, "generator", None)
    is_shared = shared is not None and getattr(sampler, "generator", None) is shared
    if is_shared and getattr(sampler, "replacement", False):
        raise UsageError(
            "after a fault a StatefulDataLoader whose sampler draws with replacement, and from the loader's "
            "own generator, does not go on as it would have: give the sampler another one than the loader"
        )
