"""Plain data that a script's loop carries from one step to the next in variables, and that no commit has.

Whatever a loop sets looks alike to who sees values alone: a loss, a best loss, a counter. Its code says which
of them a turn may read before it has set them, and which it reads alone, so that it may change what is in
them: numbers, tensors, arrays, and containers of those.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
import xxhash

from ckptless.pytorch_hooks.cursor.turns import carried, only_read
from ckptless.pytorch_hooks.state import attributes, private
from ckptless.pytorch_hooks.state.reach import variables

# Commits at which variables are looked at before anything is told.
LOOKS = 4
# A float is a time where it is so near to a clock, and larger than that: a loss is not.
CLOCK_S = 1000.0
_CLOCKS = (time.time, time.monotonic, time.perf_counter)
# So much is looked at, of the State and a variable: so deep, so many of a container and in all, and bytes.
DEPTH, MANY, MOST, SMALL = 3, 1000, 10_000, 64 << 10
_Variable: TypeAlias = tuple[CodeType, str]
_NUMBERS = (int, float, complex)
_CONTAINERS = (list, tuple, dict, deque)
Has: TypeAlias = Callable[[Any], bool]


class CarriedData:
    """Tells of them, once, and is `done` then. Main thread only."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.done = False
        self._looks = 0
        # Of each variable of a function: what it was at every look. Those that a loop carries; and at how
        # many looks the State had the number, too.
        self._seen: dict[_Variable, list[Any]] = defaultdict(list)
        self._carried: set[_Variable] = set()
        self._only_read: set[_Variable] = set()
        self._kept: Counter[_Variable] = Counter()

    def look(
        self,
        frames: Iterable[FrameType],
        state: Mapping[str, Any],
        *,
        asks: bool,
        has: Has = lambda _one: False,
    ) -> None:
        """Look at the variables of a script's functions that are under way, at a commit of what `state` has.

        `asks`: the script asks which step it is at, and so can begin its own numbers with it. `has`: whether
        a tensor or container is kept anyway.
        """
        self._looks += 1
        given = [state, *(one for part in state.values() for one in islice(_walk(part), MOST))]
        kept = {_mark(one, has) for one in given if _is_number(one)}
        inside = {id(one) for one in given if type(one) not in _NUMBERS}
        for frame in frames:
            code = frame.f_code
            self._carried |= {(code, name) for name in carried(code, frame.f_lasti)}
            self._only_read |= {(code, name) for name in only_read(code, frame.f_lasti)}
            for name, one in variables(frame, _is_data).items():
                mark = None if id(one) in inside else _mark(one, has)
                self._seen[code, name].append(mark)
                self._kept[code, name] += mark in kept
        if self._looks == LOOKS:
            self.done = True
            names = sorted({one[1] for one, marks in self._seen.items() if self._is_lost(one, marks, asks)})
            if names:
                self._tell(
                    f"{' and '.join(names)}: variables of the training loop, which go on from step to step, "
                    "and no commit has them. After a fault they are what they were before the loop: put into "
                    "the State what the next step depends on, and count by run.step"
                )

    def _is_lost(self, one: _Variable, marks: list[Any], asks: bool) -> bool:
        if len(marks) < LOOKS or self._kept[one] == LOOKS or len(set(marks)) == 1:
            return False
        # What a loop around that one sets anew is another thing, not a changed one.
        is_same = all(type(mark) is tuple and mark[0] == marks[0][0] for mark in marks)
        is_carried = one in self._carried or (one in self._only_read and is_same)
        if all(type(mark) is int for mark in marks):
            by = {now - before for before, now in pairwise(marks)}
            if len(by) == 1:
                # It counts steps, or something for each of them.
                return not asks or (by != {1} and is_carried)
        return is_carried and not _is_time(marks[-1])


def _is_time(value: Any) -> bool:
    near = any(type(value) is float and abs(value - clock()) < CLOCK_S for clock in _CLOCKS)
    return near and value > CLOCK_S


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS or (isinstance(value, torch.Tensor) and value.grad_fn is None)


def _is_data(value: Any) -> bool:
    is_number = type(value) in _NUMBERS
    return is_number or isinstance(value, (torch.Tensor, *_CONTAINERS)) or attributes.is_array(value)


def _items(value: Any) -> tuple[Any, ...]:
    """Return what is in a container, unless that is too much; at once, as another thread may change it."""
    if not isinstance(value, _CONTAINERS) or len(value) > MANY:
        return ()
    return tuple(value.values() if isinstance(value, Mapping) else value)


def _walk(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield it, and what is in it, in containers in it, too."""
    yield value
    if depth <= DEPTH:
        for item in _items(value):
            yield from _walk(item, depth + 1)


def _mark(value: Any, has: Has, depth: int = 0) -> Any:
    """Return what tells data from what it was; of a tensor, which may be a device's, not its values."""
    if type(value) in (*_NUMBERS, bool, str):
        return value
    if not _is_data(value) or has(value):
        return None
    if isinstance(value, torch.Tensor):
        return id(value), private.version(value)
    if attributes.is_array(value):
        return id(value), xxhash.xxh3_64_intdigest(value.tobytes()) if value.nbytes <= SMALL else 0
    is_large = not depth and sum(1 for _ in islice(_walk(value), MOST + 1)) > MOST
    items = () if is_large or depth > DEPTH else _items(value)
    return id(value), len(value), tuple(_mark(item, has, depth + 1) for item in items)
