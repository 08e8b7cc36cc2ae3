"""One job in this daemon, at its edges: its session, with peer links, local agent, disk and cluster."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckptless.daemon.ckptlessd import cutting
from ckptless.daemon.ckptlessd.admission import EventQuota
from ckptless.daemon.ckptlessd.cluster import Cluster
from ckptless.daemon.ckptlessd.local_agent import LocalAgent
from ckptless.daemon.ckptlessd.metrics.tally import Tally
from ckptless.daemon.ckptlessd.peer_links import PeerLinks
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.session import JobSession, Memory, next_identity
from ckptless.daemon.ckptlessd.unix_server import Client
from ckptless.daemon.ledger.writer import LedgerWriter
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Decided, Durable
from ckptless.daemon.protocol.records import DRILL, GIVEN_BACK, Record, printable
from ckptless.daemon.protocol.saving import Saved, SaveDone
from ckptless.daemon.settings.config import Timers
from ckptless.daemon.transport.credentials import Credentials
from ckptless.daemon.transport.handshake import new_key
from ckptless.daemon.transport.tasks import Tasks

# A look at a silent node takes this part of the time after which it counts as dark.
LOOK_PART = 1 / 3
# A daemon that was away asks the others how the job ended.
LINGER_S = 120.0
# One that is stopped with its ranks is left alone for so many looks while other nodes go on.
LOOKS_AT_STOPPED = 2
CUT_SHORT_CODE = 128 + signal.SIGTERM


@dataclass
class Surroundings:
    """The things that all jobs of a daemon share."""

    now: Callable[[], float]
    timers: Timers
    credentials: Credentials
    ledger: LedgerWriter
    cluster: Cluster
    tasks: Tasks
    tally: Tally = field(default_factory=Tally)


class _Session(JobSession):
    """Sends the key that the job's agents need along with their first assignment, and counts its rows."""

    def __init__(self, host: "JobHost", memory: Memory) -> None:
        super().__init__(host.job, host.roster, host, memory)
        self._links, self._tally = host.peer_links, host.tally

    def say(self, node: int | None, message: p.Said) -> None:
        """See `JobSession`."""
        decided = node is None and isinstance(message, p.Agree) and isinstance(message.say, Decided)
        if decided and self.control.leads and self._links.key is None:
            self._links.learn_key(new_key())
        if isinstance(message, p.Rows):
            self._tally.told(message.records)
        super().say(node, message)


class JobHost:
    """Has a job's session, its links to other daemons and its agent. Owned by the daemon's event loop.

    The session's Outlets: what follows from its inputs goes to the agent, the ledger and the cluster.
    """

    def __init__(self, job: str, uid: int, roster: Roster, around: Surroundings, memory: Memory) -> None:
        self.job, self.uid, self.roster, self.launch = job, uid, roster, memory.launch
        # What is on the disk, and what is on its way there.
        self.identity = self.next_identity = memory.identity
        self._forgot = memory.lost
        self._confessed = not memory.lost
        self._around, self.tally = around, around.tally
        self.now, self.times = around.now, around.timers
        self._agent = LocalAgent(job, around.now)
        self.peer_links = PeerLinks(
            (job, memory.launch), roster, around.credentials, self.times.dark_s * LOOK_PART
        )
        self.peer_links.on_key = lambda key: self._agent.send(m.JobKey(key=key))
        self.session = _Session(self, memory)
        self._events = EventQuota()
        self._begun_at = around.now()
        self._ended_at: float | None = None
        self._closed = False
        # How often the agent was found stopped with its ranks, and since the second time others' were not.
        self._stopped_looks = 0

    def start(self) -> None:
        """Begin to look for the other daemons."""
        self.peer_links.start(self.session.peering)

    def tick(self) -> None:
        """Time has passed."""
        self.session.tick()
        self.tally.look(self.job, self.session.control)
        if dropped := self._events.dropped(self.now()):
            text = f"{dropped} events of this node's agent are not written: it tells too many"
            self.note("warning", "events-dropped", text)
        self._look_at_agent()

    def name_of(self, node: int) -> str:
        """Return a node's name: of one that has come since, as its agent has said."""
        hello = self.session.control.nodes[node].hello
        return hello.info.name if hello is not None else self.roster.by_node[node].name

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.session.control.outcome is not None

    @property
    def is_given_back(self) -> bool:
        """Whether this node was given back to Slurm, and the job goes on without it."""
        return (self.session.control.nodes[self.roster.me].lost or "").startswith(GIVEN_BACK)

    @property
    def forgettable(self) -> bool:
        """Whether the job has been over for long enough that everybody has heard of it."""
        return self._ended_at is not None and self.now() - self._ended_at > LINGER_S

    @property
    def goes_on(self) -> bool:
        """Whether the job is not over, and its agent is here."""
        return self._agent.here and not self.is_over

    @property
    def age_s(self) -> float:
        """Seconds since this daemon heard of the job."""
        return self.now() - self._begun_at

    def note(self, level: Literal["info", "warning", "error"], kind: str, text: str) -> None:
        """Put an event into every ledger of the job, and into the log."""
        self.session.feed(e.Report(self.roster.me, m.AgentEvent(level=level, kind=kind, text=text)))

    def set_aside(self, text: str) -> None:
        """The ledger was damaged. What this life has promised it still knows, and writes to the new one."""
        self.note("error", "ledger-damaged", f"node-{self.roster.me}: {text}")
        self.save(self.session.control.agreement.durable, lambda: None, lambda _reason: None)

    def cut_short(self, reason: str) -> None:
        """Something above the job has ended it; where it is over already, nothing happens."""
        if not self.is_over:
            self.session.feed(e.Report(self.roster.me, m.Cancel(exit_code=CUT_SHORT_CODE, reason=reason)))

    async def close(self) -> None:
        """Hang up everywhere; nothing is told to anybody."""
        self._closed = True
        await self.peer_links.close()
        self._agent.close()

    # ------------------------------------------------------------------------------------- agent

    def agent_connected(self, client: Client) -> None:
        """The job's agent on this node is there; an older connection of it is forgotten."""
        self._agent.connected(client)
        self._agent.send(m.Admitted(identity=self.identity))
        if self.peer_links.key is not None:
            self._agent.send(m.JobKey(key=self.peer_links.key))

    def agent_says(self, message: m.FromAgent | m.Pong | SaveDone) -> None:
        """A message of it."""
        self._agent.heard()
        if self._stopped_looks:
            self._stopped_looks = 0
            self.session.feed(e.Stopped(False))
        if isinstance(message, SaveDone):
            self._agent.saved(message)
        elif not isinstance(message, m.Pong):
            self._report(message)

    def _report(self, message: m.FromAgent) -> None:
        if isinstance(message, m.AgentEvent) and not self._events.take(self.now()):
            return
        self.session.feed(e.Report(self.roster.me, message))
        if not self._confessed:
            self._confessed = True
            text = f"the daemon of node-{self.roster.me} does not vote in this job: {self._forgot}"
            self.note("warning", "no-vote", text)

    def agent_gone(self, client: Client) -> None:
        """Take note that the agent's process is gone (or hung up, which it does only at its end)."""
        if self._agent.left(client):
            self._lose_agent("its agent is gone", 0.0)

    def _lose_agent(self, reason: str, age_s: float) -> None:
        if not self.is_over:
            self.session.lose_agent(reason, age_s)

    def _look_at_agent(self) -> None:
        """Ask it for a sign of life; end one that is silent for too long."""
        control = self.session.control
        silent_s = self._agent.look(control.spec.limits if control.spec is not None else None)
        if silent_s is None:
            return
        text = f"its agent does not answer for {self._agent.deadline_s:.0f} s"
        if self._agent.suspended:
            if not self._stopped_looks:
                self.session.feed(e.Stopped(True))
            # One daemon asks whether all the job is stopped.
            if control.leads:
                self._around.cluster.ask_suspended(self, silent_s)
            # Slurm suspends, and resumes, one node after the other, and each finds out when it looks.
            self._stopped_looks = self._stopped_looks + 1 if control.goes_on_elsewhere else 1
            if self._stopped_looks <= LOOKS_AT_STOPPED:
                return
            text = "its agent and ranks are stopped by a signal, and those of most other nodes are not"
        self.note("error", "agent-hung", f"node-{self.roster.me}: {text}: {self._agent.kill()}")
        self._lose_agent(text, silent_s)
        self._agent.hang_up()

    async def save_state(self, deadline_s: float) -> Saved:
        """Have the agents save the job's state; what came of it."""
        return await self._agent.save(deadline_s)

    # ------------------------------------------------------------------- Outlets, for JobSession

    def to_agent(self, order: m.Order | m.Draw | m.GiveBack | m.Announce | m.Renewed) -> None:
        """See session.Outlets."""
        self._agent.send(order)

    def write(self, records: Sequence[Record]) -> None:
        """See session.Outlets."""
        self._around.ledger.write([printable(record) for record in records])

    def ended(self, outcome: m.Outcome) -> None:
        """See session.Outlets."""
        self._ended_at = self.now()
        self._around.cluster.ended(self, outcome)

    def node_is_dark(self, node: int, reason: str, state: e.DarkState) -> None:
        """See session.Outlets."""
        self._around.cluster.node_is_dark(self, node, reason, state)

    def save(self, durable: Durable, then: Callable[[], None], failed: Callable[[str], None]) -> None:
        """See session.Outlets."""
        if self._forgot:
            # In its next life, too, it must know that there was more than this.
            return
        identity = self.next_identity = next_identity(self.next_identity)

        def written() -> None:
            if not self._closed:
                self.identity = identity
                self._agent.send(m.Admitted(identity=identity))
                then()

        def refused(reason: str) -> None:
            if not self._closed:
                failed(reason)

        self._around.ledger.save_vote(self.job, (identity, durable), written, refused)

    def cut_network(self, for_s: float) -> None:
        """See session.Outlets."""
        # The daemon's: this job may be over here before that is.
        self._around.tasks.spawn(self._cut_network(for_s))

    async def _cut_network(self, for_s: float) -> None:
        try:
            await cutting.cut_network(for_s)
        except CkptlessError as error:
            self.note("warning", DRILL, f"node-{self.roster.me} is not cut off: {error}")

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See session.Outlets."""
        self._around.cluster.witness(self, nodes, ours)

    def explain(self, node: int, cancel: m.Cancel) -> None:
        """See session.Outlets."""
        self._around.cluster.explain(self, node, cancel)

    # ----------------------------------------------------------------------- answers of the cluster

    def explained(self, node: int, cancel: m.Cancel, reason: str) -> None:
        """The job of `node`'s agent is cancelled, for this reason; see `cluster.Cluster.explain`."""
        self.session.feed(e.Report(node, m.Cancel(exit_code=cancel.exit_code, reason=reason)))

    def suspended(self, seconds: float) -> None:
        """The job has been suspended for so long; see `cluster.Cluster.ask_suspended`."""
        if not self._closed:
            self.session.feed(e.Suspended(seconds))

    def witnessed(self, nodes: Sequence[int]) -> None:
        """The cluster's manager holds these nodes for dead; see `cluster.Cluster.witness`."""
        self.session.feed(e.Witnessed(tuple(nodes)))
