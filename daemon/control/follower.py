"""Pure: what every daemon of a job hears and does, whether it leads or not.

Who leads, which generation there is, and how the job ends is agreed on; an order of an older ballot, or of
another generation, is refused.
"""

from dataclasses import dataclass

from ckptless.daemon.api import messages as m
from ckptless.daemon.control import story
from ckptless.daemon.control.decree import Decided
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
    Said,
    Tell,
    Tick,
    ToAgent,
    Witnessed,
    Write,
)
from ckptless.daemon.control.elector import Elector
from ckptless.daemon.control.knowledge import NOBODY

REPORT_INTERVAL_S = 1.0
FEW = 64


@dataclass
class Follower(Elector):
    """Hears everything, and obeys whoever leads."""

    def handle(self, event: Input, now: float) -> list[Output]:
        """One input in, all outputs out."""
        if not self._since:
            self._since = self._moved = self._started = now
        self._take(event, now)
        self._follow(now)
        self._hold_lease(now)
        if self._lease.held:
            self._campaign_if_due(now)
            self._drive(now)
        self._end_by_itself(now)
        self.agreement.repeat(now)
        self._follow(now)
        out = self._out.copy()
        self._out.clear()
        return out

    def _take(self, event: Input, now: float) -> None:  # noqa: C901  # a line for each kind of input
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
                self._lose(event)
            case OrderFrom():
                self._on_order(event, now)
            case Said():
                self._on_said(event, now)
            case Witnessed():
                self._witnessed(event, now)
            case Tick():
                self._periodic(now)

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
            if report.node == self.me:
                self._tend()
        elif isinstance(message, m.Cancel):
            self._cancelled = message
        elif report.node == self.me:
            self._note(now, message.level, message.kind, message.text, message.generation)
        if report.node == self.me and self.leader not in (NOBODY, self.me):
            self._out.append(Forward(self.leader, report))

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
            for node, reason, source in theirs.lost:
                self._lose(NodeLost(node, reason, 0.0, source=source))
        if theirs.known.index < self.known.index:
            self._out.append(Tell(event.node, Decided(decree=self.known)))
        self.agreement.learn(theirs.known)
        self.agreement.beware(event.node, theirs.promised)
        self._follow(now)
        self._settle_leader(event.node, theirs, now)

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
        self._obey_leader(event.term, event.node)
        if self.leader != before:
            self._introduce()
        self._obey(event.order, now)

    def _obey(self, order: m.Order, now: float) -> None:
        """What a leader's order means for this node: know it, and hand it to the agent."""
        if isinstance(order, m.Assign | m.End):
            raise TypeError(f"{type(order).__name__} is agreed on, not ordered")
        if order.generation != self._generation:
            # Late, or early: what it speaks of is over, or not known here yet, and the leader will repeat it.
            return
        match order:
            case m.Stop():
                self._enter("stopping", now)
            case m.Go():
                self._enter("restoring", now)
            case m.Running():
                self._enter("running", now)
            case m.Release():
                self._enter("releasing", now)
        if not isinstance(order, m.Running):
            self._out.append(ToAgent(order))

    def _remind(self) -> None:
        """Say all again to whoever leads, or will: something may have been lost on the way."""
        living = [node for node in self.reachable if self.nodes[node].lost is None]
        ear = self.leader if self.leader != NOBODY else min(living, default=self.me)
        if ear != self.me and self.stage != "ended":
            self._out.append(Meet(ear, self.standing, self._own_reports()))

    def _periodic(self, now: float) -> None:
        if not self._lease.held:
            self._ask_witness(now)
        # Each says all there is of all nodes: many do it seldom.
        if self.spec is not None and now - self._reminded >= max(1.0, (len(self.nodes) / FEW) ** 2):
            self._reminded = now
            self._remind()
        if self.spec is not None and now - self._reported >= REPORT_INTERVAL_S:
            self._reported = now
            self._tend()
            rows = story.snapshot(self.spec.job, self.nodes, self.assignment, self.reachable, now)
            self._out.append(Write(tuple(rows), share=False))
