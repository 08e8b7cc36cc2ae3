"""What becomes of a request to the store, at whichever agent its keys are. Pure."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from msgspec import Struct

from ckptless.daemon.agent.kvstore.protocol import Int64, Keys


class Reply(Struct, frozen=True, tag=True, array_like=True):
    """`count` and `values` by the request; `keep` are the places in it of values that may be cached.

    count: the sum of an Add, how many a Delete deleted, a NumKeys counted or are in a queue, whether a Check
    found all (0 or 1). values: of a Get, MultiGet or CompareSet, of a Wait where they are small, what a
    QueuePop got, the keys of a ListKeys; None where there is none.
    """

    count: Int64 = 0
    values: tuple[bytes | None, ...] = ()
    keep: tuple[int, ...] = ()


class Refusal(Struct, frozen=True, tag=True, array_like=True):
    """It was not done, and its client is hung up on. `hostile`: because of what the client asked for."""

    text: str
    hostile: bool


Answer: TypeAlias = Reply | Refusal
Done: TypeAlias = Callable[[Answer], None]
DONE = Reply()


def nothing() -> None:
    """How to cancel what cannot be, or has ended."""


class Join:
    """Collects the answers to the parts of one request; `done` hears of all of them, or of one refusal."""

    def __init__(self, parts: int, done: Callable[[list[Reply] | Refusal], None]) -> None:
        self._replies: list[Reply | None] = [None] * parts
        self._left, self._done = parts, done
        self._over = False
        if not parts:
            self._over = True
            done([])

    def part(self, place: int) -> Done:
        """Who hears the answer to one part."""

        def take(answer: Answer) -> None:
            if self._over:
                return
            if isinstance(answer, Refusal):
                self._over = True
                self._done(answer)
                return
            self._replies[place] = answer
            self._left -= 1
            if not self._left:
                self._over = True
                self._done([reply for reply in self._replies if reply is not None])

        return take


def by_home(keys: Iterable[bytes], home: Callable[[bytes], int]) -> dict[int, Keys]:
    """The keys that each node keeps, in order."""
    found: dict[int, list[bytes]] = {}
    for key in keys:
        found.setdefault(home(key), []).append(key)
    return {node: tuple(theirs) for node, theirs in found.items()}
