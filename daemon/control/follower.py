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
    AgentAnswers,
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
from ckptless.daemon.control.lease import Lease
from ckptless.daemon.control.timeline import Timeline

REPORT_INTERVAL_S = 1.0
# Before generation 1 the others may just not have started yet.
FORMING_GRACE_S = 10.0
# A daemon that was started again has not met the others yet: somebody leads already, most likely.
MEETING_GRACE_S = 2.0
NOBODY = -1


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
    answering: set[int] = field(default_factory=set)
    progress: int = 0
    _cancelled: m.Cancel | None = None
    _log: FaultLog = field(default_factory=FaultLog)
    _timeline: Timeline | None = None
    _since: float = 0.0
    _moved: float = 0.0
    _reported: float = 0.0
    _started: float = 0.0
    _lease: Lease = field(default_factory=lambda: Lease(frozenset()))
    _events: int = 0
    _out: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reachable = {self.me}
        self._lease = Lease(frozenset(self.nodes))

    # ---------------------------------------------------------------------------------- the edge

    def handle(self, event: Input, now: float) -> list[Output]:
        """One input in, all outputs out."""
        if not self._since:
            self._since = self._moved = self._started = now
        self._take(event, now)
        self._hold_lease(now)
        if self._lease.held:
            self._take_over_if_due(now)
            self._drive(now)
        out, self._out = self._out, []
        return out

    def _take(self, event: Input, now: float) -> None:
        match event:
            case Report():
                self._on_report(event, now)
            case Connected():
                self._out.append(Meet(event.node, self.standing, self._own_reports()))
            case PeerUp():
                self._on_peer_up(event, now)
            case PeerDown():
                self.reachable.discard(event.node)
                self.answering.discard(event.node)
            case AgentAnswers():
                (self.answering.add if event.answers else self.answering.discard)(event.node)
            case NodeLost():
                self._lose(event.node, event.reason, event.age_s, dark=event.dark)
            case OrderFrom():
                self._on_order(event, now)
            case Tick():
                self._periodic(now)

    @property
    def leads(self) -> bool:
        """Whether this daemon decides. One whose own node is lost has resigned."""
        return self.leader == self.me and self.nodes[self.me].lost is None

    @property
    def decides(self) -> bool:
        """Whether it hears enough of the others to say that one of them is lost."""
        return self._lease.held

    @property
    def standing(self) -> Standing:
        """What to tell another daemon."""
        lost = tuple((node, view.lost) for node, view in self.nodes.items() if view.lost is not None)
        return Standing(self.term, self.leader, self.stage, self.assignment, self.outcome, lost)

    # -------------------------------------------------------------------------------- following

    def _on_report(self, report: Report, now: float) -> None:
        view = self.nodes[report.node]
        message = report.message
        if isinstance(message, m.AgentHello):
            self.spec = self.spec or message.spec
            if view.hello is None:
                view.hello = message
                if report.node == self.me:
                    text = f"{message.info.name}: agent {message.pid} is up"
                    self._note(now, "info", "agent-up", text)
        elif isinstance(message, m.AgentState):
            if view.state is not None and message.seq <= view.state.seq:
                return
            view.state = message
            self._adopt(message.assignment, now)
            if report.node == self.me:
                self._tend()
        elif isinstance(message, m.Cancel):
            self._cancelled = message
        elif report.node == self.me:
            self._note(now, message.level, message.kind, message.text, message.generation)
        if report.node == self.me and not self.leads:
            self._out.append(Forward(self.leader, report))

    def _adopt(self, assignment: m.Assignment | None, now: float) -> None:
        """What an agent has accepted, or another daemon knows, is the job's newest assignment."""
        mine = self.assignment
        if assignment is None:
            return
        if mine is not None and (assignment.generation, assignment.term) <= (mine.generation, mine.term):
            return
        led = self.leads
        self.assignment = assignment
        if (assignment.term, assignment.leader) > (self.term, self.leader):
            # One's own is from a former life of this daemon: others have taken over since, or will.
            former = assignment.leader == self.me
            self.term, self.leader = assignment.term, NOBODY if former else assignment.leader
        elif led and self.stage == "forming":
            self.leader = NOBODY
        if self.stage == "forming":
            self._enter("joining", now)
        elif led and self.leads:
            self._superseded(now)

    def _tend(self) -> None:
        """Give the own agent what it missed while its daemon, or a link, was away."""
        state = self.nodes[self.me].state
        if state is None or self.assignment is None:
            return
        if self.outcome is not None:
            self._out.append(ToAgent(m.End(outcome=self.outcome)))
        elif state.assignment is None or state.assignment.generation < self.assignment.generation:
            self._out.append(ToAgent(m.Assign(assignment=self.assignment)))

    def _on_peer_up(self, event: PeerUp, now: float) -> None:
        self.reachable.add(event.node)
        theirs = event.standing
        if self.nodes[event.node].lost is None:
            # One that is lost may have been cut off, and have taken all others for lost.
            for node, reason in theirs.lost:
                self._lose(node, reason, 0.0)
        if theirs.outcome is not None and self.outcome is None:
            self._obey(m.End(outcome=theirs.outcome), now)
            # Its leader may be gone, or was refused: whoever hears of the end late tells the others.
            self._out.append(Meet(None, self.standing, ()))
        elif theirs.outcome is None and self.outcome is not None:
            self._out.append(Meet(event.node, self.standing, ()))
        self._settle_leader(event.node, theirs, now)
        self._adopt(theirs.assignment, now)

    def _settle_leader(self, node: int, theirs: Standing, now: float) -> None:
        """Two daemons agree on who leads: the higher (term, node) does."""
        before = self.leader
        if theirs.leader == self.me and self.leader == NOBODY:
            # They mean a former life of this daemon; how far the job is, they know better.
            self.term = max(self.term, theirs.term)
            if theirs.stage not in ("forming", "joining"):
                self._enter(theirs.stage, now)
            self._out.append(Meet(node, self.standing, ()))
        elif node == self.leader and theirs.leader == NOBODY:
            self.leader = NOBODY
        elif (theirs.term, theirs.leader) > (self.term, self.leader):
            self.term, self.leader = theirs.term, theirs.leader
        elif (theirs.term, theirs.leader) < (self.term, self.leader):
            self._out.append(Meet(node, self.standing, ()))
        if self.leader != NOBODY and (self.leader != before or node == self.leader):
            if theirs.stage != "forming":
                self._enter(theirs.stage, now)
            self._introduce()

    def _introduce(self) -> None:
        """Tell the leader all: first where this daemon stands, so that it does not plan without it."""
        self._out.append(Meet(self.leader, self.standing, ()))
        self._out.extend(Forward(self.leader, report) for report in self._own_reports())

    def _own_reports(self) -> tuple[Report, ...]:
        mine = self.nodes[self.me]
        return tuple(Report(self.me, part) for part in (mine.hello, mine.state) if part is not None)

    def _lose(self, node: int, reason: str, age_s: float, *, dark: bool = False) -> None:
        view = self.nodes[node]
        if view.lost is not None:
            return
        view.lost, view.lost_age_s, view.dark = reason, age_s, dark
        if node == self.me and self.outcome is None:
            # The others go on without this node, whatever still runs on it.
            text = f"node-{node} counts as lost: {reason}"
            outcome = m.Outcome(state="failed", exit_code=4, reason=text)
            self._out.append(ToAgent(m.End(outcome=outcome, here_only=True)))

    def _hold_lease(self, now: float) -> None:
        """Without at least half of the nodes this one decides nothing, and after a while ends its ranks."""
        if self.stage in ("forming", "ended"):
            return
        heard = {self.me} | self.reachable | self.answering
        living = [node for node, view in self.nodes.items() if view.lost is None]
        ended = [node for node, view in self.nodes.items() if view.lost is not None and not view.dark]
        self._lease.renew(heard, living, ended, now)
        mine = self.nodes[self.me]
        limit_s = self.spec.limits.lease_s if self.spec is not None else None
        if limit_s is None or mine.lost is not None or self._lease.away_s(now) <= limit_s:
            return
        count = len(self._lease.base.intersection(heard))
        text = f"it heard {count} of {len(self._lease.base)} nodes, itself included, for {limit_s:.1f} s"
        self._note(now, "error", "fenced", f"node-{self.me} ends its ranks: {text}")
        self._lose(self.me, text, self._lease.away_s(now))

    def _on_order(self, event: OrderFrom, now: float) -> None:
        if (event.term, event.node) < (self.term, self.leader) or self.outcome is not None:
            name = type(event.order).__name__
            text = (
                f"{name} of node-{event.node}, term {event.term}; node-{self.leader} leads term {self.term}"
            )
            self._note(now, "warning", "order-refused", text)
            self._out.append(Meet(event.node, self.standing, ()))
            return
        before = self.leader
        self.term, self.leader = event.term, event.node
        if self.leader != before:
            self._introduce()
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
        if not gone or not living or min(living) != self.me or self.spec is None:
            return
        grace_s = FORMING_GRACE_S if self.stage == "forming" else MEETING_GRACE_S
        if now - self._started < grace_s:
            return
        old = "nobody else does" if self.leader == NOBODY else f"node-{self.leader} cannot be reached"
        self.term, self.leader = self.term + 1, self.me
        self._note(now, "warning", "leader", f"node-{self.me} leads, since {old}")
        # What the others said last was for another leader; this one waits for what they say now.
        for view in self.nodes.values():
            if view.node != self.me:
                view.state = None
        self._out.append(Meet(None, self.standing, ()))
        self._inherit(now)

    # ------------------------------------------------------------------------------------- small

    def _inherit(self, now: float) -> None:
        """This daemon has become the leader in the middle of the job."""

    def _superseded(self, now: float) -> None:
        """This leader has learned of a newer generation than its own."""

    def _drive(self, now: float) -> None:
        """Bring the job forward, where this daemon leads."""

    def _enter(self, stage: Stage, now: float) -> None:
        if stage != self.stage and self.stage != "ended":
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
            self._tend()
            rows = story.snapshot(self.spec.job, self.nodes, self.assignment, self.reachable, now)
            self._out.append(Write(tuple(rows), share=False))
