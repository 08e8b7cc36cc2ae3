"""Pure: how a message gets to a daemon that is no neighbour, or to all of them.

To all: everybody passes it on to all neighbours, once. To one: by the neighbour over whom something of that
one came last, as an Ethernet bridge does it; whoever does not know passes it to nobody, and it is said again.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

# Of so many messages of one origin it is known whether they came, when they come out of order.
WINDOW = 64
# Far more hops than it takes in any overlay.
MOST_HOPS = 32


@dataclass
class _Origin:
    """Which messages of one daemon have come: all up to `floor` (or they never will), and `above` it."""

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
    """Of the daemon of node `me`; serials grow from life to life, where `first` does."""

    me: int
    first: int
    _serial: int = 0
    _origins: dict[int, _Origin] = field(default_factory=dict)
    _routes: dict[int, int] = field(default_factory=dict)

    def next_serial(self) -> int:
        """For a message of this daemon."""
        self._serial += 1
        return self.first + self._serial

    def heard(self, sender: int, origin: int, serial: int) -> bool:
        """A message of `origin` came over `sender`; False where it had come before."""
        if origin == self.me:
            return False
        if not self._origins.setdefault(origin, _Origin()).add(serial):
            return False
        self._routes[origin] = sender
        return True

    def toward(self, node: int) -> int | None:
        """The neighbour over whom something of that node came last."""
        return self._routes.get(node)

    def forget(self, neighbour: int) -> None:
        """The connection to a neighbour is gone: nothing goes that way."""
        for origin in [origin for origin, way in self._routes.items() if way == neighbour]:
            del self._routes[origin]
