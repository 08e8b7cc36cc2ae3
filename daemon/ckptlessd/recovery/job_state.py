"""Pure: the state of one job in one daemon, which the parts of its control plane share.

Each part changes what its own contract says, and puts what is to be done into `out`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.consensus.agreement import Agreement
from ckptless.daemon.ckptlessd.consensus.lease import Lease
from ckptless.daemon.ckptlessd.consensus.quorum import is_quorum
from ckptless.daemon.ckptlessd.planning.drills import Drills
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.planning.faults import NodeView
from ckptless.daemon.ckptlessd.recovery import ledger_rows
from ckptless.daemon.ckptlessd.recovery.events import (
    Leave,
    Meet,
    NodeLost,
    Output,
    Report,
    Stage,
    Standing,
    ToAgent,
    Write,
)
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Ballot, Decree
from ckptless.daemon.protocol.records import Level, Record
from ckptless.daemon.replication.protection import FEW_NODES

NOBODY = -1


@dataclass
class JobState:
    """The state of a job on the daemon of node `me`; `session` makes ids of events unique. Times in seconds.

    Reports are whole states, so whoever takes over knows everything after one report of each node.

    `since`: when it came to this stage; `started`: to the first one. `moved`: when a rank of the job was last
    known to make a step, `stepped`: the newest step of this node's ranks, and when it was heard of. `led`:
    when there was last a leader whose proposals are agreed on. `generation` and `reign` are the newest that
    were followed; by `reign` its node leads, or `leader` is nobody. `reachable`, `answering` and `heartbeats`
    are nodes whose daemons are connected, whose agents answer, and of whose daemons others hear. `unable`:
    nodes whose daemon cannot vote. `stopped`: nodes whose agent and ranks are all stopped by a signal.
    `apart`: nodes that this daemon cannot reach itself. `unwell`, `drained`,
    `asked`: nodes that the job is to leave, by their own daemons' word, Slurm's, and a person's; `slow`: by
    the leader's, of
    ranks that have held up the others for `move_stragglers` windows (0: never); `held_up_by`: all ranks that
    are named for it. `touched`: nodes with news since the leader looked last.
    """

    me: int
    session: str
    nodes: Mapping[int, NodeView]
    agreement: Agreement
    out: list[Output]
    spec: m.JobSpec | None = None
    stage: Stage = "forming"
    since: float = 0.0
    started: float = 0.0
    moved: float = 0.0
    led: float = 0.0
    stepped: tuple[int, float] = (0, 0.0)
    generation: int = 0
    reign: Ballot = NO_BALLOT
    leader: int = NOBODY
    reachable: set[int] = field(default_factory=set)
    answering: set[int] = field(default_factory=set)
    heartbeats: frozenset[int] = frozenset()
    losses: dict[int, NodeLost] = field(default_factory=dict)
    unable: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    apart: frozenset[int] = frozenset()
    unwell: dict[int, Leave] = field(default_factory=dict)
    drained: dict[int, Leave] = field(default_factory=dict)
    asked: dict[int, Leave] = field(default_factory=dict)
    slow: dict[int, Leave] = field(default_factory=dict)
    move_stragglers: int = 0
    held_up_by: frozenset[int] = frozenset()
    touched: set[int] = field(default_factory=set)
    lease: Lease = field(default_factory=Lease)
    drills: Drills = field(default_factory=Drills)
    cancelled: m.Cancel | None = None
    # The newest word on how many nodes the job is to have.
    resize: m.Resize | None = None
    # How it has ended for this node alone, which nobody could be asked about.
    ended_here: m.Outcome | None = None
    _events: int = 0

    @property
    def known(self) -> Decree:
        """The newest decree."""
        return self.agreement.known

    @property
    def assignment(self) -> m.Assignment | None:
        """The generation that there is, as agreed."""
        return self.known.assignment

    @property
    def outcome(self) -> m.Outcome | None:
        """The job's end: as agreed, or for this node alone."""
        return self.known.outcome or self.ended_here

    @property
    def term(self) -> int:
        """The number of the ballot by which somebody leads, or led last."""
        return self.reign.number

    @property
    def wanted(self) -> m.Wish:
        """The newest wish for another size: one that this node has heard, or one that is followed."""
        said, agreed = self.resize, self.assignment
        words = [said.wish] if said is not None else []
        words += [agreed.wanted] if agreed is not None else []
        return max(words, key=lambda word: word.at_s, default=m.Wish())

    @property
    def leads(self) -> bool:
        """Whether this daemon gives the orders. One whose own node is lost has resigned."""
        return self.agreement.elected

    @property
    def follows(self) -> bool:
        """Whether another daemon is known to lead."""
        return self.leader not in (NOBODY, self.me)

    @property
    def hears_leader(self) -> bool:
        """Whether it is there, by whatever way: a heartbeat is newer than the end of its connection."""
        heard = self.leader in self.reachable or self.leader in self.heartbeats
        return self.follows and heard and self.nodes[self.leader].lost is None

    @property
    def heard_voters(self) -> set[int]:
        """Return the voters whose daemon, or agent, is there, by whatever way that is known; and this one."""
        heard = {self.me, *self.reachable, *self.answering, *self.heartbeats}
        return heard.intersection(self.known.voters)

    @property
    def decides(self) -> bool:
        """Whether it hears enough of the others to say that one of them is lost."""
        return self.lease.held

    def is_quorum(self, nodes: set[int]) -> bool:
        """Whether these and this one may speak for all."""
        return is_quorum(self.known.voters, nodes | {self.me}, self.agreement.dead)

    def has_a_say(self, node: int) -> bool:
        """Whether it may say that another is lost. Who is out of the generation may have been cut off."""
        if self.nodes[node].lost is not None:
            return False
        return self.assignment is None or node in self.assignment.members

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether most nodes' processes are known not to be stopped: then nobody has suspended the job.

        A node that is not connected is not known of, and one that is lost may be stopped or not.
        """
        members = self.assignment.members if self.assignment is not None else frozenset(self.nodes)
        living = members - self.losses.keys()
        return 2 * len((self.reachable & living) - self.stopped - {self.me}) > len(living)

    def note_stopped(self, node: int, stopped: bool) -> None:
        """Note whether all that a node has of the job is stopped."""
        (self.stopped.add if stopped else self.stopped.discard)(node)

    def still_s(self, now: float) -> float:
        """Return for how long this node's ranks have made no step; 0 where none is due, or there are none."""
        here = self.assignment.ranks_on(self.me) if self.assignment is not None else ()
        due = here and self.stage in ("joining", "restoring", "running")
        return now - max(self.since, self.stepped[1]) if due else 0.0

    @property
    def remind_s(self) -> float:
        """The pause until all is said again to the leader: it hears all of them, so many do it seldom."""
        return max(1.0, len(self.nodes) / FEW_NODES)

    def own_reports(self, *, short: bool = True) -> tuple[Report, ...]:
        """All that this node's agent has said, as it is passed on; `short`: without the job's options."""
        mine = self.nodes[self.me]
        hello = mine.hello
        if short and hello is not None:
            hello = introduction(hello)
        # A user's word is said to each new leader: the one that heard it may be gone.
        parts = (hello, mine.state, self.cancelled, self.resize)
        return tuple(Report(self.me, part) for part in parts if part is not None)

    @property
    def standing(self) -> Standing:
        """The word for other daemons; whoever lacks the newest decree will ask for it."""
        lost = tuple((node, loss.reason, loss.source) for node, loss in self.losses.items())
        return Standing(
            term=self.term,
            leader=self.leader,
            stage=self.stage,
            index=self.known.index,
            promised=self.agreement.durable.promised,
            lost=lost,
            able=self.agreement.able,
            apart=tuple(sorted(self.apart)),
            dead=tuple(sorted(self.agreement.dead)),
            unwell=self.unwell.get(self.me),
            asked=tuple(one for one in sorted(self.asked.items()) if one[0] not in self.losses),
            stopped=self.me in self.stopped,
        )

    # ------------------------------------------------------------------------------------- changes

    def enter(self, stage: Stage, now: float) -> None:
        """Go on to a stage; from the end there is no way."""
        if stage != self.stage and self.stage != "ended":
            self.stage, self.since = stage, now

    def lose(self, loss: NodeLost) -> None:
        """Take a node for lost. Whoever says it first is believed; what others say of it is no news."""
        view = self.nodes[loss.node]
        # With the job's end its agents and, in local mode, its daemons go: nothing is lost by that.
        if view.lost is not None or self.known.outcome is not None:
            return
        view.lost, view.lost_age_s, view.lost_source = loss.reason, loss.age_s, loss.source
        self.losses[loss.node] = loss
        self.touched.add(loss.node)
        self.answering.discard(loss.node)
        if loss.node == self.me:
            self.agreement.resign()
            self.end_lost_agent()

    def end_lost_agent(self) -> None:
        """Tell this node's agent that the others go on without this node, whatever still runs on it."""
        loss = self.losses.get(self.me)
        if loss is None or self.outcome is not None:
            return
        text = f"node-{self.me} counts as lost: {loss.reason}"
        why: m.Why = "no-quorum" if loss.source == "lease" else "node-lost"
        outcome = m.Outcome(state="failed", exit_code=4, reason=text, why=why)
        self.out.append(ToAgent(m.End(outcome=outcome, here_only=True)))

    # ------------------------------------------------------------------------------ what others hear

    def meet(self, node: int | None = None, *, reports: bool = False) -> None:
        """Tell a daemon (all, without one) where this one stands, and what its agent has said."""
        self.out.append(Meet(node, self.standing, self.own_reports() if reports else ()))

    def share(self, record: Record) -> None:
        """Write a row for all ledgers."""
        self.out.append(Write((record,), share=True))

    def note(self, now: float, level: Level, kind: str, text: str) -> None:
        """Write an event of this generation."""
        self.tell(Line(level, kind, text), now)

    def tell(self, line: Line, now: float, generation: int | None = None) -> None:
        """Write an event, of this generation or of another one."""
        self._events += 1
        if generation is None and self.assignment is not None:
            generation = self.assignment.generation
        event_id = f"{self.me}.{self.session}.{self._events}"
        job = self.spec.job if self.spec is not None else ""
        self.share(ledger_rows.event(event_id, job, self.me, line, (now, generation)))

    def announce(self, line: Line, now: float) -> None:
        """Write an event, also into the job's own output: what its user has to know."""
        self.tell(line, now)
        self.out.append(ToAgent(m.Announce(text=line.text[: m.MAX_ANNOUNCED])))


def introduction(hello: m.AgentHello | m.Introduction) -> m.Introduction:
    """Return what other daemons need to know of an agent that is up."""
    return m.Introduction(info=hello.info, pid=hello.pid, brought=hello.brought)


def cancelled_by(cancel: m.Cancel) -> m.Outcome:
    """Return the end of a job that its user, or Slurm, has cancelled."""
    return m.Outcome(state="stopped", exit_code=cancel.exit_code, reason=cancel.reason, why="cancelled")
