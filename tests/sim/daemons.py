"""One life of a daemon: its job's `JobSession`, as it is shipped.

What the daemon's job host, its peer links and the kernel do around it is done here in virtual time:
connections to the other daemons and to the agent, a disk, and what comes of knocking at a node.
"""

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from ckptless.daemon.ckptlessd import session
from ckptless.daemon.ckptlessd.membership.watch import Answer
from ckptless.daemon.ckptlessd.peering import Peering, Roster
from ckptless.daemon.ckptlessd.recovery import events as e
from ckptless.daemon.ckptlessd.recovery.job_state import JobState
from ckptless.daemon.ckptlessd.session import JobSession, Memory
from ckptless.daemon.ledger.writer import VOTE_DEADLINE_S
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import Ballot, Durable, Prepare, Propose
from ckptless.daemon.protocol.records import EventRecord, JobRecord, Record
from ckptless.daemon.settings.config import Peer, Timers

from .events import Channel

if TYPE_CHECKING:
    from .agents import Agent
    from .world import World

# What is to be on the disk, and what is called once it is, or with the reason why not.
Vote: TypeAlias = tuple[Durable, Callable[[], None], Callable[[str], None]]
# What tells this launch of the job from others of its number.
LAUNCH = "b" * 32
TICK_S = 0.1
TIMES = Timers(beat_s=0.1, dark_s=0.6)
KNOCK_DEADLINE_S = 0.2
FLUSH_S = 0.005
RENEWED_S = 0.001
# So long a drill may wait for its step.
DRILL_S = 3.0
# Clocks of daemons differ by up to so much, anew with each life; each has a rate of its own (crystals err by
# 100 millionths, NTP slews by 500). Within a life a daemon's clock never jumps: see daemon.clock.
SKEW_S = 500.0
DRIFT = 0.01


class Daemon:
    """Also the Outlets of its one job, and its Links."""

    times = TIMES

    def __init__(self, world: "World", node: int) -> None:
        self.world, self.node, self.name = world, node, f"daemon-{node}"
        self.alive = True
        self.wanted: frozenset[int] = frozenset()
        self.links: dict[int, Channel[p.DaemonMessage]] = {}
        self.linked_at: dict[int, float] = {}
        self._session: JobSession | None = None
        self._agent: Agent | None = None
        self._orders: Channel[m.Order | m.Draw | m.GiveBack | m.Announce | m.Renewed] | None = None
        # Votes that wait for the disk, and those that the write under way is for; see `LedgerWriter`.
        self._votes: list[Vote] = []
        self._writing: list[Vote] = []
        self._reached = self._late = False
        # Until when orders do not get to the agent.
        self._deaf_until = 0.0
        self._awake_at = 0.0
        # Until when it is busy with messages that have come.
        self._busy_until = 0.0
        # When its life began, and when the job did for it: until then everybody counts as heard.
        self.born = self.began = world.events.now
        self._life = world.next_life()
        # The one of the same process, where that has another job.
        self._host = world.host.daemons[node] if world.host is not None else None
        self._skew_s = world.random.uniform(-SKEW_S, SKEW_S)
        # Drawn from the life: the seed's own draws stay what they are.
        self._draws = Random(self._life)
        self._rate = 1.0 + self._draws.uniform(-DRIFT, DRIFT)
        self._proposed: set[tuple[Ballot, int]] = set()
        self._tick()

    @property
    def control(self) -> JobState | None:
        """The state of its control plane, once anybody has spoken of the job."""
        return self._session.control if self._session is not None else None

    @property
    def peer_links(self) -> "Daemon":
        """See session.Outlets."""
        return self

    @property
    def awake_since(self) -> float:
        """Return when it went on, if it was stopped."""
        return self._awake_at

    def now(self) -> float:
        """Return what its clock shows."""
        if self._host is not None:
            return self._host.now()
        lived = self.world.events.now - self.born
        return self.world.wall_clock() + self._skew_s + (self._rate - 1.0) * lived

    def _tick(self) -> None:
        if not self.alive:
            return
        if self._sleeps(self._tick) or self._is_busy(self._tick):
            return
        self._feed(e.Tick())
        self._do(Peering.tick)
        self.world.events.after(TICK_S, self._tick)

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later: nothing is lost, everything is late."""
        for job in self.world.jobs:
            daemon = job.daemons.get(self.node)
            if daemon is not None:
                daemon._awake_at = max(daemon._awake_at, self.world.events.now + seconds)

    def _sleeps(self, action: Callable[[], None]) -> bool:
        """Whether it is stopped; then this is done when it goes on."""
        if self.world.events.now >= self._awake_at:
            return False
        self.world.events.at(self._awake_at, action)
        return True

    def _is_busy(self, action: Callable[[], None]) -> bool:
        """Whether it has messages to look at first; then this is done after them."""
        if self.world.events.now >= self._busy_until:
            return False
        self.world.events.at(self._busy_until, action)
        return True

    def _in_turn(self, action: Callable[[], None]) -> None:
        """Look at a message, when those before it are done."""
        if not self.world.cost_s:
            action()
            return
        at = self._busy_until = max(self._busy_until, self.world.events.now) + self.world.cost_s
        # The process has one thread for all of its jobs.
        for job in (self.world.host or self.world).jobs:
            if self.node in job.daemons:
                job.daemons[self.node]._busy_until = at
        self.world.events.at(at, action)

    def _open(self) -> JobSession:
        if self._session is None:
            peers = tuple(Peer(node=n, name="", address="", port=0) for n in range(self.world.most_nodes))
            lost = "its disk is another one" if self.node in self.world.forgot else ""
            found = None if lost else session.recall(self.world.row(self.node), LAUNCH, "")
            durable = found[1] if isinstance(found, tuple) else None
            memory = Memory(self._life, durable=durable, lost=lost)
            roster = Roster(self.node, peers, self.world.spec.late)
            self._session = _Session(self, roster, memory)
            if not lost:
                self.world.checks.remembers(self)
            self._session.peering.start()
        return self._session

    def _do(self, action: Callable[[Peering], None]) -> None:
        """Something happens to the job, if it is known here; and what is to be checked after it."""
        if self._session is not None and self.alive:
            stage = self._session.control.stage
            action(self._session.peering)
            self._moved(stage)
            self.world.checks.knows(self)

    def _feed(self, event: e.Input) -> None:
        if self._session is not None and self.alive:
            stage = self._session.control.stage
            self._session.feed(event)
            self._moved(stage)
            self.world.checks.knows(self)

    def _moved(self, before: e.Stage) -> None:
        control = self.control
        if control is not None and control.stage != before == "forming":
            self.began = self.world.events.now
        if control is not None and control.stage != before and control.leads:
            self.world.stage_entered(control.stage)

    # ------------------------------------------------------------------------------------- peers

    def peer_up(self, node: int, link: Channel[p.DaemonMessage]) -> None:
        """A link is there."""
        self.links[node] = link
        self.linked_at[node] = self.world.events.now
        self._do(lambda peering: peering.linked(node))

    def peer_down(self, node: int, why: str) -> None:
        """A link is no more. Who is stopped finds that out when it goes on, as everything else."""
        again = lambda: self.peer_down(node, why)  # noqa: E731
        if not self.alive or self._sleeps(again) or self._is_busy(again):
            return
        if self.links.pop(node, None) is None:
            return
        self._do(lambda peering: peering.unlinked(node, why))
        self.world.dial(min(node, self.node), max(node, self.node))

    def peer_says(self, node: int, message: p.DaemonMessage) -> None:
        """A message of another daemon."""
        # What a stopped daemon finds when it goes on came before the end of the connection, or never.
        if not self.alive or node not in self.links or self._sleeps(lambda: self.peer_says(node, message)):
            return
        self._in_turn(lambda: self._hear(node, message))

    def _hear(self, node: int, message: p.DaemonMessage) -> None:
        if self.alive and node in self.links and not self._sleeps(lambda: self._hear(node, message)):
            self._do(lambda peering: peering.hear(node, message))

    # --------------------------------------------------------------------------- Links, for Peering

    @property
    def up(self) -> Collection[int]:
        """See peering.Links."""
        return self.links.keys()

    def want(self, nodes: frozenset[int]) -> None:
        """See peering.Links."""
        self.wanted = nodes
        for node in nodes - self.links.keys():
            self.world.dial(min(node, self.node), max(node, self.node))

    def send(self, node: int, message: p.DaemonMessage) -> bool:
        """See peering.Links."""
        link = self.links.get(node)
        if link is None or not self.alive:
            return False
        link.send(message)
        return True

    def hang_up(self, node: int, why: str) -> None:
        """See peering.Links. The other side hears of it where anything gets there."""
        self.world.hang_up(self, node, why)

    def look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        """See peering.Links: the kernel of the node answers, if anything gets there and back."""
        self.world.soon(lambda: self._knock(node, agent=agent))

    def _knock(self, node: int, *, agent: bool) -> None:
        there = self.world.agents[node]
        if there.dark or self.world.network.apart(self.node, node):
            self.world.events.after(KNOCK_DEADLINE_S, lambda: self._looked(node, "silent"))
        else:
            listens: Answer = "open" if there.alive else "refused"
            self.world.soon(lambda: self._looked(node, listens if agent else "lives"))

    def _looked(self, node: int, answer: Answer) -> None:
        if answer == "silent" and self.world.events.now < self._awake_at:
            answer = "unsure"
        if not self._sleeps(lambda: self._looked(node, answer)):
            self._do(lambda peering: peering.looked(node, answer))

    def flush_soon(self) -> None:
        """See peering.Links."""
        self.world.events.after(FLUSH_S, lambda: self._do(Peering.flush))

    # ----------------------------------------------------------------------------------- the agent

    def agent_connected(self, agent: "Agent") -> None:
        """Its messages come next."""
        self._agent = agent
        self._orders = self.world.channel(agent.obey)
        self._orders.hold(self._deaf_until)

    def hold_orders(self, until: float) -> None:
        """The agent hears nothing of this daemon before then."""
        self._deaf_until = until
        if self._orders is not None:
            self._orders.hold(until)

    def agent_says(self, message: m.FromAgent) -> None:
        """A message of this node's agent."""
        if self.alive and not self._sleeps(lambda: self.agent_says(message)):
            self._in_turn(lambda: self._report(message))

    def _report(self, message: m.FromAgent) -> None:
        if self.alive and not self._sleeps(lambda: self._report(message)):
            self._open()
            self._feed(e.Report(self.node, message))

    def agent_hung_up(self) -> None:
        """The agent is gone."""
        if self.alive and (self._sleeps(self.agent_hung_up) or self._is_busy(self.agent_hung_up)):
            return
        self._agent = self._orders = None
        session = self._session
        if session is not None and session.control.outcome is None:
            self._do(lambda _peering: session.lose_agent("its agent is gone", 0.0))

    def lose(self, loss: e.NodeLost) -> None:
        """Only this daemon may know that a node is lost."""
        session = self._session
        if session is not None:
            self._do(lambda _peering: session.lose(loss))

    def leave(self, node: int, leave: e.Leave) -> None:
        """Somebody wants the job to leave a node."""
        session = self._session
        if session is not None:
            self._do(lambda _peering: session.leave(node, leave))

    def unwell(self, leave: e.Leave | None) -> None:
        """A health check says something of this node."""
        session = self._session
        if session is not None:
            self._do(lambda _peering: session.feed(e.Unwell(leave)))

    def drill(self, drill: m.Drill) -> None:
        """Somebody wants a drill."""
        session = self._session
        if session is not None:
            self._do(lambda _peering: session.drill(drill, DRILL_S))

    def resize(self, wish: m.Wish) -> None:
        """Somebody wants the job to have another size."""
        session = self._session
        if session is not None:
            self._do(lambda _peering: session.resize(wish))

    # --------------------------------------------------------------------------------------- death

    def die(self, *, dark: bool, lose: bool) -> None:
        """Killed. `lose`: what it had sent is lost; `dark`: nobody is told, and silence must do."""
        self.alive = False
        self._tear()
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
            down = DownCall(other, self.node, "its daemon closed the connection")
            if dark:
                continue  # silence must do
            if lose:
                self.world.soon(down)
            else:
                link.finish(down)

    def _tear(self) -> None:
        """Leave the write under way on the disk, or not; nobody was told."""
        kept = self._draws.random() < 0.5
        under_way = self.world.writers.get(self.node, [])[:1] == [self]
        if under_way and kept and not self.world.is_full(self.node):
            self.world.disks[self.node] = self._writing[-1][0]

    # ----------------------------------------------------------------------- Outlets, for JobSession

    def about_to_say(self, message: p.Said) -> None:
        """Look at what the session says to others."""
        if isinstance(message, p.Agree):
            self.world.checks.says(self, message.say)
        if isinstance(message, p.Agree) and isinstance(message.say, Prepare):
            self.world.stage_entered("electing")
        elif isinstance(message, p.Agree) and isinstance(message.say, Propose):
            self._proposes(message.say)
            self.world.stage_entered("proposing")

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

    def to_agent(self, order: m.Order | m.Draw | m.GiveBack | m.Announce | m.Renewed) -> None:
        """See session.Outlets. What comes every moment takes no draw of the seed's."""
        agent = self._agent
        if agent is not None and isinstance(order, m.Renewed) and self._deaf_until > self.world.events.now:
            return
        if agent is not None and isinstance(order, m.Renewed):
            self.world.events.after(RENEWED_S, lambda: agent.lease.renew(self.world.events.now))
        elif self._orders is not None:
            self._orders.send(order)

    def write(self, records: Sequence[Record]) -> None:
        """See session.Outlets: the events are the story."""
        self.world.job_rows += [row for row in records if isinstance(row, JobRecord)]
        for record in records:
            if isinstance(record, EventRecord):
                self.world.story.tell(self.name, f"{record.kind}: {record.text}")

    def ended(self, outcome: m.Outcome) -> None:
        """See session.Outlets."""
        self.world.checks.ended(self, outcome)

    def node_is_dark(self, node: int, reason: str, state: e.DarkState) -> None:
        """See session.Outlets: there is no cluster's manager here."""

    def cut_network(self, for_s: float) -> None:
        """See session.Outlets. There is one cable to pull at a time."""
        if not self.world.network.broken:
            self.world.struck += 1
            self.world.network.cut(frozenset({self.node}), for_s)

    def save(self, durable: Durable, then: Callable[[], None], failed: Callable[[str], None]) -> None:
        """See session.Outlets. A disk takes its time; `_tear`: what it has got when the daemon dies."""
        self._votes.append((durable, then, failed))
        self._write()

    def _write(self) -> None:
        """Begin to write what waits, if nothing is being written."""
        if not self.alive or not self._votes or self._writing:
            return
        votes = self._writing = self._votes
        self._votes, self._reached, self._late = [], False, False
        self.world.events.after(VOTE_DEADLINE_S, lambda: self._is_late(votes))
        self.reach_disk()

    def reach_disk(self) -> None:
        """Bring the write under way to the disk, unless that hangs, or writes something of another job."""
        waiting = self.world.writers.setdefault(self.node, [])
        if self._writing and self not in waiting:
            waiting.append(self)
        first = waiting[:1] == [self]
        if self._writing and not self._reached and first and self.node not in self.world.hung:
            self._reached = True
            delay_s = self.world.disk_delay() + self.world.slow_s(self.node)
            self.world.events.after(delay_s, self._written)

    def _is_late(self, votes: list[Vote]) -> None:
        if not self.alive or self._sleeps(lambda: self._is_late(votes)) or self._writing is not votes:
            return
        self._late = True
        for _, _, failed in votes:
            failed("the disk has not answered")

    def _written(self) -> None:
        if not self.alive or self._sleeps(self._written):
            return
        waiting = self.world.writers[self.node]
        waiting.remove(self)
        if waiting:
            waiting[0].reach_disk()
        votes, self._writing = self._writing, []
        durable, _, _ = votes[-1]
        full, told = self.world.is_full(self.node), () if self._late else votes
        if not full:
            self.world.disks[self.node] = durable
            self.world.history.setdefault(self.node, []).append(durable)
            self.world.written_at.setdefault(self.node, []).append(self.world.events.now)
            if durable.vote is not None:
                self.world.stage_entered("voting")
        for _, then, failed in told:
            if full:
                failed("the disk is full")
            else:
                then()
        if not full:
            self.world.checks.knows(self)
        self._write()

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See session.Outlets."""
        self.world.witness.ask(self, set(nodes), set(ours))

    def explain(self, node: int, cancel: m.Cancel) -> None:
        """See session.Outlets. Nobody here is told by Slurm to end."""
        raise AssertionError(cancel)

    def hear_witness(self, nodes: set[int]) -> None:
        """The cluster's manager holds these for dead."""
        if self._sleeps(lambda: self.hear_witness(nodes)):
            return
        self._feed(e.Witnessed(tuple(sorted(nodes))))


class _Session(JobSession):
    """As it is shipped; what it says, and whom it accuses, is looked at."""

    def __init__(self, daemon: Daemon, roster: Roster, memory: Memory) -> None:
        self._daemon = daemon
        super().__init__(daemon.world.spec.job, roster, daemon, memory)

    def say(self, node: int | None, message: p.Said) -> None:
        """See `JobSession`. Rows go to ledgers, which nobody reads here."""
        if isinstance(message, p.Ordered):
            self._daemon.world.checks.ordered(message)
        if isinstance(message, p.Meeting):
            self._daemon.world.checks.met(message.standing)
        if not isinstance(message, p.Rows):
            self._daemon.about_to_say(message)
            super().say(node, message)

    def lose(self, loss: e.NodeLost) -> None:
        """See `JobSession`."""
        if self.control.nodes[loss.node].lost is None:
            self._daemon.world.checks.accuses(self._daemon, loss)
        super().lose(loss)


class DownCall:
    """Tells one daemon that another's link is down."""

    def __init__(self, daemon: Daemon, node: int, why: str) -> None:
        self._daemon, self._node, self._why = daemon, node, why

    def __call__(self) -> None:
        self._daemon.peer_down(self._node, self._why)
