"""What a fake agent holds, and the copies it sends: `store` and `replicas` of `agent.versions`, no bytes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.replication.protection import Item
from ckptless.daemon.replication.re_replication import Holders, Watermark, remakes, surplus

from .events import Channel

if TYPE_CHECKING:
    from .agents import Agent

KEEP = 3
COPIES = 2
TENSORS_S = 0.4


@dataclass(frozen=True)
class Put:
    """Hold this: a rank's record, or a shard's tensors."""

    generation: int
    what: str
    number: int
    step: int
    sender: "Agent"
    content: tuple[int, int] = (-1, 0)

    @property
    def key(self) -> tuple[str, int, int]:
        """What it is about."""
        return self.what, self.number, self.step


def digest_of(value: int) -> str:
    """By what versions are compared."""
    return f"{0:016x}{value % (1 << 64):016x}"


@dataclass
class Vault:
    """Steps of each shard's tensors, and of each rank's record: the newest few. `twins`: ranks of a shard."""

    twins: int
    tensors: dict[int, set[int]] = field(default_factory=dict)
    records: dict[int, set[int]] = field(default_factory=dict)
    # Of a shard's step who wrote it, and what is in it.
    contents: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def shard(self, rank: int) -> int:
        """What a rank has tensors of: of so many ranks in a row the lowest."""
        return rank // self.twins * self.twins

    def put(self, what: str, number: int, step: int) -> None:
        """Keep the newest."""
        known = self.tensors if what == "tensors" else self.records
        known[number] = set(sorted({*known.get(number, ()), step})[-KEEP:])

    def has(self, what: str, number: int, step: int) -> bool:
        """Whether it is here."""
        known = self.tensors if what == "tensors" else self.records
        return step in known.get(number, ())

    def drop_after(self, step: int | None) -> None:
        """What is newer never happened."""
        limit = -1 if step is None else step
        for known in (self.tensors, self.records):
            for number, steps in known.items():
                known[number] = {s for s in steps if s <= limit}

    def drop_unnamed(self, assignment: m.Assignment, node: int) -> None:
        """What others are not to have from here is not used here either."""
        for shard, steps in self.tensors.items():
            if node not in assignment.holders_of(shard):
                steps.discard(-1 if assignment.restore_step is None else assignment.restore_step)

    def items(self) -> list[Item]:
        """All that is here."""
        shards = [Item("tensors", number) for number, steps in self.tensors.items() if steps]
        return [*shards, *(Item("record", number) for number, steps in self.records.items() if steps)]

    def newest(self, item: Item) -> int:
        """The newest step of something that is here."""
        return max((self.tensors if item[0] == "tensors" else self.records)[item[1]])

    def give_back(self, item: Item) -> None:
        """Hold nothing of it any more."""
        del (self.tensors if item[0] == "tensors" else self.records)[item[1]]

    def holdings(self, tells: Callable[[int], bool] = lambda _shard: False) -> m.Holdings:
        """As an agent tells it; of which shards also by what they are compared."""
        records = tuple(
            (rank, self.shard(rank), tuple(sorted(steps)))
            for rank, steps in sorted(self.records.items())
            if steps
        )
        tensors = tuple((shard, tuple(sorted(steps))) for shard, steps in sorted(self.tensors.items()))
        digests = tuple(
            (shard, step, self.contents[shard, step][0], digest_of(self.contents[shard, step][1]))
            for shard, steps in tensors
            for step in steps
            if tells(shard)
        )
        return m.Holdings(tensors=tensors, records=records, digests=digests)


class Replicas:
    """Pushes records and tensors to their holders, and holds those of others."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._to: Holders | None = None
        self._places: tuple[m.Place, ...] = ()
        self._generation = 0
        self._unreachable: set[int] = set()
        self._waiting: dict[tuple[str, int, int], tuple[set[int], Callable[[], None]]] = {}
        self._links: dict[int, Channel[Put]] = {}
        self._early: list[Put] = []
        self._watermark = Watermark(None)
        self.accepting = True

    def follow(self, assignment: m.Assignment) -> None:
        """A new generation: other holders, and nothing of the old one is waited for."""
        to = self._to = Holders(assignment, COPIES)
        self._generation = assignment.generation
        self._watermark = Watermark(assignment.restore_step)
        self._places = assignment.places
        self._unreachable.clear()
        self._waiting.clear()
        self.accepting = True
        early, self._early = self._early, []
        for put in early:
            self.take(put)
        self._remake(to)

    def _saw_commit(self, step: int) -> None:
        """Give back what this node need not hold, and the watermark has passed."""
        agent = self._agent
        if not (self._watermark.saw_commit(step) and self._to is not None and agent.alive and self.accepting):
            return
        for item in surplus(self._to, agent.node, agent.vault.items()):
            if self._watermark.passed(agent.vault.newest(item)):
                agent.vault.give_back(item)
                agent.world.story.tell(agent.name, f"gives back {item.kind} {item.number}")

    def _remake(self, to: Holders) -> None:
        """Copies that went with their holders are given to others without waiting for a commit."""
        agent, step = self._agent, to.assignment.restore_step
        if step is None:
            return
        for lost in remakes(to, agent.node):
            content = agent.vault.contents.get((lost.item.number, step), (-1, 0))
            put = Put(self._generation, *lost.item, step, agent, content)
            if not agent.vault.has(*put.key):
                continue
            takes_s = agent.world.random.uniform(0.0, TENSORS_S)
            for node in lost.takers:
                agent.world.events.after(takes_s, lambda put=put, node=node: self._send(put, node))  # type: ignore[misc]

    def push(self, what: str, number: int, step: int, acked: Callable[[], None]) -> None:
        """Send it to its holders; with nobody to hold it, it counts as held."""
        agent = self._agent
        assert self._to is not None
        if what == "record":
            self._saw_commit(step)
            targets = self._to.of_node(agent.node, self._unreachable)
        else:
            ranks = range(number, min(number + agent.vault.twins, len(self._places)))
            twins = frozenset(self._places[rank].node for rank in ranks)
            if self._places[number].node != agent.node:
                acked()
                return
            targets = self._to.of_shared(agent.node, twins, self._unreachable)
        nodes = frozenset(info.node for info in targets)
        if not targets:
            acked()
            return
        content = agent.vault.contents.get((number, step), (-1, 0))
        put = Put(self._generation, what, number, step, agent, content)
        self._waiting[put.key] = set(nodes), acked
        # Tensors are many bytes.
        takes_s = agent.world.random.uniform(0.0, TENSORS_S) if what == "tensors" else 0.0
        for info in targets:
            if takes_s:
                agent.world.events.after(takes_s, lambda node=info.node: self._send(put, node))  # type: ignore[misc]
            else:
                self._send(put, info.node)

    def _send(self, put: Put, node: int) -> None:
        agent = self._agent
        if not agent.alive or put.generation != self._generation:
            return
        other = agent.world.agents[node]
        if other.alive:
            link = self._links.get(node)
            if link is None:
                link = self._links[node] = agent.world.channel(self._deliver(other))
            link.send(put)
        elif not other.dark:
            agent.world.soon(lambda: self.lost(node))

    def _deliver(self, other: "Agent") -> Callable[[Put], None]:
        network, node = self._agent.world.network, self._agent.node

        def deliver(put: Put) -> None:
            network.when_joined(node, other.node, lambda: other.replicas.take(put))

        return deliver

    def take(self, put: Put) -> None:
        """Hold what is of this generation, and say so; nothing of an old one, and nothing while frozen."""
        agent = self._agent
        if not agent.sound:
            return
        if put.generation > self._generation:
            self._early.append(put)
        elif put.generation == self._generation and self.accepting:
            agent.vault.put(put.what, put.number, put.step)
            if put.what == "record":
                self._saw_commit(put.step)
            if put.what == "tensors":
                agent.vault.contents[put.number, put.step] = put.content
            held = lambda: put.sender.replicas.held(agent.node, put)  # noqa: E731
            agent.world.soon(lambda: agent.world.network.when_joined(agent.node, put.sender.node, held))

    def held(self, node: int, put: Put) -> None:
        """A holder has it."""
        waiting = self._waiting.get(put.key)
        if waiting is None or put.generation != self._generation or not self._agent.alive:
            return
        missing, acked = waiting
        missing.discard(node)
        if not missing:
            del self._waiting[put.key]
            acked()

    def lost(self, node: int) -> None:
        """A holder cannot be reached: the next on the ring takes its place."""
        self._links.pop(node, None)
        if not self._agent.alive or self._to is None or node not in self._to.assignment.members:
            return
        self._unreachable.add(node)
        for key, (missing, acked) in list(self._waiting.items()):
            if node in missing:
                del self._waiting[key]
                self.push(*key, acked)

    def _gives(self, other: "Agent") -> bool:
        return other.sound and not self._agent.world.network.apart(self._agent.node, other.node)

    def fetch(self, assignment: m.Assignment, rank: int, step: int) -> str | None:
        """Get a rank's state into the vault from whoever is said to hold it; why not, or None."""
        vault = self._agent.vault
        shard = assignment.shards[rank]
        wanted = (
            ("record", rank, assignment.record_nodes[rank]),
            ("tensors", shard, assignment.holders_of(shard)),
        )
        for what, number, nodes in wanted:
            if vault.has(what, number, step):
                continue
            others = [self._agent.world.agents[node] for node in nodes]
            givers = [a for a in others if self._gives(a) and a.vault.has(what, number, step)]
            if not givers:
                return f"StateUnavailableError: nobody could give {what} {number} of step {step}"
            vault.put(what, number, step)
            if what == "tensors":
                vault.contents[number, step] = givers[0].vault.contents[number, step]
        return None
