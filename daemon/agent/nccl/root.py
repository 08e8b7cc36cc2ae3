"""Pure: the roots of one agent; who has checked in, and who can be told now whom to connect to.

A root gets a check-in of each rank of its block, and where there are several roots also one of the rank after
it. It tells each rank of its block what the next one has sent: as soon as it has both. It needs to know
nothing of who is where, and any number of communicators are in progress at once, told apart by their magic.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec import Struct

from ckptless.daemon.agent.nccl.blocks import block
from ckptless.daemon.agent.nccl.wire import Address, CheckIn
from ckptless.daemon.protocol.errors import ProtocolError

# Longer than any job that is stalled lives: only memory depends on it.
DEADLINE_S = 1800.0
# Check-ins that are kept, of all communicators together: tens of megabytes.
MAX_KEPT = 65536
MAX_RANKS = 1 << 20
# Those whose ranks have all been answered are remembered, so that one that comes twice is refused.
MAX_REMEMBERED = 16384


class Answer(Struct, frozen=True):
    """An answer to a rank: what the rank after it has said of itself."""

    magic: int
    rank: int
    to: Address
    connect: bytes


class Dropped(Struct, frozen=True):
    """A root that is given up: it has waited too long, or its generation is over."""

    generation: int
    ranks: int
    root: int
    missing: tuple[int, ...]


@dataclass
class _Root:
    """One root of one communicator. `came[i]`: what its i-th rank said, and last the extra one."""

    generation: int
    ranks: int
    root: int
    roots: int
    deadline: float
    came: dict[int, CheckIn] = field(default_factory=dict)
    answered: int = 0

    @property
    def block(self) -> range:
        return block(self.root, self.ranks, self.roots)

    @property
    def expected(self) -> int:
        """The number of check-ins that come: with one root the last is followed by the first."""
        return len(self.block) + (self.roots > 1)

    def next_of(self, index: int) -> int:
        return (index + 1) % self.expected if self.roots == 1 else index + 1

    def dropped(self) -> Dropped:
        block = self.block
        missing = (i for i in range(self.expected) if i not in self.came)
        return Dropped(
            self.generation, self.ranks, self.root, tuple((block[0] + i) % self.ranks for i in missing)
        )


_Key = tuple[int, int]


class Roots:
    """Every root of an agent. Time is passed in, in seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._open: OrderedDict[_Key, _Root] = OrderedDict()
        self._done: OrderedDict[_Key, int] = OrderedDict()
        self._generation = 0
        self._kept = 0

    def check_in(self, magic: int, generation: int, message: CheckIn, now: float) -> list[Answer]:
        """Take what a rank says; return who can be answered now. Raises ProtocolError and changes nothing."""
        if generation < self._generation:
            raise ProtocolError(f"generation {generation} is over, here it is {self._generation}")
        _check(message)
        key = (magic, message.root)
        if key in self._done:
            raise ProtocolError(f"rank {message.rank} of {message.ranks} comes again: all are answered")
        root = self._open.get(key)
        if root is None:
            root = _Root(generation, message.ranks, message.root, message.roots, now + DEADLINE_S)
        index = self._place(root, message)
        if self._kept >= MAX_KEPT:
            raise ProtocolError(f"more than {MAX_KEPT} ranks have checked in and wait")
        self._open[key] = root
        root.came[index] = message
        self._kept += 1
        answers = self._answers(root, magic, index)
        if root.answered == len(root.block):
            self._close(key)
            self._done[key] = generation
            if len(self._done) > MAX_REMEMBERED:
                self._done.popitem(last=False)
        return answers

    @staticmethod
    def _place(root: _Root, message: CheckIn) -> int:
        if (message.ranks, message.roots) != (root.ranks, root.roots):
            raise ProtocolError(
                f"rank {message.rank} says {message.ranks} ranks with {message.roots} roots, "
                f"others {root.ranks} with {root.roots}"
            )
        index = message.rank - root.block[0]
        if index not in range(root.expected):
            raise ProtocolError(f"rank {message.rank} of {message.ranks} is none of root {message.root}")
        if index in root.came:
            raise ProtocolError(f"rank {message.rank} of {message.ranks} has checked in before")
        return index

    @staticmethod
    def _answers(root: _Root, magic: int, index: int) -> list[Answer]:
        """Return the answers to the rank before, which waited for this one and to this one, if due."""
        size = len(root.block)
        before = (index - 1) % size if root.roots == 1 else index - 1
        answers = []
        for i in dict.fromkeys((before, index)):
            if i in range(size) and i in root.came and (after := root.came.get(root.next_of(i))) is not None:
                answers.append(Answer(magic, root.block[i], root.came[i].listen, after.connect))
        root.answered += len(answers)
        return answers

    def follow(self, generation: int) -> list[Dropped]:
        """Answer nobody of an older generation from now on; return what was still in progress."""
        self._generation = max(self._generation, generation)
        # What is remembered of it is not needed any more: its magics are refused now.
        for key in [key for key, known in self._done.items() if known < self._generation]:
            del self._done[key]
        return self._drop([key for key, root in self._open.items() if root.generation < self._generation])

    def expire(self, now: float) -> list[Dropped]:
        """Give up what has waited too long."""
        return self._drop([key for key, root in self._open.items() if root.deadline <= now])

    def due(self) -> float | None:
        """Return when `expire` has something to do, if nothing happens before."""
        return next(iter(self._open.values())).deadline if self._open else None

    def _drop(self, keys: list[_Key]) -> list[Dropped]:
        return [self._close(key).dropped() for key in keys]

    def _close(self, key: _Key) -> _Root:
        root = self._open.pop(key)
        self._kept -= len(root.came)
        return root


def _check(message: CheckIn) -> None:
    """Raises ProtocolError for what no root can make sense of."""
    if message.offset != 0:
        raise ProtocolError("a communicator that is made larger: its ids are not given out here")
    if not 1 <= message.ranks <= MAX_RANKS or not 1 <= message.roots <= message.ranks:
        raise ProtocolError(f"{message.ranks} ranks with {message.roots} roots")
    if message.root not in range(message.roots):
        raise ProtocolError(f"root {message.root} of {message.roots}")
