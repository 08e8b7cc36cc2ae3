"""Pure: a node's versions, compared with those of the next node on the ring of a shard's twins.

Both ends of a comparison learn of it. Only who has agreed on an earlier step is held to it: twins that
differ from their first step on (other hardware, training that is not deterministic) are told of once, and
left alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from ckptless.daemon.protocol.messages import Doubt
from ckptless.daemon.protocol.peers.messages import CompareTwins, TwinsCompared, TwinsMessage
from ckptless.daemon.protocol.twins import compare
from ckptless.daemon.settings.options import TwinsMode

Said = TypeVar("Said", CompareTwins, TwinsCompared)
Key: TypeAlias = tuple[int, int]
"""Shard, step."""

# As many steps as a rank can be behind another one's.
KEEP = 3


@dataclass(frozen=True)
class _Mine:
    rank: int
    digest: str
    known: bool


@dataclass
class TwinCheck:
    """The comparison of twins on one agent, over all generations.

    `send(node, message)` asks another one; `on_doubt` is called when `doubts` has a new one.
    """

    node: int
    mode: TwinsMode
    send: Callable[[int, CompareTwins], None] = lambda _node, _message: None
    on_doubt: Callable[[], None] = lambda: None
    on_event: Callable[[str, str], None] = lambda _kind, _text: None
    doubts: tuple[Doubt, ...] = ()
    _generation: int = 0
    # Of each shard: the step that the generation began with, and the first that twins have agreed on since.
    _base: dict[int, int] = field(default_factory=dict)
    _agreed: dict[int, int] = field(default_factory=dict)
    _unlike: set[int] = field(default_factory=set)
    _mine: dict[Key, _Mine] = field(default_factory=dict)
    _asked: dict[Key, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    _early: dict[Key, list[tuple[CompareTwins, Callable[[TwinsCompared], None]]]] = field(
        default_factory=dict
    )
    _told: set[tuple[str, int]] = field(default_factory=set)

    def follow(self, generation: int) -> None:
        """A new generation: nothing of the old one is compared any more."""
        self._generation, self.doubts = generation, ()
        for known in (self._base, self._mine, self._asked, self._told):
            known.clear()
        early, self._early = self._early, {}
        for waiting in early.values():
            for message, answer in waiting:
                if message.generation >= generation:
                    self.asked(message, answer)

    def tells(self, shard: int) -> bool:
        """Whether its holdings say by which digests versions of a shard are compared."""
        settled = shard in self._agreed or shard not in self._base
        return self.mode == "act" and settled and shard not in self._unlike

    def has_agreed(self, shard: int, before: int) -> bool:
        """Whether twins have agreed on an earlier step of it."""
        return self._agreed.get(shard, before) < before

    def committed(
        self, key: Key, rank: int, digest: str, nodes: Sequence[int], acked: Callable[[], None]
    ) -> None:
        """A rank of this node has written a version; `acked` once it is known to be as the next node's.

        `nodes`: those of the shard's twins. What all have restored, or begun with, is not compared.
        """
        shard, step = key
        ring = sorted(nodes)
        if self.mode == "off" or len(ring) < 2 or step == self._base.setdefault(shard, step):
            acked()
            return
        compared = "" if shard in self._unlike else digest
        mine = self._mine[key] = _Mine(rank, compared, self.has_agreed(shard, step))
        for old in sorted(k for k in self._mine if k[0] == shard)[:-KEEP]:
            del self._mine[old]
        following = ring[(ring.index(self.node) + 1) % len(ring)]
        self._asked[key] = following, acked
        self.send(following, self._say(CompareTwins, key, mine))
        for message, answer in self._early.pop(key, ()):
            self.asked(message, answer)

    def _say(self, what: type[Said], key: Key, mine: _Mine) -> Said:
        return what(
            generation=self._generation,
            shard=key[0],
            step=key[1],
            rank=mine.rank,
            digest=mine.digest,
            known=mine.known,
        )

    def asked(self, message: CompareTwins, answer: Callable[[TwinsCompared], None]) -> None:
        """Another node has committed the step, and is told what is here once it is."""
        key = message.shard, message.step
        if message.generation < self._generation:
            text = f"twins of shard {message.shard}, generation {message.generation}, here {self._generation}"
            self.on_event("stale-record", text)
            return
        mine = self._mine.get(key)
        if mine is None and any(k[0] == key[0] and k[1] > key[1] for k in self._mine):
            mine = _Mine(-1, "", known=False)  # not kept any more
        if mine is None or message.generation > self._generation:
            self._early.setdefault(key, []).append((message, answer))
            return
        self._judge(key, mine, message)
        answer(self._say(TwinsCompared, key, mine))

    def answered(self, message: TwinsCompared) -> None:
        """Take the next node's answer."""
        key = message.shard, message.step
        mine = self._mine.get(key)
        if message.generation != self._generation or mine is None or key not in self._asked:
            return
        if self._judge(key, mine, message):
            _, acked = self._asked.pop(key)
            acked()

    def lost(self, node: int, why: str) -> None:
        """Stop waiting for a twin that cannot be asked."""
        for key, (asked, acked) in list(self._asked.items()):
            if asked == node:
                del self._asked[key]
                self._tell("twins-not-compared", key, f"node-{node} does not answer: {why}")
                acked()

    def _judge(self, key: Key, mine: _Mine, theirs: TwinsMessage) -> bool:
        """Whether the step may count as committed."""
        shard, step = key
        likeness = compare(mine.digest, theirs.digest)
        if likeness == "equal":
            self._agreed.setdefault(shard, step)
            return True
        ranks = f"ranks {mine.rank} and {theirs.rank}"
        if likeness == "incomparable":
            if mine.digest and theirs.digest:
                self._tell("twins-not-compared", key, f"{ranks} have laid out their tensors in two ways")
            return True
        if not (mine.known or theirs.known):
            self._unlike.add(shard)
            text = f"{ranks} differ from their first step on: is their hardware the same, and are they twins?"
            self._tell("twins-unlike", key, f"{text} They are compared no more")
            return True
        if self.mode == "warn":
            self._tell("twins-differ", key, f"{ranks} differ; training goes on (--twins warn)")
            return True
        # Whoever has not agreed on anything yet is held to what the other has.
        self._agreed.setdefault(shard, step)
        doubt = Doubt(shard=shard, step=step, rank=mine.rank, other=theirs.rank)
        if doubt not in self.doubts:
            self.doubts += (doubt,)
            self.on_doubt()
        return False

    def _tell(self, kind: str, key: Key, text: str) -> None:
        """Once in a generation for each shard: what differs does so at every step from then on."""
        if (kind, key[0]) not in self._told:
            self._told.add((kind, key[0]))
            self.on_event(kind, f"shard {key[0]}, step {key[1]}: {text}")
