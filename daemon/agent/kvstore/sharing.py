"""What clients of one node ask alike: all ranks of a full mesh wait for the same keys, and get them. Pure."""

from collections.abc import Callable
from typing import Generic, TypeVar

from ckptless.daemon.agent.kvstore.answers import Answer, Done, nothing
from ckptless.daemon.agent.kvstore.protocol import Keys

T = TypeVar("T")

MAX_REMEMBERED = 64


class Memo(Generic[T]):
    """Something of each of the last few lists of keys, as of a stamp: under another it is gone."""

    def __init__(self) -> None:
        self._known: dict[Keys, tuple[int, T]] = {}

    def get(self, keys: Keys, stamp: int = 0) -> T | None:
        """What was put under that stamp."""
        known = self._known.get(keys)
        return known[1] if known is not None and known[0] == stamp else None

    def put(self, keys: Keys, value: T, stamp: int = 0) -> None:
        """Remember it, in place of the list that has been here longest."""
        self._known.pop(keys, None)
        if len(self._known) >= MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[keys] = (stamp, value)


class Turns:
    """Of clients that wait for the same keys one asks; the others look when that wait is over.

    They look themselves, and do not take its answer: it may be of a time before they came.
    """

    def __init__(self) -> None:
        self._behind: dict[Keys, list[_Behind]] = {}

    def stand_behind(self, keys: Keys, again: Callable[[], Callable[[], None]]) -> "_Behind | None":
        """Behind the one who asks for them, if there is one; then `again()` asks, and says how to cancel."""
        behind = self._behind.get(keys)
        if behind is None:
            return None
        one = _Behind(again)
        behind.append(one)
        return one

    def lead(self, keys: Keys, done: Done) -> Done:
        """Be the one who asks; what is to be told in place of `done`."""
        self._behind[keys] = []

        def over(answer: Answer) -> None:
            self.let_go(keys)
            done(answer)

        return over

    def let_go(self, keys: Keys) -> None:
        """The wait is over, or canceled."""
        for one in self._behind.pop(keys, ()):
            one.look()


class _Behind:
    """One who stands behind another."""

    def __init__(self, again: Callable[[], Callable[[], None]]) -> None:
        self._again: Callable[[], Callable[[], None]] | None = again
        self._cancel: Callable[[], None] = nothing

    def look(self) -> None:
        """It is its turn."""
        again, self._again = self._again, None
        if again is not None:
            self._cancel = again()

    def cancel(self) -> None:
        """It does not wait any more."""
        self._again = None
        self._cancel()
