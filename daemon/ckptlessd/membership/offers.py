"""Pure: how a long message gets to all, once to each: it is offered first, and sent to whoever asks for it.

As Plumtree's lazy links do it (Leitao, Pereira and Rodrigues, Epidemic broadcast trees, 2007).
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[int, int]

# Messages that are kept for whoever asks; what comes later asks whoever leads.
KEPT = 8
# Whoever was asked and has not sent it by then is gone, or slow: the next one is asked.
ASK_AGAIN_S = 0.2
ASKED_MOST = 64


@dataclass
class _Wanted:
    asked_at: float
    others: list[int] = field(default_factory=list)


@dataclass
class Offers(Generic[T]):
    """The messages that this daemon can give, and those it has asked for. A key is (origin, serial)."""

    _kept: OrderedDict[Key, T] = field(default_factory=OrderedDict)
    _wanted: OrderedDict[Key, _Wanted] = field(default_factory=OrderedDict)

    def keep(self, key: Key, message: T) -> None:
        """Keep a message that is here, and may be asked for."""
        self._wanted.pop(key, None)
        self._kept[key] = message
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def asked(self, key: Key) -> T | None:
        """Somebody wants it; None where it is not kept (any more)."""
        return self._kept.get(key)

    def offered(self, key: Key, node: int, now: float) -> bool:
        """A neighbour has it; whether to ask that one for it now."""
        if key in self._kept:
            return False
        wanted = self._wanted.get(key)
        if wanted is not None:
            wanted.others.append(node)
            return False
        self._wanted[key] = _Wanted(now)
        if len(self._wanted) > ASKED_MOST:
            self._wanted.popitem(last=False)
        return True

    def overdue(self, now: float) -> list[tuple[Key, int]]:
        """Return whom to ask instead of those who have not answered."""
        again: list[tuple[Key, int]] = []
        for key, wanted in list(self._wanted.items()):
            if now - wanted.asked_at < ASK_AGAIN_S:
                continue
            if not wanted.others:
                del self._wanted[key]
                continue
            wanted.asked_at = now
            again.append((key, wanted.others.pop(0)))
        return again
