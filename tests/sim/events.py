"""Virtual time, and connections that carry messages in order."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Action = Callable[[], None]


class Events:
    """What is yet to happen, in order of time; at the same time, in the order it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, Action]] = []

    def at(self, when: float, action: Action) -> None:
        """Do `action` at a time."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, action))

    def after(self, delay: float, action: Action) -> None:
        """Do `action` in so many seconds."""
        self.at(self.now + delay, action)

    def step(self) -> bool:
        """The next thing happens; False where nothing is left."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True


class Channel(Generic[T]):
    """One direction of a connection: late by chance, but in order, as TCP gives it."""

    def __init__(self, events: Events, delay: Callable[[], float], deliver: Callable[[T], None]) -> None:
        self._events, self._delay, self._deliver = events, delay, deliver
        self._open = True
        self._last = 0.0

    def send(self, message: T) -> None:
        """Deliver later, unless the connection is cut first."""
        self._then(lambda: self._deliver(message))

    def finish(self, closed: Action) -> None:
        """The sender has died: what it sent still comes, and then its end."""
        self._then(closed)

    def hold(self, until: float) -> None:
        """Nothing gets through before then; afterwards all of it does, in order."""
        self._last = max(self._last, until)

    @property
    def is_open(self) -> bool:
        """Whether what is sent still arrives."""
        return self._open

    def cut(self) -> None:
        """What is under way is lost."""
        self._open = False

    def _then(self, action: Action) -> None:
        self._last = max(self._last, self._events.now + self._delay())
        self._events.at(self._last, lambda: action() if self._open else None)
