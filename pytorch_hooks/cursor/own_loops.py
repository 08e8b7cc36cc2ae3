"""A script's own loops, over a DataLoader or over epochs: after a fault nobody knows where they were."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from ckptless.pytorch_hooks.cursor.carried import CarriedData, Has
from ckptless.pytorch_hooks.cursor.cursor import Knows
from ckptless.pytorch_hooks.cursor.turns import is_in_loop, left_behind
from ckptless.pytorch_hooks.state.reach import script_frames
from ckptless.pytorch_hooks.torch_private.batches import given

# Commits of a process that are looked at: who takes batches for each step does so from the first one on.
LOOKS = 16
# The first steps after each entry, whose batches are counted.
PACE = 4


class OwnLoops:
    """Tells, once each, of loops that would not go on where a fault cut them off. Main thread only.

    `tell`, and `tell_late` of a loop that ends behind its commit, take a sentence for who runs the job.

    Where iterators of DataLoaders give batches to one step after the other; an evaluation's ends before the
    next commit. Of torchdata's StatefulDataLoader a State may have the position: it is left out. Where epoch
    follows epoch, and nobody has asked which. Where the first step has taken a batch more than others, or
    others have taken none. A script may have its own ways to go on, so that none of it is an error.
    """

    def __init__(self, tell: Callable[[str], None], tell_late: Callable[[str], None]) -> None:
        self._tell, self._tell_late = tell, tell_late
        self._is_late_known = False
        self._data = CarriedData(tell)
        # Since the training function was entered: whether the script has asked for the epoch, and whether for
        # the step. `asked`: for the step, since the last epoch ended.
        self.knows_epochs = self.knows_step = self.asked = False
        self._told_epochs = False
        self._looks = 0
        self._known = False
        # Batches of `run.batches` since the last step, and of the first steps.
        self._gave = 0
        self._pace: list[int] = []
        # Those that live, what each had given at the last commit, and whether that was more than before it.
        self._given: dict[int, tuple[weakref.ref[Any], int, bool]] = {}
        _watch()
        _listeners[:] = [self._begun]

    def enter(self) -> None:
        """The training function is entered."""
        self.knows_epochs = self.knows_step = self.asked = False
        self._gave = 0
        self._pace.clear()

    def gave(self) -> None:
        """A batch of `run.batches` is given."""
        self._gave += 1

    def stepped(self) -> None:
        """A step is over."""
        if len(self._pace) == PACE:
            return
        self._pace.append(self._gave)
        self._gave = 0
        first, *others = self._pace
        if len(self._pace) == PACE and first > 1 and set(others) == {first - 1}:
            self._tell(
                "the script seems to take a batch ahead of the step that trains on it: the commit of the "
                "step before counts it as done, and after a fault nobody trains on it unless the State has "
                "it. Take it behind run.commit, and let the workers of a DataLoader make batches ahead"
            )
        elif len(self._pace) == PACE and first and 0 in others:
            self._tell(
                "the script makes several steps of one batch: after a fault between two of them it goes on "
                "with the next batch. Commit behind the last of them, or keep the batch in the State"
            )

    @property
    def knows(self) -> Knows:
        """Return what the script can know of where it is."""
        return Knows(epoch=self.knows_epochs, step=self.asked)

    @contextmanager
    def known(self) -> Iterator[None]:
        """Take iterators that begin in here for those of `run.batches`."""
        before, self._known = self._known, True
        try:
            yield
        finally:
            self._known = before

    def _begun(self, iterator: Any) -> None:
        if not self._known:
            self._given[id(iterator)] = weakref.ref(iterator), 0, False

    def next_epoch(self, epoch: int) -> None:
        """The rest of this epoch is asked for."""
        if epoch == 0 or any(self.knows) or self._told_epochs:
            return
        self._told_epochs = True
        self._tell(
            "the script goes from epoch to epoch and does not ask run.epoch: after a fault its loop begins "
            "at its first epoch again. Those that are over get no batches, but what it does after each (a "
            "scheduler's step) is done again. Write for epoch in range(run.epoch, epochs)"
        )

    def look_at_code(
        self, train: Callable[..., Any] | None, kept: Mapping[str, Any], has: Callable[[], Has]
    ) -> None:
        """Look at the script's loops and their variables, at a step that the State has such plain data at.

        `has()`: see `CarriedData.look`.
        """
        if self._data.done:
            return
        frames = script_frames(train)
        self._data.look(frames, kept, asks=self.knows_step, has=has())
        if not self._is_late_known:
            self._is_late_known = True
            self._look_for_late(frames)

    def _look_for_late(self, frames: list[FrameType]) -> None:
        """Tell where the loop of a commit may end behind it: nobody could say after a fault that it has."""
        for frame in frames:
            if is_in_loop(frame.f_code, frame.f_lasti):
                line = left_behind(frame.f_code, frame.f_lasti)
                if line is not None:
                    self._tell_late(
                        f"line {line} of {Path(frame.f_code.co_filename).name} ends the loop behind "
                        "run.commit: after a fault between the two one more step is trained. Ask at the top "
                        "of the loop whether there is a step to come"
                    )
                return

    def look(self) -> None:
        """Look, at a commit."""
        if self._looks == LOOKS:
            return
        self._looks += 1
        found = False
        for number, (reference, before, grew) in list(self._given.items()):
            iterator = reference()
            if iterator is None:
                del self._given[number]
                continue
            now = given(iterator)
            found |= grew and now > before > 0
            self._given[number] = reference, now, now > before
        if found:
            self._tell(
                "the script takes batches of a DataLoader itself, and no commit has where it is: after a "
                "fault it begins that anew, and steps train on other batches. Take them by "
                "run.batches(loader)"
            )
        if found or self._looks == LOOKS:
            self._looks = LOOKS
            self._given.clear()
            _listeners.clear()


_listeners: list[Callable[[Any], None]] = []


@functools.cache
def _watch() -> None:
    """Have the listener told of each iterator of a DataLoader that begins, from here on."""
    begin = DataLoader.__iter__

    @functools.wraps(begin)
    def watched(loader: DataLoader[Any]) -> Any:
        iterator = begin(loader)
        for listener in _listeners:
            listener(iterator)
        return iterator

    DataLoader.__iter__ = watched  # type: ignore[method-assign]
