"""Where a rank stands in the batches of a ring: what another node needs to know to make its next ones."""

from typing import Annotated, TypeAlias

from msgspec import Meta, structs

from ckptless.daemon.api.model import Value
from ckptless.daemon.api.ring_entry import SEQ_LIMIT

# Of a loader's position, which goes with every commit.
FEED_POSITION_LIMIT = 4096
FEEDS_LIMIT = 16
# Of another node at once.
LEND_LIMIT = 16

# The name of its loader, and its manifest.
RingKey: TypeAlias = tuple[str, str]


class Feed(Value, frozen=True, kw_only=True):
    """Batch `seq` of `stream`, which follows `position`; `loader` and `manifest` as in RingOpen."""

    loader: Annotated[str, Meta(min_length=1, max_length=256)]
    manifest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    stream: Annotated[int, Meta(ge=0, lt=SEQ_LIMIT)]
    seq: Annotated[int, Meta(ge=0, lt=SEQ_LIMIT)]
    position: Annotated[bytes, Meta(max_length=FEED_POSITION_LIMIT)]


Feeds: TypeAlias = Annotated[tuple[Feed, ...], Meta(max_length=FEEDS_LIMIT)]


def ring_of(feed: Feed) -> RingKey:
    """Which ring it belongs to."""
    return feed.loader, feed.manifest


def next_feed(feed: Feed, after: bytes) -> Feed:
    """The batch that follows `feed`, which ends at position `after`."""
    return structs.replace(feed, seq=feed.seq + 1, position=after)
