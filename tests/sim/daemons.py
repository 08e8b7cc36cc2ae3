"""One life of a daemon: `daemon.jobs.JobSession`, shipped as it is, with invented outlets.

What `daemon.service` and `daemon.mesh` do around it is done here in virtual time: links to the other
daemons, the connection of the agent, the probe of a node whose daemon is away.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.records import EventRecord, Record
from ckptless.daemon.config import Peer
from ckptless.daemon.control import edges as e
from ckptless.daemon.control.controller import Controller
from ckptless.daemon.control.decree import Ballot, Durable, Prepare, Propose
from ckptless.daemon.jobs import JobSession, Memory
from ckptless.daemon.peers import messages as p
from ckptless.daemon.roster import Roster

from .events import Channel

if TYPE_CHECKING:
    from .agents import Agent
    from .world import World

TICK_S = 0.1
PROBE_S = 0.1
DARK_S = 0.6
PROBE_DEADLINE_S = 0.3


class Daemon:
    """Also the Outlets of its one job."""

    def __init__(self, world: "World", node: int) -> None:
        self.world, self.node, self.name = world, node, f"daemon-{node}"
        self.alive = True
        self.links: dict[int, Channel[p.DaemonMessage]] = {}
        self._session: JobSession | None = None
        self._agent: Agent | None = None
        self._orders: Channel[m.Order] | None = None
        self._probes: dict[int, float] = {}
        self._written = 0.0
        self._proposed: set[tuple[Ballot, int]] = set()
        self._tick()

    @property
    def control(self) -> Controller | None:
        """The control plane, once anybody has spoken of the job."""
        return self._session.control if self._session is not None else None

    def _tick(self) -> None:
        if self.alive:
            self._feed(e.Tick())
            self.world.events.after(TICK_S, self._tick)

    def _open(self) -> JobSession:
        if self._session is None:
            peers = tuple(Peer(node=n, name="", address="", port=0) for n in sorted(self.world.agents))
            now = self.world.wall_clock
            memory = Memory(durable=self.world.disks.get(self.node))
            self._session = JobSession(self.world.spec.job, Roster(self.node, peers), self, now, memory)
            self.world.checks.remembers(self)
            for node in list(self.links):
                self._feed(e.Connected(node))
        return self._session

    def _feed(self, event: e.Input) -> None:
        if self._session is not None and self.alive:
            stage = self._session.control.stage
            self._session.feed(event)
            self._moved(stage)
            self.world.checks.knows(self)

    def _moved(self, before: e.Stage) -> None:
        control = self.control
        if control is not None and control.stage != before and control.leads:
            self.world.stage_entered(control.stage)

    # ------------------------------------------------------------------------------------- peers

    def peer_up(self, node: int, link: Channel[p.DaemonMessage]) -> None:
        """A link is there."""
        self.links[node] = link
        self._probes.pop(node, None)
        self._feed(e.Connected(node))

    def peer_down(self, node: int, why: str) -> None:
        """A link is no more."""
        if not self.alive or self.links.pop(node, None) is None:
            return
        self._feed(e.PeerDown(node))
        if node not in self._probes:
            self._probes[node] = self.world.events.now
            self._probe(node, why, self.world.events.now)

    def peer_says(self, node: int, message: p.DaemonMessage) -> None:
        """A message of another daemon."""
        if not self.alive or isinstance(message, p.Beat):
            return
        session = self._open()
        stage = session.control.stage
        session.hear(node, message)
        self._moved(stage)
        self.world.checks.knows(self)

    def _probe(self, node: int, why: str, since: float) -> None:
        """While its agent answers, a node lives, whatever its daemon does."""
        if not self.alive or self._probes.get(node) != since:
            return
        control, agent = self.control, self.world.agents[node]
        # As the daemon does it: without a job there is nothing to ask for.
        if control is None or control.nodes[node].lost is not None:
            return
        away_s = self.world.events.now - since
        apart = self.world.network.apart(self.node, node)
        dark = apart or agent.dark
        self._feed(e.AgentAnswers(node, agent.alive and not apart))
        gone = away_s > DARK_S and control.decides if dark else True
        if control.outcome is None and (apart or not agent.alive) and gone:
            reason = f"{why}, and its agent is gone"
            self._lose(e.NodeLost(node, reason, away_s, dark, source="membership"))
            return
        pause_s = PROBE_DEADLINE_S if dark else PROBE_S
        self.world.events.after(pause_s, lambda: self._probe(node, why, since))

    # ----------------------------------------------------------------------------------- the agent

    def agent_connected(self, agent: "Agent") -> None:
        """Its messages come next."""
        self._agent = agent
        self._orders = self.world.channel(agent.obey)

    def agent_says(self, message: m.FromAgent) -> None:
        """A message of this node's agent."""
        if self.alive:
            self._open()
            self._feed(e.Report(self.node, message))

    def agent_hung_up(self) -> None:
        """The agent is gone."""
        self._agent = self._orders = None
        control = self.control
        if not self.alive or control is None or control.outcome is not None:
            return
        self._lose(e.NodeLost(self.node, "its agent is gone", 0.0, source="agent"))

    def _lose(self, loss: e.NodeLost) -> None:
        self._feed(loss)
        self._send_all(p.Gone(job=self.world.spec.job, **vars(loss)))

    # --------------------------------------------------------------------------------------- death

    def die(self, *, dark: bool, lose: bool) -> None:
        """Killed. `lose`: what it had sent is lost; `dark`: nobody is told, and silence must do."""
        self.alive = False
        if self._orders is not None and lose:
            self._orders.cut()
        if self._agent is not None:
            self._agent.daemon_gone(self)
        for node, link in self.links.items():
            other = self.world.daemons.get(node)
            if other is None:
                continue
            back = other.links.get(self.node)
            if lose or dark:
                link.cut()
            if back is not None:
                back.cut()
            down = self._downer(other, dark)
            if dark:
                self.world.events.after(DARK_S, down)
            elif lose:
                self.world.soon(down)
            else:
                link.finish(down)

    def _downer(self, other: "Daemon", dark: bool) -> "DownCall":
        why = "silent" if dark else "its daemon closed the connection"
        return DownCall(other, self.node, why)

    # ----------------------------------------------------------------------- Outlets, for JobSession

    def to_daemon(self, node: int, message: p.DaemonMessage) -> None:
        """See jobs.Outlets."""
        if isinstance(message, p.Agree):
            self.world.checks.says(self, message.say)
        if isinstance(message, p.Agree) and isinstance(message.say, Prepare):
            self.world.stage_entered("electing")
        elif isinstance(message, p.Agree) and isinstance(message.say, Propose):
            self._proposes(message.say)
            self.world.stage_entered("proposing")
        link = self.links.get(node)
        if link is not None and self.alive:
            link.send(message)

    def _proposes(self, say: Propose) -> None:
        key = (say.ballot, say.decree.index)
        assert self.control is not None
        new = say.decree.assignment
        # What another leader may have got accepted must be proposed as it is.
        old = self.control.assignment
        fresh = new is not None and (old is None or new.generation > old.generation)
        if fresh and key not in self._proposed and new is not None and new.term == say.ballot.number:
            self.world.checks.proposed(self, new)
        self._proposed.add(key)

    def to_all_daemons(self, message: p.DaemonMessage) -> None:
        """See jobs.Outlets. Rows go to ledgers, which nobody reads here."""
        if isinstance(message, p.Ordered):
            self.world.checks.ordered(message)
        if not isinstance(message, p.Rows):
            self._send_all(message)

    def _send_all(self, message: p.DaemonMessage) -> None:
        for node in list(self.links):
            self.to_daemon(node, message)

    def to_agent(self, order: m.Order) -> None:
        """See jobs.Outlets."""
        if self._orders is not None:
            self._orders.send(order)

    def write(self, records: Sequence[Record]) -> None:
        """See jobs.Outlets: the events are the story."""
        for record in records:
            if isinstance(record, EventRecord):
                self.world.story.tell(self.name, f"{record.kind}: {record.text}")

    def ended(self, outcome: m.Outcome) -> None:
        """See jobs.Outlets."""
        self.world.checks.ended(self, outcome)

    def node_is_dark(self, node: int, reason: str) -> None:
        """See jobs.Outlets: there is no cluster's manager here."""

    def save(self, durable: Durable, then: Callable[[], None]) -> None:
        """See jobs.Outlets. A disk takes its time; what it has not got when the daemon dies is lost."""
        self._written = max(self._written, self.world.events.now + self.world.disk_delay())
        self.world.events.at(self._written, lambda: self._save(durable, then))

    def _save(self, durable: Durable, then: Callable[[], None]) -> None:
        if self.alive:
            self.world.disks[self.node] = durable
            if durable.vote is not None:
                self.world.stage_entered("voting")
            then()
            self.world.checks.knows(self)

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See jobs.Outlets."""
        self.world.witness.ask(self, set(nodes), set(ours))

    def hear_witness(self, nodes: set[int]) -> None:
        """The cluster's manager holds these for dead."""
        self._feed(e.Witnessed(tuple(sorted(nodes))))


class DownCall:
    """Tells one daemon that another's link is down."""

    def __init__(self, daemon: Daemon, node: int, why: str) -> None:
        self._daemon, self._node, self._why = daemon, node, why

    def __call__(self) -> None:
        self._daemon.peer_down(self._node, self._why)
