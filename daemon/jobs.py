"""One job in this daemon: carries inputs to its control plane, and outputs to peers, agent and ledger."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.records import EventRecord, Record
from ckptless.daemon.control import edges as e
from ckptless.daemon.control.controller import Controller
from ckptless.daemon.control.decree import Durable, Say
from ckptless.daemon.control.faults import NodeViews
from ckptless.daemon.membership.messages import Alive
from ckptless.daemon.peers import messages as p
from ckptless.daemon.roster import Roster

logger = logging.getLogger(__name__)

LIFE_BITS = 40


class Outlets(Protocol):
    """Where a job's outputs go; the service is one, a test may be another."""

    def to_daemon(self, node: int, message: p.Said) -> None:
        """Send to one daemon; dropped where it cannot be reached (states and orders are repeated)."""

    def to_all_daemons(self, message: p.Said) -> None:
        """Send to every other daemon."""

    def to_agent(self, order: m.Order) -> None:
        """Hand an order to this node's agent of the job."""

    def write(self, records: Sequence[Record]) -> None:
        """Queue rows for the ledger."""

    def ended(self, outcome: m.Outcome) -> None:
        """The job is over."""

    def node_is_dark(self, node: int, reason: str) -> None:
        """This daemon leads, and a node does not answer any more at all."""

    def save(self, durable: Durable, then: Callable[[], None]) -> None:
        """Keep it on the disk, in the order of the calls, then call `then`; never, where that fails."""

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See edges.AskWitness; the answer, if there is one, is fed as edges.Witnessed."""


@dataclass(frozen=True)
class Memory:
    """What this daemon knows of a job from an earlier life; `lost`: it had one, and knows nothing of it.

    `life`, of LIFE_BITS random bits, is this life's alone (by its clock it could not be told from an earlier
    one: clocks are set back). `identity` is the same as long as it remembers.
    """

    life: int
    identity: str = ""
    durable: Durable | None = None
    lost: bool = False


class JobSession:
    """The control plane of one job, wired to its outlets. Owned by the daemon's event loop."""

    def __init__(
        self,
        job: str,
        roster: Roster,
        outlets: Outlets,
        now: Callable[[], float],
        memory: Memory,
    ) -> None:
        self.job = job
        self.life = memory.life
        self._outlets = outlets
        self._now = now
        self.control = Controller(
            me=roster.me,
            session=f"{memory.life:x}",
            nodes=NodeViews(roster.nodes),
            durable=memory.durable,
            may_vote=not memory.lost,
        )

    def feed(self, *events: e.Input) -> None:
        """Inputs, and everything that follows from them."""
        before = self.control.outcome
        for output in self.control.handle_all(events, self._now()):
            self._carry(output)
        if before is None and self.control.outcome is not None:
            self._outlets.ended(self.control.outcome)

    def hear(self, node: int, message: p.Said, *, direct: bool = True) -> None:
        """What another daemon says of this job, over a connection to it or by way of others."""
        events = self._heard(node, message, direct=direct)
        if events:
            self.feed(*events)

    def hear_all(self, said: Sequence[tuple[int, p.Said]]) -> None:
        """What other daemons say that there are no connections to: (node, message) of each."""
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
            case p.Rows():
                self._outlets.write(message.records)
            case p.Gone() | Alive():
                pass  # of a node that is lost itself, or not the control plane's business
        return ()

    def _carry(self, output: e.Output) -> None:  # noqa: C901  # a line for each kind of output
        match output:
            case e.Broadcast():
                ordered = p.Ordered(job=self.job, term=output.term, order=output.order)
                self._outlets.to_all_daemons(ordered)
            case e.ToAgent():
                self._outlets.to_agent(output.order)
            case e.Forward():
                self._outlets.to_daemon(output.node, p.Forwarded(job=self.job, report=output.report))
            case e.Meet():
                meeting = p.Meeting(job=self.job, standing=output.standing, reports=output.reports)
                if output.node is None:
                    self._outlets.to_all_daemons(meeting)
                else:
                    self._outlets.to_daemon(output.node, meeting)
            case e.Write():
                self._write(output)
            case e.Tell():
                self._tell(output.node, output.say)
            case e.Save():
                self._outlets.save(output.durable, lambda: self._saved(output))
            case e.AskWitness():
                self._outlets.ask_witness(output.nodes, output.ours)
            case e.NodeIsDark():
                self._outlets.node_is_dark(output.node, output.reason)

    def _saved(self, output: e.Save) -> None:
        if output.say is not None:
            self._tell(output.node, output.say)

    def _tell(self, node: int | None, say: Say) -> None:
        if node is None:
            self._outlets.to_all_daemons(p.Agree(job=self.job, say=say))
        elif node == self.control.me:
            self.feed(e.Said(node, say))
        else:
            self._outlets.to_daemon(node, p.Agree(job=self.job, say=say))

    def _write(self, output: e.Write) -> None:
        for record in output.records:
            if isinstance(record, EventRecord):
                level = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
                logger.log(level[record.level], "job %s: %s: %s", record.job, record.kind, record.text)
        self._outlets.write(output.records)
        if output.share:
            self._outlets.to_all_daemons(p.Rows(job=self.job, records=output.records))

    def agent_address(self, node: int) -> tuple[str, int] | None:
        """Where a node's agent listens, if anybody has told."""
        hello = self.control.nodes[node].hello
        if hello is not None:
            return hello.info.address, hello.info.agent_port
        infos = self.control.assignment.nodes if self.control.assignment is not None else ()
        return next(((info.address, info.agent_port) for info in infos if info.node == node), None)
