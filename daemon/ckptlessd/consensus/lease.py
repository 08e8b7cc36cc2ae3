"""Pure: whether a node hears enough of its job's voters to decide anything, and to let its ranks live.

Whoever hears a quorum goes on, and may hold for lost whom it does not hear. Whoever hears less may be the one
that is cut off: for it nothing changes any more but the time. Exactly half asks the witness.
"""

from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.consensus.quorum import is_quorum

# So long the same half is heard before the witness is asked: they may be coming back, one after the other.
WITNESS_AFTER_S = 1.0
WITNESS_AGAIN_S = 1.0


@dataclass
class Lease:
    """`since`: when this node last heard a quorum, None while it does; in seconds."""

    since: float | None = None
    _voters: tuple[int, ...] = ()
    _ours: set[int] = field(default_factory=set)
    _ours_since: float = 0.0
    _asked: float = 0.0

    def renew(self, voters: tuple[int, ...], heard: set[int], dead: set[int], now: float) -> None:
        """Note who is heard at `now`. `dead`: see `is_quorum`."""
        ours = heard.intersection(voters)
        if ours != self._ours:
            self._ours, self._ours_since = ours, now
        self._voters = voters
        if is_quorum(voters, heard, dead):
            self.since = None
        elif self.since is None:
            self.since = now

    @property
    def held(self) -> bool:
        """Whether this node may decide."""
        return self.since is None

    def away_s(self, now: float) -> float:
        """Return for how long this node has not heard enough, in seconds; 0.0 while it does."""
        return 0.0 if self.since is None else now - self.since

    def witness_due(self, now: float, turn: int, later_s: float = 0.0) -> bool:
        """Whether the witness is to be asked now, after `turn` others; it says so again after a while.

        `later_s`: so much later in any turn.
        """
        after_s = WITNESS_AFTER_S + later_s + turn * WITNESS_AGAIN_S
        early = now - self._ours_since < after_s or now - self._asked < WITNESS_AGAIN_S
        half = 2 * len(self._ours) == len(self._voters)
        if self.held or not half or early:
            return False
        self._asked = now
        return True
