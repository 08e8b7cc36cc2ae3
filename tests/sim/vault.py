"""What a fake agent holds, and the copies it sends: `daemon.agent.vault` and `replicas` without bytes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptless.daemon.api import messages as m
from ckptless.daemon.control.placement import holders

from .events import Channel

if TYPE_CHECKING:
    from .agents import Agent

KEEP = 3
COPIES = 2


@dataclass(frozen=True)
class Put:
    """Hold this record."""

    generation: int
    rank: int
    step: int
    sender: "Agent"


@dataclass
class Vault:
    """Steps of tensors, and steps of each rank's record: the newest few."""

    tensors: set[int] = field(default_factory=set)
    records: dict[int, set[int]] = field(default_factory=dict)

    def put_tensors(self, step: int) -> None:
        """Keep the newest."""
        self.tensors = set(sorted({*self.tensors, step})[-KEEP:])

    def put_record(self, rank: int, step: int) -> None:
        """Keep the newest."""
        self.records[rank] = set(sorted({*self.records.get(rank, ()), step})[-KEEP:])

    def drop_after(self, step: int | None) -> None:
        """What is newer never happened."""
        limit = -1 if step is None else step
        self.tensors = {s for s in self.tensors if s <= limit}
        self.records = {rank: {s for s in steps if s <= limit} for rank, steps in self.records.items()}

    def holdings(self) -> m.Holdings:
        """As an agent tells it."""
        records = tuple((rank, tuple(sorted(steps))) for rank, steps in sorted(self.records.items()))
        return m.Holdings(tensors=tuple(sorted(self.tensors)), records=records)


class Replicas:
    """Pushes records to their holders, and holds those of others."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._nodes: tuple[m.NodeInfo, ...] = ()
        self._generation = 0
        self._unreachable: set[int] = set()
        self._waiting: dict[tuple[int, int], set[int]] = {}
        self._links: dict[int, Channel[Put]] = {}
        self._early: list[Put] = []
        self.accepting = True

    def follow(self, assignment: m.Assignment) -> None:
        """A new generation: other holders, and nothing of the old one is waited for."""
        self._nodes, self._generation = assignment.nodes, assignment.generation
        self._unreachable.clear()
        self._waiting.clear()
        self.accepting = True
        early, self._early = self._early, []
        for put in early:
            self.take(put)

    def push(self, rank: int, step: int) -> None:
        """Send a record to its holders; with nobody to hold it, it counts as held."""
        agent = self._agent
        targets = holders(self._nodes, agent.node, COPIES, self._unreachable)
        if not targets:
            agent.acked(rank, step)
            return
        self._waiting[(rank, step)] = {info.node for info in targets}
        for info in targets:
            other = agent.world.agents[info.node]
            if other.alive:
                link = self._links.get(info.node)
                if link is None:
                    link = self._links[info.node] = agent.world.channel(self._deliver(other))
                link.send(Put(self._generation, rank, step, agent))
            elif not other.dark:
                agent.world.soon(lambda node=info.node: self.lost(node))  # type: ignore[misc]

    def _deliver(self, other: "Agent") -> Callable[[Put], None]:
        network, node = self._agent.world.network, self._agent.node

        def deliver(put: Put) -> None:
            network.when_joined(node, other.node, lambda: other.replicas.take(put))

        return deliver

    def take(self, put: Put) -> None:
        """Hold a record of this generation, and say so; never one of an old one, and none while frozen."""
        agent = self._agent
        if not agent.sound:
            return
        if put.generation > self._generation:
            self._early.append(put)
        elif put.generation == self._generation and self.accepting:
            agent.vault.put_record(put.rank, put.step)
            held = lambda: put.sender.replicas.held(agent.node, put)  # noqa: E731
            agent.world.soon(lambda: agent.world.network.when_joined(agent.node, put.sender.node, held))

    def held(self, node: int, put: Put) -> None:
        """A holder has it."""
        missing = self._waiting.get((put.rank, put.step))
        if missing is None or put.generation != self._generation or not self._agent.alive:
            return
        missing.discard(node)
        if not missing:
            del self._waiting[(put.rank, put.step)]
            self._agent.acked(put.rank, put.step)

    def lost(self, node: int) -> None:
        """A holder cannot be reached: the next on the ring takes its place."""
        self._links.pop(node, None)
        if not self._agent.alive or all(info.node != node for info in self._nodes):
            return
        self._unreachable.add(node)
        for (rank, step), missing in list(self._waiting.items()):
            if node in missing:
                del self._waiting[(rank, step)]
                self.push(rank, step)

    def _gives(self, other: "Agent") -> bool:
        return other.sound and not self._agent.world.network.apart(self._agent.node, other.node)

    def fetch(self, assignment: m.Assignment, rank: int, step: int) -> str | None:
        """Get a rank's state into the vault from whoever is said to hold it; why not, or None."""
        agent, vault = self._agent, self._agent.vault
        others = [agent.world.agents[node] for node in assignment.record_nodes[rank]]
        if step not in vault.records.get(rank, ()):
            if not any(self._gives(a) and step in a.vault.records.get(rank, ()) for a in others):
                return f"StateUnavailableError: nobody could give the record of rank {rank}, step {step}"
            vault.put_record(rank, step)
        if step not in vault.tensors:
            others = [agent.world.agents[node] for node in assignment.tensor_nodes]
            if not any(self._gives(a) and step in a.vault.tensors for a in others):
                return f"StateUnavailableError: nobody could give the tensors of step {step}"
            vault.put_tensors(step)
        return None
