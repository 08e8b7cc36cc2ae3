"""Which next batches of other nodes' ranks are kept here, in case their node is lost.

Pure. Who holds a rank's record knows which batch it takes next, and that one lies ready on its node: so it is
fetched after each record, where to make it would take long. What is kept is what the newest records that are
held here name, by position and manifest, and nothing else: so what a new generation goes on with stays, and
what never happened goes with its record.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckptless.daemon.api.feed import Feed, Feeds, next_feed, ring_of

# Of a loader whose batches take so long to make. A quicker one's is begun when the node is lost, and there by
# the time that it is asked for: a recovery takes 0.16 s and more, and a first batch may add 0.2 s to it.
WORTH_S = 0.1
# A recovery goes back to the newest record of a rank, or to the one before.
RECORDS = 2
# What is kept for other nodes takes one part in so many of its ring's budget.
PARTS = 4
# A stream is given up for the rest of the generation after so many in a row that did not come.
FAILURES = 3

StreamKey = tuple[str, str, int]


@dataclass(frozen=True)
class RingFacts:
    """In how many seconds a batch is made here, and how many bytes may be kept for other nodes."""

    takes_s: float
    room_nbytes: int


@dataclass(frozen=True)
class Stand:
    """Where a rank stands by its newest records, the newest first, and its node.

    That is None where the newest one is what this generation began with: what it names is kept, if it is
    here, and not fetched, since the rank may be as new on its node.
    """

    node: int | None
    feeds: Sequence[Feeds]


@dataclass(frozen=True)
class Plan:
    """What to let go of, what to fetch no further, and what from which node.

    `late`: those that are fetched no further whose streams are given up with that.
    """

    drop: tuple[Feed, ...] = ()
    cancel: tuple[Feed, ...] = ()
    late: tuple[Feed, ...] = ()
    fetch: tuple[tuple[Feed, int], ...] = ()


@dataclass
class _Kept:
    nbytes: int
    after: bytes


@dataclass
class _Coming:
    """`nbytes` is 0 until that is known."""

    feed: Feed
    nbytes: int = 0


@dataclass
class _Past:
    """What did not come of a stream in this generation."""

    newest: Feed
    in_a_row: int = 0


class Standbys:
    """What is kept and what is under way, of each stream one at most."""

    def __init__(self) -> None:
        self._kept: dict[Feed, _Kept] = {}
        self._coming: dict[StreamKey, _Coming] = {}
        self._past: dict[StreamKey, _Past] = {}

    def anew(self) -> None:
        """A new generation: nothing is under way, and what failed is tried again."""
        self._coming.clear()
        self._past.clear()

    def update(self, stands: Iterable[Stand], facts: Callable[[Feed], RingFacts | None]) -> Plan:
        """Of the ranks of other nodes whose records are here; `facts` of rings that make such batches here,
        None of others.
        """
        stands = list(stands)
        found = {feed: facts(feed) for stand in stands for feeds in stand.feeds[:RECORDS] for feed in feeds}
        named = {feed for feed, ring in found.items() if ring is not None}
        for feed in sorted(self._kept, key=lambda feed: feed.seq):
            if feed in named:
                # Also that, which its rank takes next, where a recovery has gone back by one.
                named.add(next_feed(feed, self._kept[feed].after))
        drop = tuple(feed for feed in self._kept if feed not in named)
        for feed in drop:
            del self._kept[feed]
        newest = _newest(stands, named)
        cancel = tuple(coming.feed for coming in self._coming.values() if coming.feed not in named)
        overtaken = [feed for feed in cancel if stream_of(feed) in newest]
        late = tuple(feed for feed in overtaken if self.failed(feed))
        for feed in cancel:
            self._coming.pop(stream_of(feed), None)
        fetch = tuple((feed, node) for feed, node in newest.values() if self._wants(feed, found[feed]))
        for feed, _node in fetch:
            self._coming[stream_of(feed)] = _Coming(feed)
        return Plan(drop, cancel, late, fetch)

    def _wants(self, feed: Feed, ring: RingFacts | None) -> bool:
        stream, past = stream_of(feed), self._past.get(stream_of(feed))
        if feed in self._kept or stream in self._coming or ring is None or ring.takes_s < WORTH_S:
            return False
        return past is None or (past.newest != feed and past.in_a_row < FAILURES)

    def admit(self, feed: Feed, nbytes: int, ring: RingFacts | None) -> tuple[Feed, ...] | None:
        """A batch of this size is about to come: what to let go of for it. None: it is not wanted any more,
        or there is no room.
        """
        coming = self._coming.get(stream_of(feed))
        if coming is None or coming.feed != feed or ring is None:
            return None
        same = [other for other in self._kept if ring_of(other) == ring_of(feed)]
        reserved = (one.nbytes for one in self._coming.values() if ring_of(one.feed) == ring_of(feed))
        free = ring.room_nbytes - sum(self._kept[other].nbytes for other in same) - sum(reserved)
        newest: dict[StreamKey, int] = {stream_of(feed): feed.seq}
        for other in same:
            newest[stream_of(other)] = max(other.seq, newest.get(stream_of(other), 0))
        older = sorted((o for o in same if o.seq < newest[stream_of(o)]), key=lambda other: other.seq)
        drop: list[Feed] = []
        while free < nbytes and older:
            drop.append(older.pop(0))
            free += self._kept[drop[-1]].nbytes
        if free < nbytes:
            return None
        for other in drop:
            del self._kept[other]
        coming.nbytes = nbytes
        return tuple(drop)

    def came(self, feed: Feed, nbytes: int, after: bytes) -> bool:
        """It is there, verified; False where it is not wanted any more."""
        coming = self._coming.get(stream_of(feed))
        if coming is None or coming.feed != feed:
            return False
        del self._coming[stream_of(feed)]
        self._kept[feed] = _Kept(nbytes, after)
        if (past := self._past.get(stream_of(feed))) is not None:
            past.in_a_row = 0
        return True

    def failed(self, feed: Feed) -> bool:
        """It did not come. Whether its stream is given up with that, until the next generation.

        One alone is nothing to tell: a loader may just have been closed there, or the node lost.
        """
        stream = stream_of(feed)
        coming = self._coming.get(stream)
        if coming is None or coming.feed != feed:
            return False
        del self._coming[stream]
        past = self._past.setdefault(stream, _Past(feed))
        past.newest, past.in_a_row = feed, past.in_a_row + 1
        return past.in_a_row == FAILURES

    def run_from(self, feed: Feed) -> list[Feed]:
        """What is kept of the batches from this one on, without a gap."""
        found: list[Feed] = []
        while (kept := self._kept.get(feed)) is not None:
            found.append(feed)
            feed = next_feed(feed, kept.after)
        return found


def stream_of(feed: Feed) -> StreamKey:
    """Which stream of which ring it belongs to."""
    return feed.loader, feed.manifest, feed.stream


def _newest(stands: Iterable[Stand], named: set[Feed]) -> dict[StreamKey, tuple[Feed, int]]:
    """Of each stream the batch that comes last, as records of this generation have it, and who has it."""
    found: dict[StreamKey, tuple[Feed, int]] = {}
    for stand in stands:
        if stand.node is None:
            continue
        for feed in stand.feeds[0] if stand.feeds else ():
            former = found.get(stream_of(feed))
            if feed in named and (former is None or former[0].seq < feed.seq):
                found[stream_of(feed)] = (feed, stand.node)
    return found
