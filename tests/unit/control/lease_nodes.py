"""A job that trains, as the control planes of its daemons see it: values in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.ckptlessd.recovery.job_state import NOBODY
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import (
    Accepted,
    Ballot,
    Canvass,
    Decided,
    Decree,
    Durable,
    Prepare,
    Promise,
    Propose,
    Support,
)
from ckptless.daemon.protocol.records import EventRecord, FaultSource

LEASE_S = 3.0
LIMITS = m.Limits(pong_s=30, leave_s=30, join_s=600, stall_s=600, lease_s=LEASE_S)
START_S = 1000.0
STEP = 7


def info(node: int) -> m.NodeInfo:
    return m.NodeInfo(node=node, name=f"n{node}", address="127.0.0.1", agent_port=1)


def job_spec(nodes: int) -> m.JobSpec:
    """Of `nodes` nodes the last one is a spare."""
    return m.JobSpec(job="4711", command=("t",), nodes=nodes - 1, spares=1, slots_per_node=1, limits=LIMITS)


def first_generation(nodes: int, leader: int = 0) -> m.Assignment:
    return m.Assignment(
        job="4711",
        generation=1,
        term=1,
        leader=leader,
        places=tuple(m.Place(node=node, slot=0) for node in range(nodes - 1)),
        nodes=tuple(info(node) for node in range(nodes)),
        restore_step=None,
    )


def lost_by(
    node: int, reason: str, age_s: float = 0.0, *, dark: bool = False, source: FaultSource = "membership"
) -> e.NodeLost:
    return e.NodeLost(node, reason, age_s, dark, source=source)


def agreed(nodes: int, leader: int = 0) -> Decree:
    """The decree that generation 1 came with; every node votes."""
    return Decree(index=1, voters=tuple(range(nodes)), assignment=first_generation(nodes, leader))


def hello(node: int, nodes: int) -> m.AgentHello:
    return m.AgentHello(protocol=m.PROTOCOL, spec=job_spec(nodes), info=info(node), pid=100 + node)


def trains(node: int, assignment: m.Assignment, seq: int = 1, phase: m.Phase = "restored") -> m.AgentState:
    """Return what an agent says of a rank in the middle of training (of a spare's process, that it waits)."""
    if not assignment.ranks_on(node):
        phase = "waiting"
    slot = m.SlotState(
        slot=0, phase=phase, generation=assignment.generation, hooked=True, step=STEP, stepped=True
    )
    return m.AgentState(seq=seq, slots=(slot,), assigned=assignment.generation)


@dataclass
class Heard:
    """Everything that one control plane has put out, in order."""

    outputs: list[e.Output] = field(default_factory=list)

    @property
    def orders(self) -> list[m.Order]:
        return [output.order for output in self.outputs if isinstance(output, e.Broadcast)]

    @property
    def ends(self) -> list[m.End]:
        to_agent = [output.order for output in self.outputs if isinstance(output, e.ToAgent)]
        return [order for order in to_agent if isinstance(order, m.End)]

    @property
    def renewals(self) -> int:
        """Return how often the agent has heard that its node has a lease."""
        return [type(out.order) for out in self.outputs if isinstance(out, e.ToAgent)].count(m.Renewed)

    @property
    def dark(self) -> list[int]:
        return [node for node, state in self.dark_states if state == "dark"]

    @property
    def dark_states(self) -> list[tuple[int, e.DarkState]]:
        """Return what the cluster's manager is told."""
        return [(out.node, out.state) for out in self.outputs if isinstance(out, e.NodeIsDark)]

    @property
    def events(self) -> list[str]:
        """Kinds of the lines for the ledger."""
        writes = [output for output in self.outputs if isinstance(output, e.Write)]
        return [row.kind for write in writes for row in write.records if isinstance(row, EventRecord)]

    @property
    def meetings(self) -> list[e.Standing]:
        return [output.standing for output in self.outputs if isinstance(output, e.Meet)]


@dataclass
class Node:
    """The control plane of node `me`, of a job of `nodes` nodes that trains under `leader`."""

    me: int
    nodes: int
    leader: int = 0
    now: float = START_S
    told: Heard = field(default_factory=Heard)
    quiet: set[int] = field(default_factory=set)

    fresh: bool = False

    def __post_init__(self) -> None:
        durable = None
        if self.fresh or self.me != self.leader:
            promised = Ballot(number=1, node=self.leader)
            durable = Durable(promised=promised, vote=None, known=agreed(self.nodes, self.leader))
        views = {node: NodeView(node) for node in range(self.nodes)}
        self.control = Controller(me=self.me, session="s", nodes=views, durable=durable)
        if self.fresh:
            return
        if self.me == self.leader:
            self._lead()
        else:
            self._follow()
        assert self.control.job.stage == "running"
        assert self.control.job.assignment == first_generation(self.nodes, self.leader)
        assert self.control.job.leads is (self.me == self.leader)
        self.forget()

    def _follow(self) -> None:
        assignment = first_generation(self.nodes, self.leader)
        mine = (hello(self.me, self.nodes), trains(self.me, assignment))
        self.feed(*(e.Report(self.me, message) for message in mine))
        standing = e.Standing(1, self.leader, "running", index=1)
        self.feed(*(e.PeerUp(node, standing) for node in self.others))

    @classmethod
    def begun(cls, nodes: int) -> Self:
        """Node 0 leads, and generation 1 is agreed on; no agent has said anything of it."""
        node = cls(0, nodes, fresh=True)
        node.control = Controller(0, "s", {number: NodeView(number) for number in range(nodes)})
        node._form()
        node.forget()
        return node

    def _form(self) -> None:
        nothing = e.Standing(0, NOBODY, "forming", index=0)
        self.feed(*(e.PeerUp(node, nothing) for node in self.others))
        self.feed(*(e.Report(node, hello(node, self.nodes)) for node in range(self.nodes)))

    def _lead(self) -> None:
        self._form()
        assignment = self.control.job.assignment
        assert assignment is not None
        phases: tuple[m.Phase, ...] = ("joined", "restored")
        for seq, phase in enumerate(phases, 1):
            states = [trains(node, assignment, seq, phase) for node in range(self.nodes)]
            self.feed(*(e.Report(node, state) for node, state in enumerate(states)))

    @classmethod
    def started_again(cls, me: int, nodes: int, leader: int, now: float) -> Self:
        """Its daemon knows only what the agent of its node has told it."""
        node = cls(me, nodes, leader, now=now, fresh=True)
        state = trains(me, first_generation(nodes, leader), seq=9)
        node.feed(e.Report(me, hello(me, nodes)), e.Report(me, state))
        return node

    @property
    def others(self) -> list[int]:
        return [node for node in range(self.nodes) if node != self.me]

    @property
    def outcome(self) -> m.Outcome | None:
        return self.control.job.outcome

    @property
    def held(self) -> bool:
        return self.control.job.decides

    def feed(self, *events: e.Input) -> Heard:
        """Return what it puts out for these inputs."""
        found = Heard()
        waiting = list(events)
        while waiting:
            outputs = self.control.handle(waiting.pop(0), self.now)
            found.outputs += outputs
            waiting += [said for output in outputs if (said := self._answer(output)) is not None]
        self.told.outputs += found.outputs
        return found

    def _answer(self, output: e.Output) -> e.Said | None:
        """The others agree to everything, as far as they can be reached; the own disk is quick."""
        if isinstance(output, e.Save) and output.say is not None and output.node == self.me:
            return e.Said(self.me, output.say)
        if not isinstance(output, e.Tell) or output.node is None:
            return None
        if output.node not in self.control.job.reachable - self.quiet:
            return None
        match output.say:
            case Canvass():
                return e.Said(output.node, Support(ballot=output.say.ballot, index=output.say.index))
            case Prepare():
                promise = Promise(ballot=output.say.ballot, index=output.say.index, vote=None)
                return e.Said(output.node, promise)
            case Propose():
                accepted = Accepted(ballot=output.say.ballot, index=output.say.decree.index)
                return e.Said(output.node, accepted)
        return None

    def wait(self, seconds: float, tick_s: float = 0.05) -> Heard:
        """What it puts out while nothing happens but time; who is quiet stays so, and is asked again."""
        found = Heard()
        for _ in range(round(seconds / tick_s)):
            self.now += tick_s
            found.outputs += self.feed(e.Tick()).outputs + self._probe().outputs
        return found

    def silent(self, nodes: Iterable[int]) -> Heard:
        """Their daemons are silent, and half a second later neither have their agents answered."""
        nodes = list(nodes)
        found = self.feed(*(e.PeerDown(node) for node in nodes))
        self.quiet.update(nodes)
        self.now += 0.5
        return Heard(found.outputs + self._probe().outputs)

    def _probe(self) -> Heard:
        """As the runtime does it: who does not hear enough of the others says nothing of them."""
        found = Heard()
        for node in sorted(self.quiet):
            found.outputs += self.feed(e.AgentAnswers(node, False)).outputs
            if self.control.job.decides and self.control.job.nodes[node].lost is None:
                found.outputs += self.feed(lost_by(node, "silent", 2.0, dark=True)).outputs
        return found

    def heals(self, nodes: Iterable[int]) -> Heard:
        """They are there again, and know of nothing."""
        nodes = list(nodes)
        self.quiet -= set(nodes)
        standing = e.Standing(1, self.leader, "running", index=1)
        return self.feed(*(e.PeerUp(node, standing) for node in nodes))

    def refused(self, nodes: Iterable[int]) -> Heard:
        """Their machines answer that no agent is there any more."""
        return self.feed(*(event for node in nodes for event in (e.PeerDown(node), lost_by(node, "gone"))))

    def forget(self) -> None:
        self.told = Heard()


def meet(one: Node, other: Node) -> None:
    """A connection between two daemons is there: each tells the other where it stands, and what follows."""
    first = [(one, other, one.feed(e.Connected(other.me))), (other, one, other.feed(e.Connected(one.me)))]
    rounds = 0
    while first:
        rounds += 1
        assert rounds < 100, "two daemons that never stop telling each other where they stand"
        following = []
        for sender, receiver, found in first:
            events = carried(sender.me, receiver.me, found.outputs)
            if events:
                following.append((receiver, sender, receiver.feed(*events)))
        first = following


def carried(sender: int, receiver: int, outputs: Sequence[e.Output]) -> list[e.Input]:
    """Return what comes over the link between two daemons, of what one of them puts out."""
    events: list[e.Input] = []
    for output in outputs:
        match output:
            case e.Meet() if output.node in (None, receiver):
                events += [*output.reports, e.PeerUp(sender, output.standing)]
            case e.Forward() if output.node == receiver:
                events.append(output.report)
            case e.Broadcast():
                events.append(e.OrderFrom(sender, output.term, output.order))
            case e.Tell() if isinstance(output.say, Decided) and output.node in (None, receiver):
                events.append(e.Said(sender, output.say))
    return events
