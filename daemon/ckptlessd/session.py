"""Pure: one job in one daemon: its control plane, and what comes of that for peers, agent and ledger.

The daemon's job host (`runtime`) and the simulator run the same `JobSession`, and give it what has happened.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from msgspec import structs

from ckptless.daemon.ckptlessd.membership.watch import Times
from ckptless.daemon.ckptlessd.peering import Links, Peering, Roster
from ckptless.daemon.ckptlessd.planning.faults import NodeViews
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.controller import Controller
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.model import NO_RUN
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Durable, Say
from ckptless.daemon.protocol.records import EventRecord, FaultRecord, Record, RecoveryRecord

logger = logging.getLogger(__name__)

LIFE_BITS = 40
# By so much is a wish newer than the one before it, at least.
NEWER_S = 0.001


class Outlets(Protocol):
    """The way out for a job's outputs, and its clock: the daemon's job host, or a simulator's daemon."""

    @property
    def peer_links(self) -> Links:
        """The links to the job's other daemons."""

    @property
    def times(self) -> Times:
        """The times by which daemons watch each other."""

    def now(self) -> float:
        """Seconds of this daemon's clock, which never jumps."""

    def to_agent(self, order: m.Order | m.Draw | m.GiveBack | m.Announce | m.Renewed) -> None:
        """Hand an order, or words, to this node's agent of the job."""

    def write(self, records: Sequence[Record]) -> None:
        """Queue rows for the ledger."""

    def ended(self, outcome: m.Outcome) -> None:
        """The job is over; said again where an end is agreed on after this node has ended by itself."""

    def node_is_dark(self, node: int, reason: str, state: e.DarkState) -> None:
        """Note that a node does not answer the leader, this daemon, at all any more; see edges.NodeIsDark."""

    def save(self, durable: Durable, then: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Keep it on the disk, in the order of the calls, then call `then`; or `failed`, with the reason."""

    def cut_network(self, for_s: float) -> None:
        """Cut this node off from the network for so long; a drill."""

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See edges.AskWitness; the answer, if there is one, is fed as edges.Witnessed."""

    def explain(self, node: int, cancel: m.Cancel) -> None:
        """Feed it soon, as a report of `node`, without `restarts` and with what Slurm says why."""


@dataclass(frozen=True)
class Memory:
    """The memory of a daemon of a job, from an earlier life; `lost`: why nothing, though it had one.

    `life`, of LIFE_BITS random bits, is this life's alone (by its clock it could not be told from an earlier
    one: clocks are set back). `identity` is the same as long as it remembers, but for a count of what was
    promised, see `next_identity`. `launch` is JobSpec.launch: of another run of the name nothing is known.
    """

    life: int
    identity: str = ""
    durable: Durable | None = None
    lost: str = ""
    launch: str = NO_RUN


# The identity under which votes lie on the disk, and the votes.
Kept: TypeAlias = tuple[str, Durable]


def next_identity(identity: str) -> str:
    """Return the identity of a memory with one promise more. The agent hears of it before any daemon does.

    So what its daemon reads from a damaged disk is known to be old, where the end of it is lost: SQLite takes
    a log whose end is damaged for one that was cut off by a power failure.
    """
    name, _, count = identity.partition(".")
    return f"{name}.{int(count or 0) + 1}"


def is_as_new(kept: str, agents: str) -> bool:
    """Whether what is on the disk, of identity `kept`, has all that the agent has heard of ("": nothing)."""
    (name, _, count), (its_name, _, its_count) = kept.partition("."), agents.partition(".")
    if not agents:
        return True
    numbers = [number or "0" for number in (count, its_count)]
    return name == its_name and all(map(str.isdecimal, numbers)) and int(numbers[0]) >= int(numbers[1])


@dataclass(frozen=True)
class Forgotten:
    """The reason why a daemon may have promised what it does not know any more."""

    why: str


def recall(kept: Kept | None, launch: str, agents: str) -> Kept | Forgotten | None:
    """Return what a daemon goes on from as it meets a job; None where it has promised nothing yet.

    `kept` lies on its disk under the job's name, `agents` is the identity that the job's agent has heard of.
    A number is used again, by Slurm or after a requeue: what is of another launch is none of this job's.
    """
    if kept is not None and not kept[0].startswith(launch):
        kept = None
    if kept is not None and is_as_new(kept[0], agents):
        return kept
    if agents:
        what = "nothing is left of" if kept is None else "its agent knows of something later than"
        return Forgotten(f"{what} what it knew of it")
    return None


class JobSession:
    """The control plane of one job, and its `peering`. Owned by the daemon's event loop."""

    def __init__(self, job: str, roster: Roster, outlets: Outlets, memory: Memory) -> None:
        self.job, self.life, self.now = job, memory.life, outlets.now
        self._outlets = outlets
        self._explaining = False
        self._controller = Controller(
            me=roster.me,
            session=f"{memory.life:x}",
            nodes=NodeViews(roster.nodes, len(roster.founders)),
            durable=memory.durable,
            founders=roster.founders,
            may_vote=not memory.lost,
        )
        # How the job is, for all others to read.
        self.control = self._controller.job
        self.peering = Peering(self, roster, outlets.peer_links, outlets.times)

    def tick(self) -> None:
        """Time has passed."""
        self.feed(e.Tick())
        self.peering.tick()

    def say(self, node: int | None, message: p.Said) -> None:
        """Say it to one daemon, or with None to all others."""
        self.peering.say(node, message)

    def lose(self, loss: e.NodeLost) -> None:
        """A node is lost, of which only this daemon may know; the others hear it from here."""
        if self.control.nodes[loss.node].lost is not None:
            return
        self.feed(loss)
        told = p.Gone(
            job=self.job,
            node=loss.node,
            reason=loss.reason,
            age_s=loss.age_s,
            source=loss.source,
            dark=loss.dark,
        )
        self.say(None, told)

    def leave(self, node: int, leave: e.Leave) -> None:
        """Somebody wants the job to leave a node; whoever leads has it done."""
        self.feed(e.LeaveAsked(node, leave))
        self.say(None, p.LeaveAsked(job=self.job, node=node, leave=leave))

    def lose_agent(self, reason: str, age_s: float) -> None:
        """This node's agent is gone, and the node with it; that may be a drill."""
        me, control = self.control.me, self.control
        drilled = control.drills.ends_agent(me, control.generation)
        self.lose(e.NodeLost(me, reason, age_s, source="drill" if drilled else "agent"))

    def resize(self, wish: m.Wish) -> None:
        """Somebody wants the job to have another number of nodes."""
        # Newer than what is known, also where the clock of the node where that was said is ahead.
        at_s = max(wish.at_s, self.control.wanted.at_s + NEWER_S)
        self.feed(e.Report(self.control.me, m.Resize(wish=structs.replace(wish, at_s=at_s))))

    def drill(self, drill: m.Drill, left_s: float) -> None:
        """Somebody wants a drill; whoever leads has it done."""
        self.feed(e.DrillAsked(self.control.me, drill, left_s))
        self.say(None, p.DrillAsked(job=self.job, drill=drill, left_s=left_s))

    def feed(self, *events: e.Input) -> None:
        """Inputs, and everything that follows from them."""
        before = self._ends
        events = tuple(event for event in events if not self._is_to_be_explained(event))
        for output in self._controller.handle_all(events, self.now()):
            self._carry(output)
        if self._ends != before and self.control.outcome is not None:
            self._outlets.ended(self.control.outcome)

    @property
    def _ends(self) -> tuple[m.Outcome | None, m.Outcome | None]:
        return self.control.outcome, self.control.known.outcome

    def _is_to_be_explained(self, event: e.Input) -> bool:
        """Whether it is a signal whose cause this daemon, as the leader, is to ask for first; once."""
        if not (isinstance(event, e.Report) and isinstance(event.message, m.Cancel)):
            return False
        if event.message.restarts is None or not self.control.leads:
            return False
        if not self._explaining:
            self._explaining = True
            self._outlets.explain(event.node, event.message)
        return True

    def hear(self, node: int, message: p.Said) -> None:
        """Take another daemon's word on this job, over a connection to it."""
        events = self._heard(node, message, direct=True)
        if events:
            self.feed(*events)

    def hear_all(self, said: Sequence[tuple[int, p.Said]]) -> None:
        """Take the words of daemons that there are no connections to: (node, message) of each."""
        events = [event for node, message in said for event in self._heard(node, message, direct=False)]
        if events:
            self.feed(*events)

    def _heard(self, node: int, message: p.Said, *, direct: bool) -> Sequence[e.Input]:
        match message:
            case p.Meeting():
                return (*message.reports, e.PeerUp(node, message.standing, direct))
            case p.Forwarded():
                return (message.report,)
            case p.Ordered():
                return (e.OrderFrom(node, message.term, message.order),)
            case p.Agree():
                return (e.Said(node, message.say),)
            case p.Gone() if node == message.node or self.control.has_a_say(node):
                return (
                    e.NodeLost(
                        message.node, message.reason, message.age_s, message.dark, source=message.source
                    ),
                )
            case p.LeaveAsked():
                return (e.LeaveAsked(message.node, message.leave),)
            case p.DrillAsked():
                return (e.DrillAsked(node, message.drill, message.left_s),)
            case p.Rows():
                self._outlets.write(message.records)
            case p.Gone() | p.Packed():
                pass  # of a node that is lost itself, or not the control plane's business
        return ()

    def _carry(self, output: e.Output) -> None:  # noqa: C901  # a line for each kind of output
        match output:
            case e.Broadcast():
                self.say(None, p.Ordered(job=self.job, term=output.term, order=output.order))
            case e.ToAgent():
                self._outlets.to_agent(output.order)
            case e.Forward():
                self.say(output.node, p.Forwarded(job=self.job, report=output.report))
            case e.Meet():
                meeting = p.Meeting(job=self.job, standing=output.standing, reports=output.reports)
                self.say(output.node, meeting)
            case e.Write():
                self._write(output)
            case e.Tell():
                self._tell(output.node, output.say)
            case e.Save():
                failed = lambda reason: self.feed(e.NotSaved(reason))  # noqa: E731
                self._outlets.save(output.durable, lambda: self._saved(output), failed)
            case e.AskWitness():
                self._outlets.ask_witness(output.nodes, output.ours)
            case e.CutNetwork():
                self._outlets.cut_network(output.for_s)
            case e.NodeIsDark():
                self._outlets.node_is_dark(output.node, output.reason, output.state)

    def _saved(self, output: e.Save) -> None:
        if self.control.agreement.trouble is not None:
            self.feed(e.Saved())
        if output.say is not None:
            self._tell(output.node, output.say)

    def _tell(self, node: int | None, say: Say) -> None:
        if node == self.control.me:
            self.feed(e.Said(node, say))
        else:
            self.say(node, p.Agree(job=self.job, say=say))

    def _write(self, output: e.Write) -> None:
        for record in output.records:
            _log(record)
        self._outlets.write(output.records)
        if output.share:
            self.say(None, p.Rows(job=self.job, records=output.records))

    def agent_address(self, node: int) -> tuple[str, int] | None:
        """Return where a node's agent listens, if anybody has told."""
        hello = self.control.nodes[node].hello
        if hello is not None:
            return hello.info.address, hello.info.agent_port
        infos = self.control.assignment.nodes if self.control.assignment is not None else ()
        return next(((info.address, info.agent_port) for info in infos if info.node == node), None)


_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _log(record: Record) -> None:
    """Log an event; and faults and the ends of recoveries, whose ids lead from one to the other."""
    match record:
        case EventRecord():
            text, level = f"{record.kind}: {record.text}", _LEVELS[record.level]
        case FaultRecord():
            rank = "" if record.rank is None else f" of rank {record.rank}"
            text, level = f"fault {record.fault}: {record.kind}{rank} on node-{record.node}", logging.INFO
        case RecoveryRecord() if record.outcome is not None:
            took_s, faults = sum(record.phases.values()), ", ".join(record.faults) or "none"
            what = f"recovery to generation {record.generation} ({record.rung}), of faults: {faults}"
            text, level = f"{what}: {record.outcome}, {took_s:.3f} s", logging.INFO
        case _:
            return
    logger.log(level, "job %s: %s", record.job, text, extra=log.about(record))
