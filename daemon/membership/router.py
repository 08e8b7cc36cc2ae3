"""Pure: how a message gets to a daemon that is no neighbour, or to all of them.

To all: everybody passes it on to all neighbours, once. To one: by the neighbour over whom something of that
one came last, as an Ethernet bridge does it; whoever does not know passes it to nobody, and it is said again.
To voters, of whom one leads, there is always a way: their signs of life come with every beat (`pulses`).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

# A life has so many serials; one that says more goes on in the next, which is most likely nobody's.
LIFE_SERIALS = 1 << 20
# So many lives of a daemon are known apart: what older ones have said has come long ago, or never will.
LIVES = 4
# Of so many messages of one life it is known whether they came, when they come out of order.
WINDOW = 64
# Far more hops than it takes in any overlay.
MOST_HOPS = 32


@dataclass
class _Life:
    """Which messages of one life have come: all up to `floor` (or they never will), and `above` it."""

    floor: int = 0
    above: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def add(self, serial: int) -> bool:
        """Whether it is a new one."""
        if serial <= self.floor or serial in self.above:
            return False
        self.above[serial] = None
        if len(self.above) > WINDOW:
            oldest, _ = self.above.popitem(last=False)
            self.floor = max(self.floor, oldest)
        return True


@dataclass
class Router:
    """Of the daemon of node `me`. Serials grow within a `life`, a number that no other of its lives has."""

    me: int
    life: int
    _serial: int = 0
    _origins: dict[int, OrderedDict[int, _Life]] = field(default_factory=dict)
    _routes: dict[int, int] = field(default_factory=dict)

    def next_serial(self) -> int:
        """For a message of this daemon."""
        self._serial += 1
        return self.life * LIFE_SERIALS + self._serial

    def has(self, origin: int, serial: int) -> bool:
        """Whether that message has come."""
        lives = self._origins.get(origin)
        known = lives.get(serial // LIFE_SERIALS) if lives is not None else None
        return origin == self.me or (known is not None and (serial <= known.floor or serial in known.above))

    def heard(self, sender: int, origin: int, serial: int) -> bool:
        """A message of `origin` came over `sender`; False where it had come before."""
        if origin == self.me:
            return False
        lives = self._origins.setdefault(origin, OrderedDict())
        life = lives.setdefault(serial // LIFE_SERIALS, _Life())
        if len(lives) > LIVES:
            lives.popitem(last=False)
        if not life.add(serial):
            return False
        self._routes[origin] = sender
        return True

    def learn(self, node: int, neighbour: int) -> None:
        """A sign of life of a daemon came by way of a neighbour."""
        if node != self.me:
            self._routes[node] = neighbour

    def toward(self, node: int) -> int | None:
        """The neighbour over whom something of that node came last."""
        return self._routes.get(node)

    def forget(self, neighbour: int) -> None:
        """The connection to a neighbour is gone: nothing goes that way."""
        for origin in [origin for origin, way in self._routes.items() if way == neighbour]:
            del self._routes[origin]
