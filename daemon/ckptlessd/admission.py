"""Decide whom the daemon hears, and how much of each: connections, messages, log lines. Pure.

Of local processes by their user (uid), of other nodes by their address.

No clock is in it: `now` is in seconds of the daemon's.
"""

import logging
from collections import Counter
from collections.abc import Collection
from typing import TypeAlias

from ckptless.daemon.transport.bucket import TokenBucket

logger = logging.getLogger(__name__)

Who: TypeAlias = int | str

# Connections of one user, and of all but the trusted ones: one user may have many uids (subuid(5)). Beyond
# these somebody who waits for nothing gives way, while there are no more than `MOST_CONNECTIONS`.
CONNECTIONS_PER_UID, CONNECTIONS = 64, 512
MOST_CONNECTIONS = 2 * CONNECTIONS
# Messages of one user in a second, and at once. Agents send four a second each, and some at every recovery.
MESSAGES_PER_S, MESSAGES_AT_ONCE = 200.0, 1000.0
# A message counts once more for each so many bytes.
MESSAGE_NBYTES = 4096
# What is refused of one user is logged once in so many seconds; and of all that are not trusted, so many
# lines in a second and at once: a local user has as many addresses as 127/8.
LOG_AGAIN_S = 60.0
LINES_PER_S, LINES_AT_ONCE = 1.0, 60.0
# Events of one job's agent that are written in a second, and at once.
EVENTS_PER_S, EVENTS_AT_ONCE = 0.5, 100.0
# Users that have no connection and are still remembered for the log.
MOST_KEPT = 4096


class Admission:
    """`trusted` users (root, the daemon's own) are neither limited nor slowed down."""

    def __init__(self, trusted: Collection[Who] = ()) -> None:
        self._trusted = frozenset(trusted)
        self._open: Counter[Who] = Counter()
        self._count = 0
        self._buckets: dict[Who, TokenBucket] = {}
        self._logged: dict[Who, tuple[float, int]] = {}
        self._lines = TokenBucket(LINES_PER_S, LINES_AT_ONCE)
        self._silent = 0

    def enter(self, who: Who) -> str:
        """Count a new connection of `who`; why it is refused, or "": then `leave` is called at its end."""
        if who not in self._trusted:
            if self._open[who] >= CONNECTIONS_PER_UID:
                return f"{CONNECTIONS_PER_UID} connections of it are there already"
            if self._count >= MOST_CONNECTIONS:
                return f"{MOST_CONNECTIONS} connections are there already"
            self._count += 1
        self._open[who] += 1
        return ""

    @property
    def crowded(self) -> bool:
        """Whether one that waits for nothing is to give way to the one that was let in last."""
        return self._count > CONNECTIONS

    def may_stay(self, who: Who) -> bool:
        """Whether `who` never has to give way."""
        return who in self._trusted

    def leave(self, who: Who) -> None:
        """A connection of `who` that was let in is closed."""
        self._count -= who not in self._trusted
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    def pace(self, who: Who, messages: int, nbytes: int, now: float) -> float:
        """Seconds to wait before so many messages and bytes of `who` are dealt with."""
        if who in self._trusted:
            return 0.0
        if len(self._buckets) > MOST_KEPT:
            self._buckets = {one: bucket for one, bucket in self._buckets.items() if one in self._open}
        bucket = self._buckets.setdefault(who, TokenBucket(MESSAGES_PER_S, MESSAGES_AT_ONCE))
        return bucket.take(messages + nbytes / MESSAGE_NBYTES, now)

    def may_log(self, who: Who, now: float) -> int | None:
        """Whether a refusal of `who` gets a line now: how many since the last one got none, or None.

        Among these are others' that got none because there were too many lines.
        """
        if who in self._trusted:
            return 0
        at, silent = self._logged.get(who, (float("-inf"), 0))
        if now - at < LOG_AGAIN_S:
            self._logged[who] = (at, silent + 1)
            return None
        if not self._lines.spend(1, now):
            self._silent += 1
            return None
        if len(self._logged) > MOST_KEPT:
            self._logged.clear()
        self._logged[who] = (now, 0)
        silent, self._silent = silent + self._silent, 0
        return silent

    def tell_refused(self, who: Who, text: str, now: float) -> None:
        """Log that `who` is refused, in words, unless `may_log` is against it."""
        more = self.may_log(who, now)
        if more is not None:
            also = f" (and {more} more since the last line like this)" if more else ""
            logger.warning("refused %s%s", text, also)


class EventQuota:
    """A limit on the events of one job's agent; those beyond are counted, and that is told."""

    def __init__(self) -> None:
        self._bucket = TokenBucket(EVENTS_PER_S, EVENTS_AT_ONCE)
        self._dropped = 0
        self._told_at = float("-inf")

    def take(self, now: float) -> bool:
        """Whether an event that has come is written."""
        if self._bucket.spend(1, now):
            return True
        self._dropped += 1
        return False

    def dropped(self, now: float) -> int:
        """Return how many were not written since this was told last, where it is to be told now; else 0."""
        if not self._dropped or now - self._told_at < LOG_AGAIN_S:
            return 0
        count, self._dropped, self._told_at = self._dropped, 0, now
        return count
