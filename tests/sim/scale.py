"""A job of thousands of nodes in virtual time: what it says in peace, and what it takes to replace a node.

`python -m tests.sim.scale 16 64 256 ... [--json FILE] [--plot FILE]`: nodes of 8 ranks, which train, and tell
of it four times a second; each rank has a shard, which two other nodes hold, too. The code is the shipped
one: the `JobSession` of every daemon; what one of them computes, `scale_parts` has. Links
take a millisecond, disks and processes as long; computing takes no time. Bytes are those of the messages,
with their heads, without those of TCP.
"""

import gc
import heapq
import json
import logging
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from ckptless.daemon.ckptlessd import peering
from ckptless.daemon.ckptlessd.consensus import packing
from ckptless.daemon.ckptlessd.consensus.quorum import first_decree
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.session import JobSession, Memory
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Decree, Durable
from ckptless.daemon.protocol.records import Record
from ckptless.daemon.replication.re_replication import Holders
from ckptless.daemon.settings.config import Peer, Timers
from ckptless.daemon.transport.handshake import HEAD_BYTES

from .scale_parts import COPIES, SLOTS, SPARES

LINK_S = 0.001
DISK_S = 0.001
RANK_S = 0.001
FLUSH_S = 0.005
TICK_S = 0.25
TIMES = Timers(beat_s=0.25, dark_s=1.5)
LIMITS = m.Limits(pong_s=10.0, leave_s=30.0, join_s=300.0, stall_s=300.0, lease_s=10.0)
PEACE_S = 4.0
DEADLINE_S = 100.0
EPOCH_S = 1e6
# An agent tells of new steps so often (agent/service.py).
PROGRESS_S = 0.25
# What is restored; steps since then count as lost.
COMMITTED = 1


class Clock:
    """What is yet to happen. What takes a link's time, which is most, needs no heap."""

    def __init__(self) -> None:
        self.now = EPOCH_S
        self._soon: deque[tuple[float, Callable[[], None]]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def soon(self, action: Callable[[], None]) -> None:
        """In a millisecond."""
        self._soon.append((self.now + LINK_S, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Then."""
        self._count += 1
        heapq.heappush(self._later, (self.now + delay_s, self._count, action))

    def run(self, until: Callable[[], bool], for_s: float) -> bool:
        """Go on until it is true; False where it is not so after so many seconds."""
        end = self.now + for_s
        while not until():
            soon = bool(self._soon) and (not self._later or self._soon[0][0] <= self._later[0][0])
            if (self._soon[0][0] if soon else self._later[0][0]) > end:
                return False
            if soon:
                self.now, action = self._soon.popleft()
            else:
                self.now, _, action = heapq.heappop(self._later)
            action()
        return True


class Shared(Roster):
    """All daemons of one machine's memory share one list of nodes."""

    every: tuple[int, ...] = ()
    by_node: dict[int, Peer] = {}  # noqa: RUF012

    @property
    def nodes(self) -> tuple[int, ...]:
        return Shared.every


class Node:
    """A daemon with its agent, whose ranks do at once what they are told. Outlets and Links of the daemon."""

    times = TIMES
    tick_s = TICK_S

    def __init__(self, cluster: "Cluster", roster: Roster, first: Durable) -> None:
        self.cluster, self.node, self.alive = cluster, roster.me, True
        self.sent, self.sent_nbytes = 0, 0
        self.links: set[int] = set()
        self._assignment: m.Assignment | None = None
        self._seq, self._step = 0, 0
        self._phase: m.Phase = "waiting"
        memory = Memory(roster.me, "x", first)
        self.session = JobSession("scale", roster, self, memory)
        self.peering = self.session.peering

    @property
    def peer_links(self) -> "Node":
        return self

    def now(self) -> float:
        return self.cluster.clock.now

    def tick(self) -> None:
        if self.alive:
            self.session.tick()
            self.cluster.clock.after(self.tick_s, self.tick)

    def progress(self) -> None:
        """Ranks that train have made steps."""
        if self.alive:
            if self._phase == "restored":
                self._step += 1
                self._told("restored", self._generation)
            self.cluster.clock.after(PROGRESS_S, self.progress)

    @property
    def _generation(self) -> int:
        return self._assignment.generation if self._assignment is not None else 0

    def begin(self) -> None:
        address = f"10.{self.node >> 16}.{self.node >> 8 & 255}.{self.node & 255}"
        info = m.NodeInfo(
            node=self.node,
            name=f"node{self.node:05d}",
            address=address,
            agent_port=40000,
        )
        self.session.feed(
            e.Report(self.node, m.AgentHello(protocol=1, spec=self.cluster.spec, info=info, pid=4711))
        )
        self._told("waiting", 0)

    def _told(self, phase: m.Phase, generation: int, **more: object) -> None:
        self._seq += 1
        self._phase = phase
        cause = m.Cause(kind="stop", text="stopped") if phase == "left" else None
        step = self._step if phase in ("restored", "left") else None
        slots = tuple(
            m.SlotState(
                slot=slot, phase=phase, generation=generation, pid=4712 + slot, hooked=True, step=step,
                stepped=step is not None, loss=2.718281828 if step else None, cause=cause,
            )
            for slot in range(SLOTS)
        )  # fmt: skip
        state = m.AgentState(seq=self._seq, slots=slots, assigned=generation or None, **more)  # type: ignore[arg-type]
        self.cluster.clock.after(RANK_S, lambda: self._says(state))

    def _says(self, state: m.AgentState) -> None:
        if self.alive:
            self.session.feed(e.Report(self.node, state))

    # ------------------------------------------------------------------------- Outlets, for JobSession

    def to_agent(self, order: m.Order | m.Draw | m.GiveBack | m.Announce | m.Renewed) -> None:
        match order:
            case m.Assign():
                self._assignment = order.assignment
                mine = order.assignment.ranks_on(self.node)
                self._told("joined" if mine else "waiting", order.assignment.generation)
            case m.Stop() if self._assignment is not None:
                ranks = self._assignment.ranks_on(self.node)
                steps = (COMMITTED,)
                numbers = self.cluster.held(self._assignment).get(self.node, ())
                held = m.Holdings(
                    tensors=tuple((rank, steps) for rank in numbers),
                    records=tuple((rank, rank, steps) for rank in numbers),
                )
                self._told(
                    "left" if ranks else "waiting", order.generation, frozen=order.generation, holdings=held
                )
            case m.Go() if self._assignment is not None:
                # Also where there is no rank: whatever is committed is held by a neighbour, too.
                self._step = (self._assignment.restore_step or 0) + 1
                if self._assignment.ranks_on(self.node):
                    self._told("restored", order.generation)
            case _:
                pass

    def write(self, records: Sequence[Record]) -> None:
        pass

    def ended(self, outcome: m.Outcome) -> None:
        raise AssertionError(outcome)

    def node_is_dark(self, node: int, reason: str, state: e.DarkState) -> None:
        pass

    def cut_network(self, for_s: float) -> None:
        raise AssertionError(for_s)

    def save(self, durable: Durable, then: Callable[[], None], failed: Callable[[str], None]) -> None:
        self.cluster.clock.after(DISK_S, then)

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        raise AssertionError(nodes)

    def explain(self, node: int, cancel: m.Cancel) -> None:
        raise AssertionError(cancel)

    # ---------------------------------------------------------------------------- Links, for Peering

    @property
    def up(self) -> Collection[int]:
        return self.links

    def want(self, nodes: frozenset[int]) -> None:
        for node in nodes - self.links:
            self.cluster.clock.soon(lambda node=node: self.cluster.connect(self.node, node))  # type: ignore[misc]

    def send(self, node: int, message: p.DaemonMessage) -> bool:
        if node not in self.links or not self.alive:
            return False
        self.sent += 1
        self.sent_nbytes += self.cluster.nbytes(message)
        self.cluster.clock.soon(lambda: self.cluster.deliver(self.node, node, message))
        return True

    def hang_up(self, node: int, why: str) -> None:
        self.links.discard(node)
        self.cluster.clock.soon(lambda: self.peering.unlinked(node, why))

    def look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        there = self.cluster.nodes[node].alive
        answer = (
            (lambda: self.peering.looked(node, "open"))
            if there
            else lambda: self.peering.looked(node, "silent")
        )
        self.cluster.clock.after(LINK_S if there else self.times.dark_s / 3, answer)

    def flush_soon(self) -> None:
        self.cluster.clock.after(FLUSH_S, self.peering.flush)


@dataclass(frozen=True)
class Cost:
    """Messages and bytes that were sent by the leader, by the median of the others, and by the busiest."""

    leader: int
    median: int
    most: int
    leader_nbytes: int
    median_nbytes: int
    most_nbytes: int


@dataclass(frozen=True)
class Scale:
    """Of one size. Peace is per second; times are virtual seconds, but for `cpu_s` and `rss_nbytes`."""

    nodes: int
    start_s: float
    peace: Cost
    agent_lost_s: float
    agent_lost: Cost
    dark_s: float
    dark: Cost
    cpu_s: float
    rss_nbytes: int


class Cluster:
    """All nodes of one job."""

    def __init__(self, count: int, kind: type[Node] = Node) -> None:
        self.clock = Clock()
        names = tuple(f"node{node:05d}" for node in range(count))
        self.spec = m.JobSpec(
            job="scale",
            command=("t",),
            nodes=count - SPARES,
            spares=SPARES,
            slots_per_node=SLOTS,
            limits=LIMITS,
            names=names,
        )
        peers = tuple(Peer(node=n, name=name, address="10.0.0.1", port=1) for n, name in enumerate(names))
        Shared.every, Shared.by_node = tuple(range(count)), {peer.node: peer for peer in peers}
        first = Durable(promised=NO_BALLOT, vote=None, known=first_decree(Shared.every))
        self.nodes = [kind(self, Shared(node, peers), first) for node in range(count)]
        self._encoder = msgspec.msgpack.Encoder()
        self._sizes: tuple[object, int] = (None, 0)
        self._held: tuple[int, dict[int, list[int]]] = (0, {})
        self.counting = False

    def nbytes(self, message: p.DaemonMessage) -> int:
        """Of one message; what goes to many is measured once."""
        if not self.counting:
            return 0
        last, size = self._sizes
        if last is not message:
            size = len(self._encoder.encode(message)) + HEAD_BYTES
            self._sizes = (message, size)
        return size

    def held(self, assignment: m.Assignment) -> dict[int, list[int]]:
        """The ranks whose state each node has in a generation: its own, and what it holds for others."""
        if self._held[0] != assignment.generation:
            found: dict[int, list[int]] = {}
            to = Holders(assignment, COPIES)
            for home, ranks in assignment.ranks_by_node.items():
                for node in (home, *(info.node for info in to.of_node(home))):
                    found.setdefault(node, []).extend(ranks)
            self._held = (assignment.generation, found)
        return self._held[1]

    def connect(self, one: int, other: int) -> None:
        a, b = self.nodes[one], self.nodes[other]
        if a.alive and b.alive and other not in a.links:
            a.links.add(other)
            b.links.add(one)
            a.peering.linked(other)
            b.peering.linked(one)

    def deliver(self, sender: int, receiver: int, message: p.DaemonMessage) -> None:
        node = self.nodes[receiver]
        if node.alive and sender in node.links:
            node.peering.hear(sender, message)

    def start(self) -> float:
        """Until everybody knows that the first generation trains."""
        begun = self.clock.now
        for number, node in enumerate(self.nodes):
            node.peering.start()
            self.clock.after(node.tick_s * number / len(self.nodes), node.tick)
            self.clock.after(0.05, node.begin)
            self.clock.after(PROGRESS_S * number / len(self.nodes), node.progress)
        assert self.clock.run(lambda: self.trains(1), DEADLINE_S), "generation 1 does not come"
        return self.clock.now - begun

    def trains(self, generation: int) -> bool:
        """Whether all that live know that it does; the last node is asked first."""
        for node in reversed(self.nodes):
            control = node.session.control
            if node.alive and (
                control.stage != "running"
                or control.assignment is None
                or control.assignment.generation < generation
            ):
                return False
        return True

    def count(self, until: Callable[[], bool], for_s: float) -> tuple[float, Cost]:
        """Seconds until it is true, and what was said meanwhile."""
        for node in self.nodes:
            node.sent = node.sent_nbytes = 0
        begun, self.counting = self.clock.now, True
        self.clock.run(until, for_s)
        self.counting = False
        leader = next(node for node in self.nodes if node.alive and node.session.control.leads)
        others = sorted((node for node in self.nodes if node is not leader), key=lambda node: node.sent)
        sizes = sorted(node.sent_nbytes for node in others)
        middle = len(others) // 2
        cost = Cost(
            leader.sent, others[middle].sent, others[-1].sent, leader.sent_nbytes, sizes[middle], sizes[-1]
        )
        return self.clock.now - begun, cost

    def lose(self, node: int, *, dark: bool, generation: int) -> tuple[float, Cost]:
        """A node's agent dies, or its machine; until all know that the next generation trains."""
        victim = self.nodes[node]
        if dark:
            victim.alive = False
        else:
            victim.session.lose(e.NodeLost(node, "its agent is gone", 0.0, source="agent"))
        seconds, cost = self.count(lambda: self.others_train(node, generation), DEADLINE_S)
        assert self.others_train(node, generation), f"generation {generation} does not come"
        return seconds, cost

    def others_train(self, lost: int, generation: int) -> bool:
        """As `trains`, without a node whose daemon may live on."""
        alive, self.nodes[lost].alive = self.nodes[lost].alive, False
        try:
            return self.trains(generation)
        finally:
            self.nodes[lost].alive = alive


@lru_cache(maxsize=4)
def _unpacked_once(body: bytes, base: int, digest: str) -> Decree:
    return packing.unpack(body, _BASES[base], digest, Shared.by_node)


_BASES: dict[int, Decree] = {}


def unpack_once(body: bytes, base: Decree, digest: str, nodes: Collection[int]) -> Decree:
    """As all daemons do it: computing takes no time here, and the same decree no memory."""
    _BASES[base.index] = base
    return _unpacked_once(body, base.index, digest)


def measure(count: int) -> Scale:
    """All of one size."""
    vars(peering)["unpack"] = unpack_once
    _unpacked_once.cache_clear()
    begun = time.process_time()
    cluster = Cluster(count)
    start_s = cluster.start()
    cluster.count(lambda: False, 2.0)  # whoever came late is done
    _, total = cluster.count(lambda: False, PEACE_S)
    peace = Cost(*(round(value / PEACE_S) for value in asdict(total).values()))
    agent_lost_s, agent_lost = cluster.lose(count // 2 + 1, dark=False, generation=2)
    cluster.count(lambda: False, 1.0)
    dark_s, dark = cluster.lose(count // 3 + 1, dark=True, generation=3)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cpu_s = time.process_time() - begun
    return Scale(count, start_s, peace, agent_lost_s, agent_lost, dark_s, dark, cpu_s, rss)


def _after(option: str) -> Path | None:
    return Path(sys.argv[sys.argv.index(option) + 1]) if option in sys.argv else None


def main() -> None:
    """Entry point."""
    logging.disable(logging.CRITICAL)
    # Of thousands of nodes it takes longer than all else, and finds nothing.
    gc.disable()
    found: list[Scale] = []
    for size in [int(word) for word in sys.argv[1:] if word.isdigit()]:
        found.append(measure(size))
        print(json.dumps(asdict(found[-1])), flush=True)
    numbers, picture = _after("--json"), _after("--plot")
    if numbers is not None:
        numbers.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if picture is not None:
        from .scale_plot import plot

        plot(found, picture)


if __name__ == "__main__":
    main()
