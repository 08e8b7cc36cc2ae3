"""Pure: how a message gets to a daemon that is no neighbour, or to all of them.

To all: everybody passes it on to all neighbours, once. To one: by the neighbour over whom the newest of that
one came first, a message or, of voters, a sign of life in a beat (`pulses`); whoever knows no way passes it
to nobody, and it is said again. What is newest its own clock says, which is remembered also where the way is
gone: so each on a way knows something newer than the one before, or knew it earlier, and no way goes round
(as with the sequence numbers of AODV, RFC 3561, which are forgotten after a while, too). Where a way does so
after all, since something came very late, the hops end, and that daemon's next word mends it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

# A life has so many serials; one that says more goes on in the next, which is most likely nobody's.
LIFE_SERIALS = 1 << 20
# So many lives of a daemon are known apart: what older ones have said has come long ago, or never will.
LIVES = 4
# Of so many messages of one life it is known whether they came, when they come out of order.
WINDOW = 64
# For so long nothing newer has come: then what comes is taken for it, whatever the clock says. A daemon that
# is started again may have an earlier clock, and something of its former life may come after that.
REMEMBERED_S = 3.0
# Far more hops than it takes in any overlay.
MOST_HOPS = 32


@dataclass
class _Life:
    """The messages of one life that have come: all up to `floor` (or they never will), and `above` it."""

    floor: int = 0
    above: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def has(self, serial: int) -> bool:
        """Whether it has come, or never will."""
        return serial <= self.floor or serial in self.above

    def add(self, serial: int) -> bool:
        """Whether it is a new one."""
        if self.has(serial):
            return False
        self.above[serial] = None
        if len(self.above) > WINDOW:
            oldest, _ = self.above.popitem(last=False)
            self.floor = max(self.floor, oldest)
        return True


@dataclass
class Router:
    """Routes messages for the daemon of node `me`. Serials grow within a `life`, a number of its own."""

    me: int
    life: int
    _serial: int = field(init=False)
    _origins: dict[int, OrderedDict[int, _Life]] = field(default_factory=dict)
    # By that daemon's clock in ms, and when it came.
    _newest: dict[int, tuple[int, float]] = field(default_factory=dict)
    _ways: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._serial = self.life * LIFE_SERIALS

    def next_serial(self) -> int:
        """Return the serial of the next message of this daemon."""
        self._serial += 1
        return self._serial

    def has(self, origin: int, serial: int) -> bool:
        """Whether that message has come."""
        lives = self._origins.get(origin)
        known = lives.get(serial // LIFE_SERIALS) if lives is not None else None
        return origin == self.me or (known is not None and known.has(serial))

    def heard(self, sender: int, origin: int, serial: int, clock_ms: int, now: float) -> bool:
        """A message of `origin`, said at that time of its clock, came over `sender`; False if again."""
        if origin == self.me:
            return False
        lives = self._origins.setdefault(origin, OrderedDict())
        number = serial // LIFE_SERIALS
        if lives and number not in lives:
            # Its clock may have been set back.
            self._newest.pop(origin, None)
        lives.setdefault(number, _Life())
        if len(lives) > LIVES:
            lives.popitem(last=False)
        if not lives[number].add(serial):
            return False
        self.learn(origin, sender, clock_ms, now)
        return True

    def learn(self, node: int, neighbour: int, clock_ms: int, now: float) -> None:
        """Something that a daemon said at that time of its clock came by way of a neighbour."""
        newest_ms, came = self._newest.get(node, (-1, now))
        if node != self.me and (clock_ms > newest_ms or now - came > REMEMBERED_S):
            self._newest[node], self._ways[node] = (clock_ms, now), neighbour

    def toward(self, node: int) -> int | None:
        """The neighbour over whom the newest of that node came."""
        return self._ways.get(node)

    def forget(self, neighbour: int) -> None:
        """The connection to a neighbour is gone: nothing goes that way."""
        for node in [node for node, way in self._ways.items() if way == neighbour]:
            del self._ways[node]
