"""Daemons that agree and do nothing else: the shipped agreement over the worst of networks and disks.

What `world` can do to an agreement is over in milliseconds and rare; here it is all that happens.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from ckptless.daemon.ckptlessd.consensus.agreement import Agreement
from ckptless.daemon.ckptlessd.consensus.quorum import first_decree
from ckptless.daemon.ckptlessd.recovery.events import Save, Tell
from ckptless.daemon.protocol.messages import Outcome
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Canvass, Decree, Durable, Say, Support

from .story import Violation

STEPS = 600
# How much of each: the seed draws it. Some worlds are calm, some lose all, some know no end of leaders.
WEIGHTS = {
    "deliver": (4.0, 8.0),
    "repeat it": (0.0, 0.5),
    "lose": (0.0, 1.0),
    "write": (2.0, 6.0),
    "restart": (0.0, 0.5),
    "campaign": (0.02, 0.6),
    "propose": (1.0, 3.0),
    "ask again": (0.3, 1.0),
}


def ending(index: int, voters: tuple[int, ...], reason: str) -> Decree:
    return Decree(index=index, voters=voters, outcome=Outcome(state="failed", exit_code=1, reason=reason))


@dataclass
class Room:
    """Daemons, their disks, and what is under way between them."""

    nodes: tuple[int, ...]
    random: Random = field(default_factory=lambda: Random(0))
    now: float = 100.0
    weights: dict[str, float] = field(default_factory=lambda: {k: high for k, (_, high) in WEIGHTS.items()})
    changes: float = 0.5

    def __post_init__(self) -> None:
        first = first_decree(self.nodes)
        self.disks = {node: Durable(promised=NO_BALLOT, vote=None, known=first) for node in self.nodes}
        self.daemons = {node: Agreement(node, self.disks[node]) for node in self.nodes}
        self.writes: dict[int, list[Save]] = {node: [] for node in self.nodes}
        self.under_way: list[tuple[int, int, Say]] = []
        self.chosen: dict[int, Decree] = {0: first}
        self.proposed = 0
        # Messages lost, doubled, or overtaken by later ones; daemons that died; rivals of a leader.
        self.injected: Counter[str] = Counter()

    def collect(self, node: int) -> None:
        daemon = self.daemons[node]
        outputs = daemon.out.copy()
        daemon.out.clear()
        for output in outputs:
            if isinstance(output, Save):
                self.writes[node].append(output)
            elif isinstance(output, Tell):
                self.send(node, output.node, output.say)
        self._knows(daemon.known)

    def _knows(self, known: Decree) -> None:
        """One decree for each index, and a quorum has it on its disks before anybody knows of it."""
        if known.index in self.chosen:
            if self.chosen[known.index] != known:
                raise Violation(f"two decrees {known.index}: {known} and {self.chosen[known.index]}")
            return
        self.chosen[known.index] = known
        voters = self.chosen[known.index - 1].voters
        votes = {
            node
            for node, disk in self.disks.items()
            if disk.known.index >= known.index or (disk.vote is not None and disk.vote.decree == known)
        }
        if not 2 * len(votes.intersection(voters)) > len(voters):
            raise Violation(f"decree {known.index} is on the disks of {sorted(votes)}, of {voters}")

    def send(self, sender: int, receiver: int | None, say: Say) -> None:
        receivers = [receiver] if receiver is not None else [node for node in self.nodes if node != sender]
        if isinstance(say, Canvass | Support):
            # It binds nobody, and may come at any time: here at once, so that the worst is all there is.
            for node in receivers:
                self.hear(sender, node, say)
            return
        self.under_way += [(sender, node, say) for node in receivers]

    def write(self, node: int) -> None:
        """The oldest thing that waits for the disk gets there."""
        if self.writes[node]:
            save = self.writes[node].pop(0)
            self.disks[node] = save.durable
            if save.say is not None:
                self.send(node, save.node, save.say)

    def deliver(self, number: int, *, keep: bool = False) -> None:
        sender, receiver, say = self.under_way[number] if keep else self.under_way.pop(number)
        self.hear(sender, receiver, say)

    def hear(self, sender: int, receiver: int, say: Say) -> None:
        self.daemons[receiver].hear(sender, say, self.now, content=False)
        self.collect(receiver)

    def restart(self, node: int, kept: int = 0) -> None:
        """Its daemon died; so many of the writes under way got to the disk, and nobody was told."""
        for save in self.writes[node][:kept]:
            self.disks[node] = save.durable
        self.writes[node].clear()
        self.daemons[node] = Agreement(node, self.disks[node])

    def campaign(self, node: int) -> None:
        self.daemons[node].campaign(self.now)
        self.collect(node)

    def propose(self, node: int, voters: tuple[int, ...] | None = None) -> None:
        daemon = self.daemons[node]
        if daemon.ready:
            self.proposed += 1
            decree = ending(daemon.known.index + 1, voters or daemon.known.voters, f"{node}.{self.proposed}")
            daemon.propose(decree, self.now)
            self.collect(node)

    def repeat(self, node: int) -> None:
        self.now += 0.3
        self.daemons[node].repeat(self.now)
        self.collect(node)

    def settle(self) -> None:
        """Everything that is under way arrives, and every disk is done."""
        for _ in range(10_000):
            busy = [node for node in self.nodes if self.writes[node]]
            if busy:
                self.write(busy[0])
            elif self.under_way:
                self.deliver(0)
            else:
                return
        raise AssertionError("they never stop talking")

    def anything(self) -> None:
        """One step of a hostile world; how hostile, and in which way, is the seed's."""
        node = self.random.choice(self.nodes)
        (kind,) = self.random.choices(tuple(self.weights), tuple(self.weights.values()))
        number = self.random.randrange(len(self.under_way)) if self.under_way else None
        match kind:
            case "deliver" if number is not None:
                self.injected["message"] += number > 0
                self.deliver(number)
            case "repeat it" if number is not None:
                self.injected["message"] += 1
                self.deliver(number, keep=True)
            case "lose" if number is not None:
                self.injected["message"] += 1
                self.under_way.pop(number)
            case "write":
                self.write(node)
            case "restart":
                self.injected["daemon"] += 1
                self.restart(node, self.random.randrange(len(self.writes[node]) + 1))
            case "campaign":
                self.injected["leader"] += 1
                self.campaign(node)
            case "propose":
                count = self.random.randint(1, len(self.nodes))
                voters = tuple(sorted(self.random.sample(self.nodes, count)))
                self.propose(node, voters if self.random.random() < self.changes else None)
            case "ask again":
                self.repeat(node)


def quarrel(seed: int, nodes: int = 0) -> Room:
    """One seed of it, of 1 to 6 nodes. Raises Violation."""
    random = Random(seed)
    room = Room(tuple(range(nodes or random.choice([1, 2, 3, 3, 3, 4, 5, 6]))), random)
    for kind, (low, high) in WEIGHTS.items():
        room.weights[kind] = random.uniform(low, high)
    room.changes = random.choice([0.0, 0.1, 0.5])
    for _ in range(STEPS):
        room.anything()
    return room
