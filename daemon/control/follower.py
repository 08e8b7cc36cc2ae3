"""Pure: what every daemon of a job knows and does, whether it leads or not.

Reports are whole states, so a daemon that takes over knows everything after one report of each node. Terms
order leaders: an order of an older term is refused. For now the lowest node whose daemon can be reached
takes over when the leader is gone.
"""

from dataclasses import dataclass, field
from typing import Literal

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.records import Record
from ckptless.daemon.control import story
from ckptless.daemon.control.edges import (
    Connected,
    Forward,
    Input,
    Meet,
    NodeLost,
    OrderFrom,
    Output,
    PeerDown,
    PeerUp,
    Report,
    Stage,
    Standing,
    Tick,
    ToAgent,
    Write,
)
from ckptless.daemon.control.faults import FaultLog, NodeView
from ckptless.daemon.control.timeline import Timeline

REPORT_INTERVAL_S = 1.0
# Before generation 1 the others may just not have started yet.
FORMING_GRACE_S = 10.0


@dataclass
class Follower:
    """State of one job in the daemon of node `me`; `session` makes ids of events unique."""

    me: int
    session: str
    nodes: dict[int, NodeView]
    spec: m.JobSpec | None = None
    stage: Stage = "forming"
    term: int = 0
    leader: int = 0
    assignment: m.Assignment | None = None
    outcome: m.Outcome | None = None
    reachable: set[int] = field(default_factory=set)
    progress: int = 0
    _cancelled: m.Cancel | None = None
    _log: FaultLog = field(default_factory=FaultLog)
    _timeline: Timeline | None = None
    _since: float = 0.0
    _moved: float = 0.0
    _reported: float = 0.0
    _started: float = 0.0
    _events: int = 0
    _out: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reachable = {self.me}

    # ---------------------------------------------------------------------------------- the edge

    def handle(self, event: Input, now: float) -> list[Output]:
        """One input in, all outputs out."""
        if not self._since:
            self._since = self._moved = self._started = now
        match event:
            case Report():
                self._on_report(event, now)
            case Connected():
                self._out.append(Meet(event.node, self.standing, self._own_reports()))
            case PeerUp():
                self._on_peer_up(event, now)
            case PeerDown():
                self.reachable.discard(event.node)
            case NodeLost():
                self._on_node_lost(event)
            case OrderFrom():
                self._on_order(event, now)
            case Tick():
                self._periodic(now)
        self._take_over_if_due(now)
        self._drive(now)
        out, self._out = self._out, []
        return out

    @property
    def leads(self) -> bool:
        """Whether this daemon decides. One whose own node is lost has resigned."""
        return self.leader == self.me and self.nodes[self.me].lost is None

    @property
    def standing(self) -> Standing:
        """What to tell another daemon."""
        return Standing(self.term, self.leader, self.stage, self.assignment)

    # -------------------------------------------------------------------------------- following

    def _on_report(self, report: Report, now: float) -> None:
        view = self.nodes[report.node]
        message = report.message
        if isinstance(message, m.AgentHello):
            if view.hello is None:
                view.hello = message
                if report.node == self.me:
                    text = f"{message.info.name}: agent {message.pid} is up"
                    self._note(now, "info", "agent-up", text)
            self.spec = self.spec or message.spec
        elif isinstance(message, m.AgentState):
            if view.state is not None and message.seq <= view.state.seq:
                return
            view.state = message
            self._adopt(message.assignment)
        elif isinstance(message, m.Cancel):
            self._cancelled = message
        elif report.node == self.me:
            self._note(now, message.level, message.kind, message.text, message.generation)
        if report.node == self.me and not self.leads:
            self._out.append(Forward(self.leader, report))

    def _adopt(self, assignment: m.Assignment | None) -> None:
        """A daemon that was restarted learns the job's assignment from its agent or its peers."""
        if assignment is None:
            return
        mine = self.assignment
        if mine is None or (assignment.term, assignment.generation) > (mine.term, mine.generation):
            self.assignment = assignment
            if assignment.term >= self.term:
                self.term, self.leader = assignment.term, assignment.leader
            if self.stage == "forming":
                self.stage = "joining"

    def _on_peer_up(self, event: PeerUp, now: float) -> None:
        self.reachable.add(event.node)
        theirs = event.standing
        if (theirs.term, theirs.leader) > (self.term, self.leader):
            self.term, self.leader = theirs.term, theirs.leader
            self._enter(theirs.stage, now)
            self._out.extend(Forward(self.leader, report) for report in self._own_reports())
        self._adopt(theirs.assignment)

    def _own_reports(self) -> tuple[Report, ...]:
        mine = self.nodes[self.me]
        return tuple(Report(self.me, part) for part in (mine.hello, mine.state) if part is not None)

    def _on_node_lost(self, event: NodeLost) -> None:
        view = self.nodes[event.node]
        if view.lost is None:
            view.lost, view.lost_age_s = event.reason, event.age_s

    def _on_order(self, event: OrderFrom, now: float) -> None:
        if (event.term, event.node) < (self.term, self.leader):
            name = type(event.order).__name__
            text = (
                f"{name} of node-{event.node}, term {event.term}; node-{self.leader} leads term {self.term}"
            )
            self._note(now, "warning", "order-refused", text)
            return
        self.term, self.leader = event.term, event.node
        self._obey(event.order, now)

    def _obey(self, order: m.Order, now: float) -> None:
        """What a leader's order means for this node: know it, and hand it to the agent."""
        match order:
            case m.Stop():
                self._enter("stopping", now)
            case m.Assign():
                self.assignment = order.assignment
                self._enter("joining", now)
            case m.Go():
                self._enter("restoring", now)
            case m.Running():
                self._enter("running", now)
            case m.Release():
                self._enter("releasing", now)
            case m.End():
                self.outcome = order.outcome
                self._enter("ended", now)
        if not isinstance(order, m.Running):
            self._out.append(ToAgent(order))

    def _take_over_if_due(self, now: float) -> None:
        """The lowest reachable node leads when the leader is gone."""
        if self.stage == "ended" or self.leads or self.nodes[self.me].lost is not None:
            return
        gone = self.leader not in self.reachable or self.nodes[self.leader].lost is not None
        living = [node for node in self.reachable if self.nodes[node].lost is None]
        if not gone or not living or min(living) != self.me or self.nodes[self.me].hello is None:
            return
        if self.stage == "forming" and now - self._since < FORMING_GRACE_S:
            return
        old = self.leader
        self.term, self.leader = self.term + 1, self.me
        self._note(now, "warning", "leader", f"node-{self.me} leads, since node-{old} cannot be reached")
        self._out.append(Meet(None, self.standing, ()))
        self._inherit(now)

    # ------------------------------------------------------------------------------------- small

    def _inherit(self, now: float) -> None:
        """This daemon has become the leader in the middle of the job."""

    def _drive(self, now: float) -> None:
        """Bring the job forward, where this daemon leads."""

    def _enter(self, stage: Stage, now: float) -> None:
        if stage != self.stage:
            self.stage, self._since = stage, now

    def _share(self, record: Record) -> None:
        self._out.append(Write((record,), share=True))

    def _note(
        self,
        now: float,
        level: Literal["info", "warning", "error"],
        kind: str,
        text: str,
        generation: int | None = None,
    ) -> None:
        self._events += 1
        if generation is None and self.assignment is not None:
            generation = self.assignment.generation
        event_id = f"{self.me}.{self.session}.{self._events}"
        job = self.spec.job if self.spec is not None else ""
        event = story.event(event_id, job, self.me, (level, kind, text), (now, generation))
        self._out.append(Write((event,), share=True))

    def _periodic(self, now: float) -> None:
        if self.spec is not None and now - self._reported >= REPORT_INTERVAL_S:
            self._reported = now
            rows = story.snapshot(self.spec.job, self.nodes, self.assignment, self.reachable, now)
            self._out.append(Write(tuple(rows), share=False))
