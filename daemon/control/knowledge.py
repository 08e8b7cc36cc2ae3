"""Pure: what a daemon knows of one job, and how it tells it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.records import FaultSource, Record
from ckptless.daemon.control import story
from ckptless.daemon.control.agreement import Agreement
from ckptless.daemon.control.decree import NO_BALLOT, Ballot, Decree, Durable, first_decree, is_quorum
from ckptless.daemon.control.edges import NodeLost, Output, Report, Said, Stage, Standing, ToAgent, Write
from ckptless.daemon.control.faults import FaultLog, NodeView
from ckptless.daemon.control.lease import Lease
from ckptless.daemon.control.pairs import Apart
from ckptless.daemon.control.sources import Same
from ckptless.daemon.control.telling import Line
from ckptless.daemon.control.timeline import Timeline

NOBODY = -1


@dataclass
class Knowledge:
    """State of one job in the daemon of node `me`; `session` makes ids of events unique.

    Reports are whole states, so whoever takes over knows everything after one report of each node. `durable`
    is what an earlier life of this daemon had on the disk; see `Agreement` for `may_vote`.
    """

    me: int
    session: str
    nodes: Mapping[int, NodeView]
    durable: Durable | None = None
    may_vote: bool = True
    spec: m.JobSpec | None = None
    stage: Stage = "forming"
    leader: int = NOBODY
    reachable: set[int] = field(default_factory=set)
    answering: set[int] = field(default_factory=set)
    pulsing: frozenset[int] = frozenset()
    losses: dict[int, NodeLost] = field(default_factory=dict)
    # Nodes whose daemon has said that it cannot vote.
    unable: set[int] = field(default_factory=set)
    # Nodes that this daemon cannot reach itself, and what others have said of theirs.
    apart: frozenset[int] = frozenset()
    _apart: Apart = field(default_factory=Apart)
    progress: int = 0
    _cancelled: m.Cancel | None = None
    _cancelled_at: float = 0.0
    _ended_here: m.Outcome | None = None
    _log: FaultLog = field(default_factory=FaultLog)
    _timeline: Timeline | None = None
    _since: float = 0.0
    _moved: float = 0.0
    # The newest step of this node's ranks, and since when.
    _stepped: tuple[int, float] = (0, 0.0)
    _reported: float = 0.0
    _reminded: float = 0.0
    _started: float = 0.0
    # The newest reign that this daemon knows of, over or not; whether it was its own, with no other since.
    _reign: Ballot = NO_BALLOT
    _continues: bool = False
    _led: bool = False
    # Since when it hears no leader, and its own tries.
    _alone: float | None = None
    # When a leader was there last.
    _led_at: float = 0.0
    _tried: bool = False
    _campaigns: int = 0
    # Who has asked for this daemon's support while it heard its leader.
    _refused: dict[int, Said] = field(default_factory=dict)
    _followed: int = 0
    _generation: int = 0
    # What frozen agents have told that they hold, of this recovery.
    _held: Same = field(default_factory=dict)
    _touched: set[int] = field(default_factory=set)
    _lease: Lease = field(default_factory=Lease)
    _renewed: float = 0.0
    _events: int = 0
    _out: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reachable = {self.me}
        if not self.may_vote:
            self.unable.add(self.me)
        durable = self.durable or Durable(
            promised=NO_BALLOT, vote=None, known=first_decree(tuple(self.nodes))
        )
        self.agreement = Agreement(self.me, durable, self.may_vote, out=self._out)

    @property
    def known(self) -> Decree:
        """The newest decree."""
        return self.agreement.known

    @property
    def term(self) -> int:
        """The number of the ballot by which somebody leads, or led last."""
        return self._reign.number

    @property
    def assignment(self) -> m.Assignment | None:
        """The generation that there is, as agreed."""
        return self.known.assignment

    @property
    def outcome(self) -> m.Outcome | None:
        """How the job has ended: as agreed, or for this node alone, which nobody could be asked about."""
        return self.known.outcome or self._ended_here

    @property
    def leads(self) -> bool:
        """Whether this daemon gives the orders. One whose own node is lost has resigned."""
        return self.agreement.elected and self.nodes[self.me].lost is None

    @property
    def decides(self) -> bool:
        """Whether it hears enough of the others to say that one of them is lost."""
        return self._lease.held

    def is_quorum(self, nodes: set[int]) -> bool:
        """Whether these and this one may speak for all."""
        return is_quorum(self.known.voters, nodes | {self.me}, self.agreement.dead)

    def has_a_say(self, node: int) -> bool:
        """Whether it may say that another is lost. Who is out of the generation may have been cut off."""
        if self.nodes[node].lost is not None:
            return False
        return self.assignment is None or node in self.assignment.members

    @property
    def standing(self) -> Standing:
        """What to tell a daemon that has just been met."""
        return replace(self.short_standing, known=self.known, index=0)

    @property
    def short_standing(self) -> Standing:
        """What to tell again and again, or to many; whoever lacks the decree will ask for it."""
        promised, lost = self.agreement.durable.promised, self._told_losses
        index, able, apart = self.known.index, self.agreement.able, tuple(sorted(self.apart))
        dead = tuple(sorted(self.agreement.dead))
        return Standing(self.term, self.leader, self.stage, None, promised, lost, index, able, apart, dead)

    @property
    def _told_losses(self) -> tuple[tuple[int, str, FaultSource], ...]:
        return tuple((node, loss.reason, loss.source) for node, loss in self.losses.items())

    @property
    def heard_voters(self) -> set[int]:
        """Those whose daemon, or agent, is there, by whatever way that is known; and this one."""
        sources = (self.reachable, self.answering, self.pulsing)
        return {v for v in self.known.voters if v == self.me or any(v in source for source in sources)}

    def still_s(self, now: float) -> float:
        """How long this node's ranks have made no step; 0 where none is due, or there are none."""
        here = self.assignment.ranks_on(self.me) if self.assignment is not None else ()
        due = here and self.stage in ("joining", "restoring", "running")
        return now - max(self._since, self._stepped[1]) if due else 0.0

    def _own_reports(self, *, short: bool = True) -> tuple[Report, ...]:
        mine = self.nodes[self.me]
        hello: m.AgentHello | m.Introduction | None = mine.hello
        if short and hello is not None:
            hello = m.Introduction(info=hello.info, pid=hello.pid, brought=hello.brought)
        # A user's word is said to each new leader: the one that heard it may be gone.
        parts = (hello, mine.state, self._cancelled)
        return tuple(Report(self.me, part) for part in parts if part is not None)

    def _lose(self, loss: NodeLost) -> None:
        """Whoever says it first is believed; what others say of the same node is no news."""
        view = self.nodes[loss.node]
        # With the job's end its agents and, in local mode, its daemons go: nothing is lost by that.
        if view.lost is not None or self.known.outcome is not None:
            return
        view.lost, view.lost_age_s = loss.reason, loss.age_s
        view.lost_source = loss.source
        self.losses[loss.node] = loss
        self._touched.add(loss.node)
        self.answering.discard(loss.node)
        if loss.node == self.me and self.outcome is None:
            self._out.append(ToAgent(self._end_of_lost(loss.reason, loss.source)))
            self.agreement.resign()

    def _end_of_lost(self, reason: str, source: FaultSource) -> m.End:
        """For this node's agent: the others go on without this node, whatever still runs on it."""
        text = f"node-{self.me} counts as lost: {reason}"
        why: m.Why = "no-quorum" if source == "lease" else "node-lost"
        outcome = m.Outcome(state="failed", exit_code=4, reason=text, why=why)
        return m.End(outcome=outcome, here_only=True)

    def _elected(self, former: int, now: float) -> None:
        """This daemon leads from now on, which it did not before; `former` did."""

    def _decided_generation(self, assignment: m.Assignment, now: float) -> None:
        """There is a new generation."""

    def _decided_end(self, outcome: m.Outcome, now: float) -> None:
        """The job is over."""

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
        self._tell(Line(level, kind, text), now, generation)

    def _tell(self, line: Line, now: float, generation: int | None = None) -> None:
        self._events += 1
        if generation is None and self.assignment is not None:
            generation = self.assignment.generation
        event_id = f"{self.me}.{self.session}.{self._events}"
        job = self.spec.job if self.spec is not None else ""
        event = story.event(event_id, job, self.me, line, (now, generation))
        self._out.append(Write((event,), share=True))

    def _announce(self, line: Line, now: float) -> None:
        """The same, and in the job's own output: what its user has to know."""
        self._tell(line, now)
        self._out.append(ToAgent(m.Announce(text=line.text[: m.MAX_ANNOUNCED])))
