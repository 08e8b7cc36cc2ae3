"""Pure: what every daemon of a job does for its own agent, and by the leader's orders.

An order of an older ballot, or of another generation, is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs

from ckptless.daemon.ckptlessd.planning import event_lines
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.planning.sources import Same, once
from ckptless.daemon.ckptlessd.recovery.election import Election
from ckptless.daemon.ckptlessd.recovery.events import (
    CutNetwork,
    DrillAsked,
    Forward,
    OrderFrom,
    Report,
    Stage,
    ToAgent,
)
from ckptless.daemon.ckptlessd.recovery.job_state import JobState, introduction
from ckptless.daemon.ckptlessd.recovery.snapshots import NODES_A_SECOND, REPORT_INTERVAL_S, Snapshots
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import Ballot
from ckptless.daemon.protocol.records import DRILL
from ckptless.daemon.replication.protection import FEW_NODES as FEW

# Where an order takes a job, for whoever obeys it.
STAGES: Mapping[type[m.Order], Stage] = {
    m.Stop: "stopping",
    m.Go: "restoring",
    m.Running: "running",
    m.Release: "releasing",
}


@dataclass
class Following:
    """Takes agents' reports, passes those of the own one on to the leader, and hands orders to it."""

    job: JobState
    rows: Snapshots
    election: Election
    _obeyed: type[m.Order] | None = None
    _tended: float = 0.0
    _reminded: float = 0.0
    # What the leader was last told of this node's agent, but for its steps; and in which turn.
    _told: m.AgentState | None = None
    _told_in: int = 0
    # What frozen agents have told that they hold, of this recovery.
    _held: Same = field(default_factory=dict)

    def begin_generation(self, assignment: m.Assignment, now: float) -> None:
        """There is a new generation."""
        self.job.generation = assignment.generation
        self.job.enter("joining", now)
        self.job.out.append(ToAgent(m.Assign(assignment=assignment)))
        self._held.clear()

    # ------------------------------------------------------------------------------------- reports

    def take(self, report: Report, now: float) -> None:
        """Take a message of an agent, of this node or of another one."""
        job, message = self.job, report.message
        view = job.nodes[report.node]
        job.touched.add(report.node)
        match message:
            case m.AgentHello() | m.Introduction():
                self._take_hello(view, message, now)
            case m.AgentState():
                self._take_state(view, message, now)
            case m.Cancel():
                job.cancelled = message
            case m.Resize():
                if job.resize is None or message.wish.at_s > job.resize.wish.at_s:
                    job.resize = message
            case _ if report.node == job.me:
                job.tell(Line(message.level, message.kind, message.text), now, message.generation)
        if report.node == job.me and job.follows:
            self._pass_on(message, now)

    def _take_hello(self, view: NodeView, hello: m.AgentHello | m.Introduction, now: float) -> None:
        if isinstance(hello, m.AgentHello):
            self.job.spec = self.job.spec or hello.spec
        if view.hello is not None:
            return
        view.hello = hello
        if view.node == self.job.me:
            self.job.note(now, "info", "agent-up", f"{hello.info.name}: agent {hello.pid} is up")

    def _take_state(self, view: NodeView, state: m.AgentState, now: float) -> None:
        """Take what an agent tells of itself, unless it is older than what is known."""
        if view.take_copies(state, now):
            self.rows.has_news(view.node)
        if view.state is not None and state.seq <= view.state.seq:
            return
        if state.holdings is not None:
            state = structs.replace(state, holdings=once(state.holdings, self._held))
        view.state, view.told_s = state, now
        self.rows.has_news(view.node)
        if view.node == self.job.me:
            newest = max((slot.step or 0 for slot in state.slots), default=0)
            if newest != self.job.stepped[0]:
                self.job.stepped = newest, now
            self._tend()
            # It has missed the word, and may hear the others: it would run on.
            self.job.end_lost_agent()

    def _pass_on(self, message: m.FromAgent | m.Introduction, now: float) -> None:
        if isinstance(message, m.AgentHello):
            message = introduction(message)
        elif isinstance(message, m.AgentState) and len(self.job.nodes) > FEW:
            # What is held changes with every step: one ear hears that of many when it is reminded. That of
            # steps alone each tells in its turn; the leader learns from any of them how far the job is.
            told, turn = _but_for_steps(message), self._turn(now)
            if told == self._told and turn == self._told_in:
                return
            self._told, self._told_in = told, turn
            message = structs.replace(message, copies=None)
        self.job.out.append(Forward(self.job.leader, Report(self.job.me, message)))

    def _turn(self, now: float) -> int:
        """A number that is another one each time that it is this node's turn to tell of its steps."""
        count = len(self.job.nodes)
        return int(now * NODES_A_SECOND / count + self.job.me / count)

    def tell_leader(self) -> None:
        """Say all again that the own agent has said."""
        self.job.out.extend(Forward(self.job.leader, report) for report in self.job.own_reports())

    def introduce(self) -> None:
        """Tell a new leader all: first where this daemon stands, so that it does not plan without it."""
        self.job.meet(self.job.leader)
        self.tell_leader()

    def drill_asked(self, event: DrillAsked, now: float) -> None:
        """A drill waits from now on, until the leader has it done."""
        job, here = self.job, event.node == self.job.me
        job.drills.ask(event.drill, now + event.left_s, here=here)
        if here:
            job.note(now, "info", DRILL, event_lines.drill_text(event.drill))

    # -------------------------------------------------------------------------------------- orders

    def order(self, event: OrderFrom, now: float) -> None:
        """Obey whoever leads, or refuse."""
        job, reign = self.job, Ballot(number=event.term, node=event.node)
        if reign < job.reign or job.outcome is not None:
            name = type(event.order).__name__
            text = f"{name} of node-{event.node}, term {event.term}; node-{job.leader} leads term {job.term}"
            job.note(now, "warning", "order-refused", text)
            job.meet(event.node)
            return
        before = job.leader
        self.election.follow(reign)
        if job.leader != before:
            self.introduce()
        self.obey(event.order, now)

    def obey(self, order: m.Order, now: float) -> None:
        """Take a leader's order: know it, and hand it to the agent."""
        job, kind = self.job, type(order)
        if isinstance(order, m.Assign | m.End):
            raise TypeError(f"{kind.__name__} is agreed on, not ordered")
        if order.generation > job.generation:
            return  # what it speaks of is not known here yet, and the leader will repeat it
        if order.generation < job.generation:
            text = f"{kind.__name__} of generation {order.generation}; this is {job.generation}"
            job.note(now, "info", "order-refused", text)
            return
        if isinstance(order, m.Strike):
            # A daemon that has just started may not know the job's limits: its agent has to tell.
            job.drills.strike(order, now, job.spec.limits.stall_s if job.spec is not None else 0.0)
            if order.drill.kind != "cut-node":
                job.out.append(ToAgent(order))
            elif order.place.node == job.me:
                job.out.append(CutNetwork(order.drill.for_s))
            return
        if isinstance(order, m.Prepare):
            job.out.append(ToAgent(order))
            return
        if kind is self._obeyed and job.follows:
            # Said again: what this node has reported since may be what the leader waits for.
            self.tell_leader()
        self._obeyed = kind
        job.enter(STAGES[kind], now)
        if not isinstance(order, m.Running):
            job.out.append(ToAgent(order))

    # ------------------------------------------------------------------------------- again and again

    def tick(self, now: float) -> None:
        """Time has passed; nothing is to do before an agent has said what the job is."""
        if self.job.spec is None:
            return
        if (overdue := self.job.drills.expire(now)) is not None:
            self.job.note(now, "warning", DRILL, f"not done in time: {event_lines.drill_text(overdue)}")
        if now - self._reminded >= self.job.remind_s:
            self._reminded = now
            self._remind()
        if now - self._tended >= REPORT_INTERVAL_S:
            self._tended = now
            self._tend()
            self.rows.write_snapshot(now)

    def _remind(self) -> None:
        """Say all again to whoever leads, or will: something may have been lost on the way."""
        job = self.job
        living = [node for node in job.reachable if job.nodes[node].lost is None and node != job.me]
        # Whoever is there may know how it ended, where the leader has died over it.
        ear = job.leader if job.hears_leader else min(living, default=job.me)
        if ear != job.me and job.stage != "ended":
            job.meet(ear, reports=True)

    def _tend(self) -> None:
        """Give the own agent what it missed while its daemon, or a link, was away."""
        job = self.job
        state, assigned = job.nodes[job.me].state, job.assignment
        if state is None:
            return
        if job.outcome is not None:
            job.out.append(ToAgent(m.End(outcome=job.outcome)))
        elif assigned is not None and (state.assigned is None or state.assigned < assigned.generation):
            job.out.append(ToAgent(m.Assign(assignment=assigned)))


def _but_for_steps(state: m.AgentState) -> m.AgentState:
    """Return the part of an agent's state that the leader has to hear of at once: all but steps."""
    if state.frozen is not None:
        return state
    blank = {"step": None, "loss": None, "every": None, "share": None, "spent": None, "age_s": 0.0}
    slots = tuple(structs.replace(slot, **blank) for slot in state.slots)
    return structs.replace(state, seq=0, slots=slots, copies=None)
