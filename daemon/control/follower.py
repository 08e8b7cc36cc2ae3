"""Pure: what every daemon of a job hears and does, whether it leads or not.

Who leads, which generation there is, and how the job ends is agreed on; an order of an older ballot, or of
another generation, is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.records import VOTE_AGAIN, VOTE_LOST, JobRecord, Record
from ckptless.daemon.control import story
from ckptless.daemon.control.decree import Ballot, Decided
from ckptless.daemon.control.edges import (
    AgentAnswers,
    Apart,
    Connected,
    Forward,
    Input,
    Meet,
    NodeIsDark,
    NodeLost,
    NotSaved,
    OrderFrom,
    Output,
    PeerDown,
    PeerUp,
    Pulsing,
    Report,
    Said,
    Saved,
    Suspended,
    Tell,
    Tick,
    ToAgent,
    Witnessed,
    Write,
)
from ckptless.daemon.control.elector import Elector
from ckptless.daemon.control.faults import NodeView
from ckptless.daemon.control.knowledge import NOBODY
from ckptless.daemon.control.protection import FEW_NODES as FEW
from ckptless.daemon.control.sources import once

REPORT_INTERVAL_S = 1.0
# Of so many nodes' reports that only tell of new steps the leader hears in a second, and writes rows.
NODES_A_SECOND = 256


@dataclass
class Follower(Elector):
    """Hears everything, and obeys whoever leads."""

    _obeyed: type[m.Order] | None = None
    # Nodes of which rows are to be written, the oldest news first.
    _news: dict[int, None] = field(default_factory=dict)
    # Lost nodes of which the story tells that they are heard again.
    _returned: set[int] = field(default_factory=set)
    # Since when nodes are dark of which the cluster's manager does not know yet that they stay so.
    _dark: dict[int, float] = field(default_factory=dict)
    # What the leader was last told of this node's agent, but for its steps; and in which turn.
    _told: m.AgentState | None = None
    _told_in: int = 0
    # Of each node, what was last written of what it holds.
    _written: dict[int, m.Copies] = field(default_factory=dict)
    # The job's row while there is no generation, and when it was looked at last.
    _row: JobRecord | None = None
    _row_at: float = 0.0

    def handle(self, event: Input, now: float) -> list[Output]:
        """One input in, all outputs out."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Input], now: float) -> list[Output]:
        """What has come at one time; what follows from it is looked at once."""
        if not self._since:
            self._since = self._moved = self._started = self._led_at = now
        for event in events:
            self._take(event, now)
        self._follow(now)
        self._support_late(now)
        self._hold_lease(now)
        if self._lease.held:
            self._campaign_if_due(now)
            self._drive(now)
        self._end_by_itself(now)
        self.agreement.repeat(now)
        self._follow(now)
        self._tell_of_forming(now)
        out = self._out.copy()
        self._out.clear()
        return out

    def _take(self, event: Input, now: float) -> None:  # noqa: C901, PLR0912  # a line for each kind of input
        match event:
            case Report():
                self._on_report(event, now)
            case Connected():
                self._out.append(Meet(event.node, self.short_standing, self._own_reports(short=False)))
            case PeerUp():
                self._on_peer_up(event, now)
            case PeerDown():
                self.reachable.discard(event.node)
                self.answering.discard(event.node)
            case AgentAnswers():
                # Of a lost node it is an answer to a question of before.
                answers = event.answers and self.nodes[event.node].lost is None
                (self.answering.add if answers else self.answering.discard)(event.node)
            case Pulsing():
                self.pulsing = event.nodes
            case Apart():
                self.apart = event.nodes
                if self.leader not in (NOBODY, self.me):
                    self._out.append(Meet(self.leader, self.short_standing, ()))
            case NodeLost():
                self._lose(event)
            case OrderFrom():
                self._on_order(event, now)
            case Said():
                self._on_said(event, now)
            case Witnessed():
                self._witnessed(event, now)
            case Saved() | NotSaved():
                self._on_disk(event, now)
            case Suspended():
                self._since = min(now, self._since + event.seconds)
                self._moved = min(now, self._moved + event.seconds)
                self._led_at = min(now, self._led_at + event.seconds)
            case Tick():
                self._periodic(now)

    def _on_disk(self, event: Saved | NotSaved, now: float) -> None:
        """The disk takes votes no more, or again: the others hear of it, and do without this vote."""
        before = self.agreement.able
        if isinstance(event, NotSaved):
            self.agreement.not_saved(event.reason, now)
            if before:
                self._note(now, "error", VOTE_LOST, f"node-{self.me} cannot vote: {event.reason}")
        else:
            self.agreement.saved()
            if not before and self.agreement.able:
                self._note(now, "info", VOTE_AGAIN, f"node-{self.me} can vote again: its disk takes votes")
        if self.agreement.able != before:
            (self.unable.discard if self.agreement.able else self.unable.add)(self.me)
            self._out.append(Meet(None, self.short_standing, ()))

    def _on_report(self, report: Report, now: float) -> None:
        view = self.nodes[report.node]
        self._touched.add(report.node)
        message = report.message
        if isinstance(message, m.AgentHello | m.Introduction):
            self._on_hello(view, message, now)
        elif isinstance(message, m.AgentState):
            if not self._on_state(view, message, now):
                return
        elif isinstance(message, m.Cancel):
            self._cancelled = message
        elif report.node == self.me:
            self._note(now, message.level, message.kind, message.text, message.generation)
        if report.node == self.me and self.leader not in (NOBODY, self.me):
            self._pass_on(report, now)

    def _on_state(self, view: NodeView, state: m.AgentState, now: float) -> bool:
        """Take what an agent tells of itself; False where it is older than what is known."""
        if view.take_copies(state, now):
            self._news[view.node] = None
        if view.state is not None and state.seq <= view.state.seq:
            return False
        if state.holdings is not None:
            state = structs.replace(state, holdings=once(state.holdings, self._held))
        view.state, view.told_s = state, now
        self._news[view.node] = None
        if view.node == self.me:
            newest = max((slot.step or 0 for slot in state.slots), default=0)
            self._stepped = self._stepped if newest == self._stepped[0] else (newest, now)
            self._tend()
            if view.lost is not None and self.outcome is None:
                # It has missed the word, and may hear the others: it would run on.
                self._out.append(ToAgent(self._end_of_lost(view.lost, view.lost_source)))
        return True

    def _pass_on(self, report: Report, now: float) -> None:
        message = report.message
        if isinstance(message, m.AgentHello):
            hello = m.Introduction(info=message.info, pid=message.pid, brought=message.brought)
            report = Report(self.me, hello)
        elif isinstance(message, m.AgentState) and len(self.nodes) > FEW:
            # What is held changes with every step: one ear hears that of many when it is reminded. That of
            # steps alone each tells in its turn; the leader learns from any of them how far the job is.
            told, turn = _but_for_steps(message), self._turn(now)
            if told == self._told and turn == self._told_in:
                return
            self._told, self._told_in = told, turn
            report = Report(self.me, structs.replace(message, copies=None))
        self._out.append(Forward(self.leader, report))

    def _turn(self, now: float) -> int:
        """A number that is another one each time that it is this node's turn to tell of its steps."""
        count = len(self.nodes)
        return int(now * NODES_A_SECOND / count + self.me / count)

    def _on_hello(self, view: NodeView, hello: m.AgentHello | m.Introduction, now: float) -> None:
        if isinstance(hello, m.AgentHello):
            self.spec = self.spec or hello.spec
        if view.hello is not None:
            return
        view.hello = hello
        if view.node == self.me:
            self._note(now, "info", "agent-up", f"{hello.info.name}: agent {hello.pid} is up")

    def _tend(self) -> None:
        """Give the own agent what it missed while its daemon, or a link, was away."""
        state, assigned = self.nodes[self.me].state, self.assignment
        if state is None:
            return
        if self.outcome is not None:
            self._out.append(ToAgent(m.End(outcome=self.outcome)))
        elif assigned is not None and (state.assigned is None or state.assigned < assigned.generation):
            self._out.append(ToAgent(m.Assign(assignment=assigned)))

    def _on_peer_up(self, event: PeerUp, now: float) -> None:
        if event.direct:
            self.reachable.add(event.node)
        if self.leads and event.node in self.losses and event.node not in self._returned:
            self._returned.add(event.node)
            reason = self.losses[event.node].reason
            self._heard_again(event.node, now)
            text = f"node-{event.node} is heard again; lost before ({reason}), it gets no rank of this job"
            self._note(now, "warning", "node-returned", text)
        theirs = event.standing
        (self.unable.discard if theirs.able else self.unable.add)(event.node)
        self._apart.say(event.node, theirs.apart, now)
        self._hear_of_dead(event.node, set(theirs.dead))
        if self.has_a_say(event.node):
            for node, reason, source in theirs.lost:
                self._lose(NodeLost(node, reason, 0.0, source=source))
        if theirs.newest < self.known.index:
            self._out.append(Tell(event.node, Decided(decree=self.known)))
        if theirs.known is not None:
            self.agreement.learn(theirs.known)
        elif theirs.newest > self.known.index:
            # It answers with what this one lacks.
            self._out.append(Meet(event.node, self.short_standing, ()))
        self.agreement.beware(event.node, theirs.promised)
        self._follow(now)
        self._settle_leader(event.node, theirs, now)

    def _heard_again(self, node: int, now: float) -> None:
        """A node that was dark lives: what runs there runs on, and nothing new is begun there."""
        since = self._dark.pop(node, None)
        if self.losses[node].dark and node not in self.agreement.dead:
            away = f" for {now - since:.0f} s" if since is not None else ""
            text = f"nothing on it answered{away}, and it lives: see its cable, its port and its load"
            self._out.append(NodeIsDark(node, text, "back"))

    def _on_order(self, event: OrderFrom, now: float) -> None:
        reign = Ballot(number=event.term, node=event.node)
        if reign < self._reign or self.outcome is not None:
            name = type(event.order).__name__
            text = (
                f"{name} of node-{event.node}, term {event.term}; node-{self.leader} leads term {self.term}"
            )
            self._note(now, "warning", "order-refused", text)
            self._out.append(Meet(event.node, self.standing, ()))
            return
        before = self.leader
        self._obey_leader(reign)
        if self.leader != before:
            self._introduce()
        self._obey(event.order, now)

    def _obey(self, order: m.Order, now: float) -> None:
        """What a leader's order means for this node: know it, and hand it to the agent."""
        if isinstance(order, m.Assign | m.End):
            raise TypeError(f"{type(order).__name__} is agreed on, not ordered")
        if order.generation != self._generation:
            # Early: what it speaks of is not known here yet, and the leader will repeat it. Or late.
            if order.generation < self._generation:
                text = f"{type(order).__name__} of generation {order.generation}; this is {self._generation}"
                self._note(now, "info", "order-refused", text)
            return
        if type(order) is self._obeyed and self.leader not in (NOBODY, self.me):
            # Said again: what this node has reported since may be what the leader waits for.
            self._out.extend(Forward(self.leader, report) for report in self._own_reports())
        self._obeyed = type(order)
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

    @property
    def _remind_s(self) -> float:
        return max(1.0, len(self.nodes) / FEW)

    def _remind(self) -> None:
        """Say all again to whoever leads, or will: something may have been lost on the way."""
        living = [node for node in self.reachable if self.nodes[node].lost is None and node != self.me]
        # Whoever is there may know how it ended, where the leader has died over it.
        ear = self.leader if self._hears_leader else min(living, default=self.me)
        if ear != self.me and self.stage != "ended":
            self._out.append(Meet(ear, self.short_standing, self._own_reports()))

    def _periodic(self, now: float) -> None:
        if not self._lease.held:
            self._ask_witness(now)
        # One ear hears all of them: many do it seldom.
        if self.spec is not None and now - self._reminded >= self._remind_s:
            self._reminded = now
            self._remind()
        if self.spec is not None and now - self._reported >= REPORT_INTERVAL_S:
            self._reported = now
            self._tend()
            self._write_snapshot(self.spec.job, now)

    def _decided_end(self, outcome: m.Outcome, now: float) -> None:
        """Write down what this daemon's node had at last: the next snapshot would come too late."""
        if self.spec is not None:
            self._write_snapshot(self.spec.job, now)

    def _tell_of_forming(self, now: float) -> None:
        """Until there is a generation, of which its leader tells, each daemon has a row of the job's own.

        What it has forgotten of a job it does not take for the beginning.
        """
        if self.assignment is not None or self.spec is None or not self.may_vote:
            return
        outcome, loss = self.outcome, self.losses.get(self.me)
        if outcome is None and loss is not None and loss.source == "lease":
            outcome = m.Outcome(state="failed", exit_code=4, reason=loss.reason, why="no-quorum")
        if outcome is None and self._row is not None and now - self._row_at < REPORT_INTERVAL_S:
            return
        self._row_at = now
        if outcome is None:
            row = story.forming(self.spec, self._started, self._waits_for)
        elif self._row is None or self._row.ended_s is None:
            row = story.job(self.spec, outcome.state, self._started, outcome, now)
        else:
            return
        if row != self._row:
            self._row = row
            self._out.append(Write((row,), share=False))

    @property
    def _waits_for(self) -> list[int]:
        """Before the first generation: nodes whose agents are not up, as far as this daemon knows."""
        there = set() if self.leads else self.reachable | self.pulsing
        views = sorted(self.nodes.items())
        return [n for n, view in views if view.hello is None and view.lost is None and n not in there]

    def _write_snapshot(self, job: str, now: float) -> None:
        self._out.append(Write(tuple(self._snapshot(job, now)), share=False))

    def _snapshot(self, job: str, now: float) -> list[Record]:
        """The nodes as this daemon sees them; of many its own, and where it leads some with news."""
        views: Mapping[int, NodeView] = self.nodes
        if len(views) > FEW:
            news = [*self._news][:NODES_A_SECOND] if self.leads else []
            views = {node: self.nodes[node] for node in {self.me, *news}}
        if self.leads:
            self._news = {node: None for node in self._news if node not in views}
        else:
            self._news.clear()
        # A daemon that ends with its job is not away.
        there = self.reachable if self.known.outcome is None else set(self.nodes)
        rows = story.snapshot((job, self.me), views, self.assignment, there, now)
        # What is held elsewhere only the leader is told of all the time.
        for node in sorted(views) if self.leads else (self.me,):
            held = views[node].copies
            if held is not None and held[0] != self._written.get(node):
                self._written[node] = held[0]
                rows.append(story.holding(job, node, held))
        return rows


def _but_for_steps(state: m.AgentState) -> m.AgentState:
    """What of an agent's state the leader has to hear of at once: all but how far ranks are in training."""
    if state.frozen is not None:
        return state
    blank = {"step": None, "loss": None, "every": None, "share": None, "age_s": 0.0}
    slots = tuple(structs.replace(slot, **blank) for slot in state.slots)
    return structs.replace(state, seq=0, slots=slots, copies=None)
