"""A job whose network is noisy, in virtual time: which nodes are given up, and how soon after they went dark.

The code is the shipped one, the `JobSession` of every daemon, as in `scale`; here a line can be dead for a
while, lose packets, or a machine can stand still. What TCP makes of that is modelled: what is sent in such a
time comes with the first repetition of the oldest packet that gets through, 0.2 s after it and then twice as
long each time (RFC 6298, Linux's shortest), whatever is sent meanwhile. So a line that is dead for 0.7 s may
be silent for 1.4. Who dials does so as `PeerLinks` does, and looks are answered by the kernel there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from ckptless.daemon.ckptlessd import job_host
from ckptless.daemon.ckptlessd.peer_links import DIAL_DEADLINE_S, REDIAL_S
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.service import TICK_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Durable
from ckptless.daemon.settings.config import Timers

from .scale import LINK_S, Cluster, Node
from .scale_parts import SPARES

NODES = 16
LEAF = 4
# The kernel repeats what was sent, and a first SYN, for the first time after so long.
REPEAT_S, SYN_REPEAT_S = 0.2, 1.0
SETTLED_S = 2.0
RECOVERED_S = 30.0
# In such a time of loss, packets to and from one node are lost.
LOSSY_S = 10.0

Kind = Literal["power", "line", "leaf", "still", "starved", "loss"]


@dataclass(frozen=True)
class Incident:
    """Something that befalls a node: for so long, or so many of its packets (a part of 1) in `LOSSY_S`.

    power: it is gone for ever. line: nothing gets to it or from it. leaf: so of `LEAF` nodes together.
    still: the machine stands still, its kernel, too, as one that is moved does. starved: no process of it
    gets any CPU, its kernel answers. loss: packets are lost.
    """

    kind: Kind
    size: float
    seed: int


@dataclass(frozen=True)
class Found:
    """How many nodes were given up; seconds until the first one was, and until all others trained again."""

    lost: int
    found_s: float | None
    trains_s: float | None
    ended: bool


class _Wire:
    """One direction of one connection: in order, and behind what has to be repeated."""

    def __init__(self, network: Noisy, sender: int, receiver: int) -> None:
        self._network, self._sender, self._receiver = network, sender, receiver
        self._waiting: list[Callable[[], None]] = []

    def send(self, arrives: Callable[[], None]) -> None:
        if self._waiting:
            self._waiting.append(arrives)
        elif self._network.passes(self._sender, self._receiver):
            self._network.clock.after(LINK_S, arrives)
        else:
            self._waiting.append(arrives)
            self._repeat(REPEAT_S)

    def _repeat(self, after_s: float) -> None:
        self._network.clock.after(after_s, lambda: self._again(after_s))

    def _again(self, after_s: float) -> None:
        if not self._network.passes(self._sender, self._receiver):
            self._repeat(2 * after_s)
            return
        waiting, self._waiting = self._waiting, []
        for arrives in waiting:
            self._network.clock.after(LINK_S, arrives)


class NoisyNode(Node):
    """As `Node`, with links that are connections over a network that may lose what is sent."""

    tick_s = TICK_S

    def __init__(self, cluster: Cluster, roster: Roster, first: Durable) -> None:
        assert isinstance(cluster, Noisy)
        self._network, self.times = cluster, cluster.times
        self._wires: dict[int, _Wire] = {}
        self._wanted: frozenset[int] = frozenset()
        self._dialling: set[int] = set()
        self._asleep_until = 0.0
        self._backlog: list[Callable[[], None]] = []
        super().__init__(cluster, roster, first)

    def sleep(self, for_s: float) -> None:
        """Do nothing for so long, and then first what time has brought: a tick."""
        self._asleep_until = self.now() + for_s
        self.cluster.clock.after(for_s, self._wake)

    def _wake(self) -> None:
        self.session.tick()
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            action()

    def awake(self, action: Callable[[], None]) -> None:
        """Do this now, or when it is awake."""
        if not self.alive:
            return
        if self.now() < self._asleep_until:
            self._backlog.append(action)
        else:
            action()

    def tick(self) -> None:
        """See `Node`."""
        if self.now() < self._asleep_until:
            self.cluster.clock.after(self._asleep_until - self.now() + self.tick_s, self.tick)
        else:
            super().tick()

    def progress(self) -> None:
        """See `Node`: ranks stand still with it."""
        if self.now() < self._asleep_until:
            self.cluster.clock.after(self._asleep_until - self.now(), self.progress)
        else:
            super().progress()

    def ended(self, outcome: m.Outcome) -> None:
        """See `Node`."""
        self._network.ended = True

    # ---------------------------------------------------------------------------------------- Links

    def want(self, nodes: frozenset[int]) -> None:
        """See `PeerLinks.want`."""
        self._wanted = nodes
        for node in sorted(nodes - self._dialling):
            if node < self.node:
                self._dialling.add(node)
                self._dial(node, 0)

    def _dial(self, node: int, tries: int) -> None:
        after = self.cluster.clock.after
        if node not in self._wanted or not self.alive:
            self._dialling.discard(node)
        elif node in self.links:
            after(REDIAL_S[-1], lambda: self._dial(node, 0))
        elif self._network.answers(self.node, node):
            after(3 * LINK_S, lambda: self._connect(node))
        else:
            after(SYN_REPEAT_S, lambda: self._dial_again(node, tries))

    def _dial_again(self, node: int, tries: int) -> None:
        if self._network.answers(self.node, node):
            self._connect(node)
        else:
            rest_s = DIAL_DEADLINE_S - SYN_REPEAT_S + REDIAL_S[min(tries, len(REDIAL_S) - 1)]
            self.cluster.clock.after(rest_s, lambda: self._dial(node, tries + 1))

    def _connect(self, node: int) -> None:
        self.awake(lambda: self._network.joined(self.node, node))
        self.cluster.clock.after(REDIAL_S[-1], lambda: self._dial(node, 0))

    def joined(self, node: int) -> None:
        """There is a new connection."""
        self._wires[node] = _Wire(self._network, self.node, node)
        self.links.add(node)
        self.peering.linked(node)

    def send(self, node: int, message: p.DaemonMessage) -> bool:
        """See `Links`."""
        if node not in self.links or not self.alive:
            return False
        receiver, wire = self._network.node(node), self._wires[node]
        back = receiver._wires.get(self.node)
        wire.send(lambda: receiver.awake(lambda: receiver.came(self.node, message, back)))
        return True

    def came(self, sender: int, message: p.DaemonMessage, over: _Wire | None) -> None:
        """Hear what has come over a connection, if that is still there."""
        if sender in self.links and self._wires[sender] is over:
            self.peering.hear(sender, message)

    def hang_up(self, node: int, why: str) -> None:
        """See `Links`; the other one hears of it when that gets through."""
        if node not in self.links:
            return
        other = self._network.node(node)
        back, wire = other._wires.get(self.node), self._wires[node]
        self.links.discard(node)
        self.cluster.clock.soon(lambda: self.awake(lambda: self.peering.unlinked(node, why)))
        wire.send(lambda: other.awake(lambda: other.hung_up(self.node, back)))

    def hung_up(self, node: int, over: _Wire | None) -> None:
        """The other end of a connection has gone."""
        if node in self.links and self._wires[node] is over:
            self.links.discard(node)
            self.peering.unlinked(node, "its daemon closed the connection")

    def look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        """See `Links`."""
        deadline_s = self.times.dark_s * job_host.LOOK_PART
        open_s = LINK_S if self._network.answers(self.node, node) else None
        after = self.cluster.clock.after
        if open_s is not None:
            after(open_s, lambda: self.awake(lambda: self.peering.looked(node, "open")))
        elif deadline_s > SYN_REPEAT_S:
            after(SYN_REPEAT_S, lambda: self._look_again(node, deadline_s - SYN_REPEAT_S))
        else:
            after(deadline_s, lambda: self._silent(node, deadline_s))

    def _look_again(self, node: int, rest_s: float) -> None:
        if self._network.answers(self.node, node):
            self.awake(lambda: self.peering.looked(node, "open"))
        else:
            self.cluster.clock.after(rest_s, lambda: self._silent(node, rest_s + SYN_REPEAT_S))

    def _silent(self, node: int, deadline_s: float) -> None:
        late = self.now() < self._asleep_until and self._asleep_until - self.now() >= deadline_s
        # Whoever was stopped sees by his clock that the answer may have come.
        self.awake(lambda: self.peering.looked(node, "unsure" if late else "silent"))


class Noisy(Cluster):
    """All nodes of a job; what befalls them."""

    def __init__(self, times: Timers, nodes: int = NODES) -> None:
        self.times, self.ended = times, False
        # Between these and the others nothing gets through.
        self._side: frozenset[int] = frozenset()
        self._lossy: dict[int, float] = {}
        self._random = Random(0)
        super().__init__(nodes, NoisyNode)
        self.start()

    def node(self, number: int) -> NoisyNode:
        """Return a node."""
        node = self.nodes[number]
        assert isinstance(node, NoisyNode)
        return node

    def passes(self, sender: int, receiver: int) -> bool:
        """Whether a packet gets through now."""
        if (sender in self._side) != (receiver in self._side):
            return False
        kept = (1 - self._lossy.get(sender, 0.0)) * (1 - self._lossy.get(receiver, 0.0))
        return kept == 1 or self._random.random() < kept

    def answers(self, one: int, other: int) -> bool:
        """Whether the kernel of a node gets a SYN, and its answer is got."""
        return self.nodes[other].alive and self.passes(one, other) and self.passes(other, one)

    def joined(self, one: int, other: int) -> None:
        """A connection was made, if both still live."""
        if self.nodes[one].alive and self.nodes[other].alive:
            dialled = self.node(other)
            dialled.awake(lambda: dialled.joined(one))
            self.node(one).joined(other)

    def suffer(self, what: Incident) -> Found:
        """Let it happen at a random moment, and see what comes of it. Once for each `Noisy`."""
        self._random = Random(what.seed)
        self.clock.run(lambda: False, 1 + self._random.random())
        begun = self.clock.now
        # Spares, which are the last ones, have nothing that anybody would take over.
        every = range(len(self.nodes) - SPARES if what.kind == "power" else len(self.nodes))
        victims = self._random.sample(every, LEAF if what.kind == "leaf" else 1)
        lasts_s = self._befall(what, victims)
        self.clock.run(self._gives_up, lasts_s + self.times.dark_s + SETTLED_S)
        if not self._gives_up():
            return Found(0, None, None, self.ended)
        found_s = self.clock.now - begun
        # Of several, the others follow.
        self.clock.run(lambda: len(self._lost()) >= len(victims), SETTLED_S)
        lost = self._lost()
        again = self.clock.run(lambda: self._all_train(victims), RECOVERED_S)
        trains_s = self.clock.now - begun if again and what.kind == "power" else None
        return Found(len(lost), found_s, trains_s, self.ended)

    def _befall(self, what: Incident, victims: list[int]) -> float:
        """Begin it; returns how long it takes."""
        size = what.size
        match what.kind:
            case "power":
                self._side = frozenset(victims)
                for victim in victims:
                    self.nodes[victim].alive = False
                return RECOVERED_S
            case "loss":
                self._lossy = dict.fromkeys(victims, size)
                self.clock.after(LOSSY_S, self._heal)
                return LOSSY_S
            case "starved":
                self.node(victims[0]).sleep(size)
                return size
            case "still":
                self.node(victims[0]).sleep(size)
        self._side = frozenset(victims)
        self.clock.after(size, self._heal)
        return size

    def _heal(self) -> None:
        self._side, self._lossy = frozenset(), {}

    def _lost(self) -> set[int]:
        leaders = (node.session.control for node in self.nodes if node.alive and node.session.control.leads)
        return set().union(*(control.losses for control in leaders))

    def _gives_up(self) -> bool:
        return self.ended or bool(self._lost())

    def _all_train(self, but: list[int]) -> bool:
        others = [node for node in self.nodes if node.node not in but]
        controls = [node.session.control for node in others]
        return self.ended or all(
            c.stage == "running" and c.assignment is not None and c.assignment.generation > 1
            for c in controls
        )
