"""Copies that are being made again since their holder is gone: one event when all of them are there."""

import time
from collections.abc import Callable
from typing import Literal, TypeAlias

# "record" of a rank or "tensors" of a shard, its number, the step.
Key: TypeAlias = tuple[Literal["record", "tensors"], int, int]


class LostCopies:
    """Owned by the agent's event loop."""

    def __init__(self) -> None:
        self._missing: set[Key] = set()
        self._made: set[Key] = set()
        self._since = 0.0
        self.on_event: Callable[[str, str], None] = lambda _kind, _text: None

    def begin(self, key: Key) -> None:
        """It is being given to others."""
        if not self._missing:
            self._made, self._since = set(), time.monotonic()
        self._missing.add(key)

    def end(self, key: Key) -> None:
        """It is held by all who are to hold it."""
        if key not in self._missing:
            return
        self._missing.discard(key)
        self._made.add(key)
        self._tell()

    def fail(self, key: Key, why: str) -> None:
        """It cannot be given, if it was to be."""
        if key not in self._missing:
            return
        self._missing.discard(key)
        self.on_event("copies-not-remade", f"{_describe({key})}: {why}")
        self._tell()

    def _tell(self) -> None:
        if self._made and not self._missing:
            took_s = time.monotonic() - self._since
            self.on_event("copies-remade", f"{_describe(self._made)}, in {took_s:.2f} s")

    def clear(self) -> None:
        """A new generation, or the end: nothing of this is waited for any more."""
        self._missing.clear()
        self._made.clear()


def _describe(keys: set[Key]) -> str:
    steps = ", ".join(map(str, sorted({step for _, _, step in keys})))
    parts = [f"step {steps}"]
    for what, of in (("tensors", "shard"), ("record", "rank")):
        numbers = sorted({number for kind, number, _ in keys if kind == what})
        if numbers:
            parts.append(f"{what} of {of} {', '.join(map(str, numbers))}")
    return ": ".join((parts[0], "; ".join(parts[1:])))
