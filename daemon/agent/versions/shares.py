"""Pure: which chunks of a version are asked of which holder, and who gives what a bad one does not."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

# What is asked for at once is as many chunks as make up so much. More as long as much is open, as each piece
# costs both ends something beside its bytes; less towards the end, which all sources are to reach together.
LEAST_NBYTES, MOST_NBYTES = 32 << 20, 64 << 20
# Asked for at a time, so that a holder always has something to send.
AHEAD = 2
# An idle holder takes over what another has owed for so long, plus so many times what it needs itself.
SLOW_S, SLOW_TIMES = 1.0, 4.0


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` of the payload: whole chunks; `verify`: its holder is to look at them first."""

    start: int
    end: int
    verify: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of it."""
        return self.end - self.start


@dataclass
class _Source:
    asked: dict[Piece, float] = field(default_factory=dict)
    nbytes: int = 0
    busy_s: float = 0.0
    # When it last gave a piece: those that it was asked for ahead of time have their turn since then.
    gave: float = 0.0


class Shares:
    """The pieces of parts of a payload, for `sources` of them. Each is open, asked of one source, or done.

    `spans` are those parts, from and to, in whole chunks; `least_nbytes` what is asked for at once at least.

    Whoever is fast asks for more of them. Times are in seconds, by whatever clock the caller has.
    """

    def __init__(
        self,
        spans: Iterable[tuple[int, int]],
        chunk_nbytes: int,
        sources: int,
        least_nbytes: int | None = None,
    ) -> None:
        self._least_nbytes = LEAST_NBYTES if least_nbytes is None else least_nbytes
        self._open = deque(Piece(start, end) for start, end in spans if start < end)
        self._left = sum(piece.nbytes for piece in self._open)
        self._chunk_nbytes, self._count = chunk_nbytes, sources
        self._sources: dict[int, _Source] = {}

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return self._left == 0

    def ask(self, source: int, now: float) -> Piece | None:
        """The next piece for a source; None where all are there or asked of others."""
        known = self._sources.setdefault(source, _Source())
        if not self._open:
            return None
        nbytes = self._size()
        piece = self._open.popleft()
        if piece.nbytes > nbytes:
            self._open.appendleft(Piece(piece.start + nbytes, piece.end))
            piece = Piece(piece.start, piece.start + nbytes)
        known.asked[piece] = now
        return piece

    def _size(self) -> int:
        """Return the bytes of the next piece."""
        share = sum(piece.nbytes for piece in self._open) // (AHEAD * self._count)
        nbytes = min(max(share, self._least_nbytes), MOST_NBYTES)
        return max(1, nbytes // self._chunk_nbytes) * self._chunk_nbytes

    def came(self, source: int, piece: Piece, now: float, began: float) -> None:
        """Note that a share has been received, and is not verified yet."""
        known = self._sources[source]
        known.nbytes += piece.nbytes
        known.busy_s += max(0.0, now - began)
        known.gave = now

    def done(self, source: int, piece: Piece) -> None:
        """Note that a share is there and verified."""
        if self._sources[source].asked.pop(piece, None) is not None:
            self._left -= piece.nbytes

    def again(self, source: int, piece: Piece, now: float) -> Piece:
        """Return what to ask again of the source of a share that did not verify; it is to look at its own."""
        known = self._sources[source]
        del known.asked[piece]
        anew = Piece(piece.start, piece.end, verify=True)
        known.asked[anew] = now
        return anew

    def back(self, source: int) -> None:
        """Open for the others what a source was asked for: nothing more comes from it."""
        known = self._sources.pop(source, None)
        for piece in known.asked if known is not None else ():
            self._open.appendleft(Piece(piece.start, piece.end))

    def slow(self, idle: int, now: float) -> int | None:
        """A source that keeps an idle one waiting for much longer than that would need for the same."""
        me = self._sources.get(idle)
        if me is None or not me.nbytes or not me.busy_s:
            return None
        rate = me.nbytes / me.busy_s
        for source, known in self._sources.items():
            owed = next(iter(known.asked.items()), None)
            if source != idle and owed is not None:
                piece, since = owed
                if now - max(since, known.gave) > SLOW_S + SLOW_TIMES * piece.nbytes / rate:
                    return source
        return None
