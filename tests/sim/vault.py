"""What an agent holds, without bytes, and the shipped replication over simulated links."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptless.daemon.agent.core import cuts, replication
from ckptless.daemon.agent.core.replication import Key, Replication
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.replication.protection import Item

from .events import Channel
from .protected import COPIES

if TYPE_CHECKING:
    from .agents import Agent

KEEP = 3
TENSORS_S = 0.4
# How often a replica is under way for long, as among much else, and how long.
LATE_CHANCE = 0.02
LATE_S = 0.3, 1.5


class Content(NamedTuple):
    """A version: the rank that wrote it, the generation in which it was trained, and its value."""

    rank: int
    generation: int
    value: int


@dataclass(frozen=True)
class Put:
    """Hold this: a rank's record, or a shard's tensors."""

    generation: int
    item: Item
    step: int
    sender: "Agent"
    content: Content


def digest_of(value: int) -> str:
    """By what versions are compared."""
    return f"{0:016x}{value % (1 << 64):016x}"


@dataclass
class Vault:
    """Steps of each shard's tensors, and of each rank's record: the newest few. `twins`: ranks of a shard."""

    twins: int
    tensors: dict[int, set[int]] = field(default_factory=dict)
    records: dict[int, set[int]] = field(default_factory=dict)
    contents: dict[Key, Content] = field(default_factory=dict)
    cut: int = 1
    former: "Vault | None" = None

    def shard(self, rank: int) -> int:
        """Return what a rank has tensors of: of so many ranks in a row the lowest."""
        return rank // self.twins * self.twins

    def _steps(self, item: Item) -> dict[int, set[int]]:
        return self.tensors if item.kind == "tensors" else self.records

    def steps(self, item: Item) -> set[int]:
        """Those of an item that are here."""
        return self._steps(item).get(item.number, set())

    def put(self, item: Item, step: int, content: Content) -> None:
        """Keep the newest."""
        self.contents[item, step] = content
        known = self._steps(item)
        known[item.number] = set(sorted({*known.get(item.number, ()), step})[-KEEP:])

    def has(self, item: Item, step: int) -> bool:
        """Whether it is here."""
        return step in self.steps(item)

    def drop_after(self, step: int | None) -> None:
        """What is newer never happened."""
        limit = -1 if step is None else step
        for known in (self.tensors, self.records):
            for number, steps in known.items():
                known[number] = {s for s in steps if s <= limit}

    def drop_unnamed(self, step: int | None, holders: Mapping[int, Sequence[int]], node: int) -> None:
        """What others are not to have from here is not used here either."""
        for shard, steps in self.tensors.items():
            if node not in holders.get(shard, ()):
                steps.discard(-1 if step is None else step)

    def follow(self, assignment: m.Assignment, node: int) -> None:
        """Begin a generation, as `VersionStore.follow`."""
        for move in cuts.cut_moves(self.cut, None if self.former is None else self.former.cut, assignment):
            if move == "forget-former":
                self.former = None
            elif move == "set-aside":
                self.former = Vault(self.twins, self.tensors, self.records, self.contents, self.cut)
                self.tensors, self.records, self.contents = {}, {}, {}
            elif move == "take-back":
                assert self.former is not None
                former, self.former = self.former, None
                self.tensors, self.records, self.contents = former.tensors, former.records, former.contents
            else:
                self.tensors, self.records, self.contents = {}, {}, {}
        self.cut = assignment.cut
        if assignment.former is not None and self.former is not None:
            self.former.drop_after(assignment.restore_step)
            self.former.drop_unnamed(assignment.restore_step, dict(assignment.former.tensor_nodes), node)
        self.drop_after(assignment.restore_step if assignment.former is None else None)
        self.drop_unnamed(assignment.restore_step, dict(assignment.tensor_nodes), node)

    def of(self, cut: int) -> "Vault | None":
        """Return what is held of a cut, if anything can be."""
        if cut == self.cut:
            return self
        return self.former if self.former is not None and self.former.cut == cut else None

    def forget_former(self) -> None:
        """Hold nothing of the number of ranks before any more."""
        self.former = None

    def items(self) -> list[Item]:
        """All that is here."""
        shards = [Item("tensors", number) for number, steps in self.tensors.items() if steps]
        return [*shards, *(Item("record", number) for number, steps in self.records.items() if steps)]

    def newest(self, item: Item) -> int:
        """The newest step of something that is here."""
        return max(self._steps(item)[item.number])

    def newest_whole(self, rank: int) -> int | None:
        """The newest step of a rank that everything is here of."""
        both = self.steps(Item("record", rank)) & self.steps(Item("tensors", self.shard(rank)))
        return max(both, default=None)

    def give_back(self, item: Item) -> None:
        """Hold nothing of it any more."""
        del self._steps(item)[item.number]

    def holdings(self, tells: Callable[[int], bool] = lambda _shard: False) -> m.Holdings:
        """As an agent tells it; of which shards also by what they are compared."""
        records = tuple(
            (rank, self.shard(rank), tuple(sorted(steps)))
            for rank, steps in sorted(self.records.items())
            if steps
        )
        tensors = tuple((shard, tuple(sorted(steps))) for shard, steps in sorted(self.tensors.items()))
        digests = tuple(
            (shard, step, content.rank, digest_of(content.value))
            for shard, steps in tensors
            for step in steps
            if tells(shard)
            for content in (self.contents[Item("tensors", shard), step],)
        )
        return m.Holdings(tensors=tensors, records=records, digests=digests, cut=self.cut)


class Replicas:
    """Carries out what the shipped `Replication` decides, and takes what others send."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self.core: Replication[Put] = Replication(agent.node, COPIES, (), self)
        self._links: dict[int, Channel[Put]] = {}
        self._early: list[Put] = []

    def follow(self, assignment: m.Assignment) -> None:
        """A new generation; what has come for it too early is taken."""
        self.core.follow(assignment)
        early, self._early = self._early, []
        for put in early:
            self.take(put)

    def push(self, item: Item, step: int, acked: Callable[[], None]) -> None:
        """A rank of this node has committed it."""
        agent = self._agent
        assert agent.assignment is not None
        places, put = agent.assignment.places, self.held((item, step))
        assert put is not None
        if item.kind == "record":
            self.core.push_record((item, step), put, acked)
        elif places[item.number].node != agent.node:
            acked()  # another node gives it
        else:
            ranks = range(item.number, min(item.number + agent.vault.twins, len(places)))
            twins = frozenset(places[rank].node for rank in ranks)
            self.core.push_tensors((item, step), put, twins, acked)

    # ----------------------------------------------------------------------- what `core` asks for

    def send(self, info: m.NodeInfo, what: Put) -> None:
        """Tensors are many bytes, and take their time."""
        takes_s = self._agent.world.random.uniform(0.0, TENSORS_S) if what.item.kind == "tensors" else 0.0
        self._agent.world.events.after(takes_s, lambda: self._send(what, info.node))

    def held(self, key: Key) -> Put | None:
        """Return what is here of it, as it is sent."""
        item, step = key
        vault = self._agent.vault
        if not vault.has(item, step):
            return None
        return Put(self.core.generation, item, step, self._agent, vault.contents[key])

    def items(self) -> Collection[Item]:
        """All that is here."""
        return self._agent.vault.items()

    def newest(self, item: Item) -> int:
        """The newest step of something that is here."""
        return self._agent.vault.newest(item)

    def give_back(self, items: Sequence[Item]) -> None:
        """Hold nothing of these any more."""
        for item in items:
            self._agent.world.protected.gives_back(self._agent, item)
            self._agent.vault.give_back(item)
            self._agent.world.story.tell(self._agent.name, f"gives back {item.kind} {item.number}")

    def forget_former(self) -> None:
        """Hold nothing of the number of ranks before any more."""
        self._agent.vault.forget_former()

    def event(self, kind: str, text: str) -> None:
        """As an agent tells its daemon."""
        self._agent.say(m.AgentEvent(level="warning", kind=kind, text=text))

    def now(self) -> float:
        """The simulated time."""
        return self._agent.world.events.now

    # ------------------------------------------------------------------------------- other nodes

    def _send(self, put: Put, node: int) -> None:
        agent = self._agent
        if not agent.alive or put.generation != self.core.generation:
            return
        other = agent.world.agents[node]
        if other.alive:
            link = self._links.get(node)
            if link is None:
                link = self._links[node] = Channel(agent.world.events, self._takes_s, self._deliver(other))
            link.send(put)
        elif not other.dark:
            agent.world.soon(lambda: self.lost(node))

    def _takes_s(self) -> float:
        world = self._agent.world
        late_s = world.bulk_chance.uniform(*LATE_S) if world.bulk_chance.random() < LATE_CHANCE else 0.0
        return late_s + world.delay_s()

    def _deliver(self, other: "Agent") -> Callable[[Put], None]:
        network, node = self._agent.world.network, self._agent.node

        def deliver(put: Put) -> None:
            network.when_joined(node, other.node, lambda: other.replicas.take(put))

        return deliver

    def take(self, put: Put) -> None:
        """Hold what may be held, and say so."""
        agent = self._agent
        if not agent.sound:
            return
        found = replication.verdict(put.generation, self.core.generation, accepting=self.core.accepting)
        if found == "early":
            self._early.append(put)
        elif found == "take":
            agent.world.protected.takes(agent, put.item, put.step, put.content.generation)
            agent.vault.put(put.item, put.step, put.content)
            agent.arrived()
            if put.item.kind == "record":
                self.core.saw_commit(put.step)
            held = lambda: put.sender.replicas.has(agent.node, put)  # noqa: E731
            delay_s = self._takes_s()
            agent.world.events.after(
                delay_s, lambda: agent.world.network.when_joined(agent.node, put.sender.node, held)
            )

    def has(self, node: int, put: Put) -> None:
        """A holder has it."""
        if self._agent.alive:
            self.core.has(node, (put.item, put.step), put.generation)

    def lost(self, node: int) -> None:
        """A holder cannot be reached."""
        self._links.pop(node, None)
        if self._agent.alive:
            self.core.lost(node, "it has hung up")

    def _gives(self, other: "Agent") -> bool:
        return other.sound and not self._agent.world.network.apart(self._agent.node, other.node)

    def take_parts(self, assignment: m.Assignment, former: m.Former, step: int) -> int | str:
        """Take a part of all that the former ranks had; what comes of it, or why it cannot be had."""
        shards = sorted(set(former.shards))
        wanted = [(Item("record", rank), nodes) for rank, nodes in enumerate(former.record_nodes)]
        wanted += [(Item("tensors", shard), nodes) for shard, nodes in former.tensor_nodes]
        found: dict[Item, Content] = {}
        for item, nodes in wanted:
            others = [a for node in nodes if self._gives(a := self._agent.world.agents[node])]
            for other in others:
                self._agent.world.protected.fetches(assignment, item, step, other)
            held = [
                vault for other in others if (vault := other.vault.of(former.cut)) and vault.has(item, step)
            ]
            if not held:
                return f"StateUnavailableError: nobody could give {item.kind} {item.number} of step {step}"
            found[item] = held[0].contents[item, step]
        self._agent.world.protected.cut_anew(former.cut, step, found)
        return hash(tuple(found[Item("tensors", shard)].value for shard in shards))

    def fetch(self, assignment: m.Assignment, rank: int, step: int) -> str | None:
        """Get a rank's state into the vault from whoever is said to hold it; why not, or None."""
        vault = self._agent.vault
        shard = assignment.shards[rank]
        wanted = (
            (Item("record", rank), assignment.record_nodes[rank]),
            (Item("tensors", shard), assignment.holders_of(shard)),
        )
        for item, nodes in wanted:
            if vault.has(item, step):
                continue
            others = [a for node in nodes if self._gives(a := self._agent.world.agents[node])]
            for other in others:
                self._agent.world.protected.fetches(assignment, item, step, other)
            givers = [other for other in others if other.vault.has(item, step)]
            if not givers:
                return f"StateUnavailableError: nobody could give {item.kind} {item.number} of step {step}"
            vault.put(item, step, givers[0].vault.contents[item, step])
        return None
