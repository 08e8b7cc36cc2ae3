"""One job in this daemon, at its edges: links to other daemons, the local agent, probes, the job's key."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Literal, Protocol

from ckptless.daemon.admission import EventQuota
from ckptless.daemon.api import messages as m
from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.api.records import Record
from ckptless.daemon.api.saving import Saved, SaveDone, SaveNow
from ckptless.daemon.config import Timers
from ckptless.daemon.control import edges as e
from ckptless.daemon.control.decree import Decided, Durable
from ckptless.daemon.heartbeat import AgentProcess, Heartbeat
from ckptless.daemon.jobs import JobSession, Memory, next_identity
from ckptless.daemon.membership.watch import Answer
from ckptless.daemon.mesh import Mesh
from ckptless.daemon.peering import Peering
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.handshake import new_key
from ckptless.daemon.peers.vouch import Vouch
from ckptless.daemon.roster import Roster
from ckptless.daemon.unix_server import Client

logger = logging.getLogger(__name__)

# A look at a silent node takes this part of the time after which it counts as dark.
LOOK_PART = 1 / 3
# Messages that go the same way wait so long for each other.
FLUSH_S = 0.005
# A daemon that was away asks the others how the job ended.
LINGER_S = 120.0
# An agent keeps to the deadline of a save itself.
SAVE_GRACE_S = 2.0
# An agent does more in one go than a rank's listener: it may be silent for so many times a rank's `pong_s`.
PONGS_PER_AGENT = 2
AGENT_DEADLINE_S = 20.0
CUT_SHORT_CODE = 128 + signal.SIGTERM


class Host(Protocol):
    """What a job needs of the daemon that it is in; the service is one."""

    now: Callable[[], float]
    timers: Timers
    vouch: Vouch

    def write(self, records: Sequence[Record]) -> None:
        """Queue rows for the ledger."""

    def ended(self, runtime: "JobRuntime", outcome: m.Outcome) -> None:
        """The job is over."""

    def node_is_dark(self, runtime: "JobRuntime", node: int, reason: str, state: e.DarkState) -> None:
        """This daemon leads, and one of the job's nodes does not answer any more; see edges.NodeIsDark."""

    def save_vote(
        self,
        runtime: "JobRuntime",
        durable: Durable,
        then: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """See jobs.Outlets.save."""

    def witness(self, runtime: "JobRuntime", nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See cluster.Cluster."""

    def explain(self, runtime: "JobRuntime", node: int, cancel: m.Cancel) -> None:
        """See cluster.Cluster."""

    def ask_suspended(self, runtime: "JobRuntime", seconds: float) -> None:
        """See cluster.Cluster."""


class JobRuntime:
    """Owned by the daemon's event loop."""

    def __init__(self, job: str, uid: int, roster: Roster, host: Host, memory: Memory) -> None:
        self.job, self.uid, self.roster, self.launch = job, uid, roster, memory.launch
        # What is on the disk, and what is on its way there.
        self.identity = self.next_identity = memory.identity
        self._forgot = memory.lost
        self._confessed = not memory.lost
        self._host = host
        self.session = JobSession(job, roster, self, host.now, memory)
        self._mesh = Mesh(job, memory.launch, roster, host.vouch)
        self._peering = Peering(roster, self.session, self, host.timers, host.now)
        self._agent: Client | None = None
        self._heart: tuple[Heartbeat, AgentProcess] | None = None
        self._saves: dict[int, asyncio.Future[Saved]] = {}
        self._save_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._key: bytes | None = None
        self._events = EventQuota()
        self._begun_at = host.now()
        self._ended_at: float | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to look for the other daemons."""
        self._mesh.on_up = self._peer_up
        self._mesh.on_down = self._peer_down
        self._mesh.on_message = self._peer_message
        self._peering.start()

    @property
    def mesh(self) -> Mesh:
        """The links to the other daemons."""
        return self._mesh

    def tick(self) -> None:
        """Time has passed."""
        self.session.feed(e.Tick())
        self._peering.tick()
        if dropped := self._events.dropped(self._host.now()):
            text = f"{dropped} events of this node's agent are not written: it tells too many"
            self.note("warning", "events-dropped", text)
        self._look_at_agent()

    @property
    def forgettable(self) -> bool:
        """Whether the job has been over for long enough that everybody has heard of it."""
        return self._ended_at is not None and self._host.now() - self._ended_at > LINGER_S

    @property
    def goes_on(self) -> bool:
        """Whether the job is not over, and its agent is here."""
        return self._agent is not None and self.session.control.outcome is None

    @property
    def age_s(self) -> float:
        """Seconds since this daemon heard of the job."""
        return self._host.now() - self._begun_at

    def note(self, level: Literal["info", "warning", "error"], kind: str, text: str) -> None:
        """Put an event into every ledger of the job, and into the log."""
        self.session.feed(e.Report(self.roster.me, m.AgentEvent(level=level, kind=kind, text=text)))

    @property
    def _me(self) -> str:
        return f"node-{self.roster.me}"

    def set_aside(self, text: str) -> None:
        """The ledger was damaged. What this life has promised it still knows, and writes to the new one."""
        self.note("error", "ledger-damaged", f"{self._me}: {text}")
        self.save(self.session.control.agreement.durable, lambda: None, lambda _reason: None)

    def cut_short(self, reason: str) -> None:
        """Something above the job has ended it; where it is over already, nothing happens."""
        if self.session.control.outcome is None:
            self.session.feed(e.Report(self.roster.me, m.Cancel(exit_code=CUT_SHORT_CODE, reason=reason)))

    def lose(self, loss: e.NodeLost) -> None:
        """A node is lost, of which only this daemon may know; the others hear it from here."""
        self._peering.lose(loss)

    async def close(self) -> None:
        """Hang up everywhere; nothing is told to anybody."""
        self._closed = True
        await self._mesh.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._agent is not None:
            self._agent.close()
        self._forget_process()

    # ------------------------------------------------------------------------------------- peers

    def _peer_up(self, node: int) -> None:
        if self._key is not None:
            self._mesh.send_key(node, self._key)
        self._peering.linked(node)

    def _peer_down(self, node: int, why: str) -> None:
        logger.info("job %s: node-%d: %s", self.job, node, why)
        self._peering.unlinked(node, why)

    def _peer_message(self, node: int, message: p.DaemonMessage) -> None:
        if isinstance(message, p.PeerMessage) and message.job != self.job:
            raise ProtocolError(f"a message of job {message.job!r} over a connection of {self.job!r}")
        if isinstance(message, p.JobKey):
            self._learn_key(self._mesh.unmask(node, message))
        else:
            self._peering.hear(node, message)

    def _learn_key(self, key: bytes) -> None:
        """Two leaders may each have made one: everybody ends with the smaller."""
        if self._key is not None and self._key <= key:
            return
        self._key = key
        self._send_agent(m.JobKey(key=key))
        self._share_key()

    def _share_key(self) -> None:
        assert self._key is not None
        for node in self._mesh.up:
            self._mesh.send_key(node, self._key)

    # -------------------------------------------------------------------------- Wires, for Peering

    @property
    def up(self) -> Collection[int]:
        """See peering.Wires."""
        return self._mesh.up

    def want(self, nodes: frozenset[int]) -> None:
        """See peering.Wires."""
        self._mesh.want(nodes)

    def send(self, node: int, message: p.DaemonMessage) -> bool:
        """See peering.Wires."""
        return self._mesh.send(node, message)

    def hang_up(self, node: int, why: str) -> None:
        """See peering.Wires."""
        self._mesh.hang_up(node, why)

    def look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        """See peering.Wires."""
        self._spawn(self._look(node, address, agent=agent))

    def flush_soon(self) -> None:
        """See peering.Wires."""
        asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        if not self._closed:
            self._peering.flush()

    async def _look(self, node: int, address: tuple[str, int], *, agent: bool) -> None:
        answer = await _knock(address, self._host.timers.dark_s * LOOK_PART)
        if not agent and answer in ("open", "refused"):
            answer = "lives"
        self._peering.looked(node, answer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------- agent

    def agent_connected(self, client: Client) -> None:
        """The job's agent on this node is there; an older connection of it is forgotten."""
        self._agent = client
        self._forget_process()
        if client.pid != os.getpid():
            # Without its process, its end comes next; or it is in a PID namespace that is not seen from here.
            with contextlib.suppress(OSError):
                self._heart = (
                    Heartbeat(AGENT_DEADLINE_S, self._host.now()),
                    AgentProcess(client.pid, client.uid),
                )
        self._send_agent(m.Admitted(identity=self.identity))
        if self._key is not None:
            self._send_agent(m.JobKey(key=self._key))

    def agent_says(self, message: m.FromAgent | m.Pong | SaveDone) -> None:
        """A message of it."""
        if self._heart is not None:
            self._heart[0].heard(self._host.now())
        if isinstance(message, m.Pong):
            return
        if isinstance(message, SaveDone):
            self._saved(message)
            return
        if isinstance(message, m.AgentEvent) and not self._events.take(self._host.now()):
            return
        self.session.feed(e.Report(self.roster.me, message))
        if not self._confessed:
            self._confessed = True
            text = f"the daemon of {self._me} does not vote in this job: {self._forgot}"
            self.note("warning", "no-vote", text)

    def agent_gone(self, client: Client) -> None:
        """Its process is gone (or hung up, which it does only at its end)."""
        if self._agent is not client:
            return
        self._agent = None
        self._forget_process()
        for number in list(self._saves):
            gone = Saved(verdict="failed", text=f"the agent of job {self.job} on this node has ended")
            self._saved(SaveDone(number=number, answer=gone))
        if self.session.control.outcome is None:
            self.lose(e.NodeLost(self.roster.me, "its agent is gone", 0.0, source="agent"))

    def _look_at_agent(self) -> None:
        """Ask it for a sign of life; end one that is silent for too long."""
        if self._heart is None:
            return
        heartbeat, process = self._heart
        now = self._host.now()
        spec = self.session.control.spec
        if spec is not None:
            heartbeat.deadline_s = PONGS_PER_AGENT * spec.limits.pong_s
        if heartbeat.look(now):
            self._send_agent(m.Ping(seq=0))
        if not heartbeat.silent(now):
            return
        if process.suspended:
            # What it gets to answer begins when it goes on. One daemon asks whether all the job is stopped.
            if self.session.control.leads:
                self._host.ask_suspended(self, now - heartbeat.heard_at)
            heartbeat.heard(now)
            return
        text = f"its agent does not answer for {heartbeat.deadline_s:.0f} s"
        self.note("error", "agent-hung", f"node-{self.roster.me}: {text}: process {process.pid} is killed")
        try:
            process.kill()
        except OSError as error:
            self.note("error", "agent-hung", f"process {process.pid} cannot be killed: {error.strerror}")
        self._forget_process()
        if self.session.control.outcome is None:
            self.lose(e.NodeLost(self.roster.me, text, now - heartbeat.heard_at, source="agent"))
        if self._agent is not None:
            self._agent.close()

    def _forget_process(self) -> None:
        if self._heart is not None:
            self._heart[1].close()
            self._heart = None

    async def save_state(self, deadline_s: float) -> Saved:
        """Have the agents save the job's state; what came of it."""
        if self._agent is None:
            return Saved(verdict="elsewhere", text=f"job {self.job} has no agent on this node")
        self._save_count += 1
        number = self._save_count
        answer = self._saves[number] = asyncio.get_running_loop().create_future()
        self._send_agent(SaveNow(number=number, deadline_s=deadline_s))
        try:
            async with asyncio.timeout(deadline_s + SAVE_GRACE_S):
                said: Saved = await answer
                return said
        except TimeoutError:
            return Saved(verdict="failed", text=f"the agent has said nothing in {deadline_s:.0f} s")
        finally:
            del self._saves[number]

    def _saved(self, done: SaveDone) -> None:
        answer = self._saves.get(done.number)
        if answer is not None and not answer.done():
            answer.set_result(done.answer)

    def _send_agent(self, message: m.ToAgent | SaveNow) -> None:
        if self._agent is not None:
            self._agent.write(message)

    # ------------------------------------------------------------------- Outlets, for JobSession

    def to_daemon(self, node: int, message: p.Said) -> None:
        """See jobs.Outlets."""
        self._peering.to_daemon(node, message)

    def to_all_daemons(self, message: p.Said) -> None:
        """See jobs.Outlets. The first assignment goes with the key that its agents need."""
        decided = isinstance(message, p.Agree) and isinstance(message.say, Decided)
        if decided and self.session.control.leads and self._key is None:
            self._learn_key(new_key())
        self._peering.to_all(message)

    def to_agent(self, order: m.Order | m.Announce | m.Renewed) -> None:
        """See jobs.Outlets. A suspended one is not hung up on for days of unread renewals."""
        if self._agent is not None and not (isinstance(order, m.Renewed) and self._agent.has_unsent):
            self._agent.write(order)

    def write(self, records: Sequence[Record]) -> None:
        """See jobs.Outlets."""
        self._host.write(records)

    def ended(self, outcome: m.Outcome) -> None:
        """See jobs.Outlets."""
        self._ended_at = self._host.now()
        self._host.ended(self, outcome)

    def node_is_dark(self, node: int, reason: str, state: e.DarkState) -> None:
        """See jobs.Outlets."""
        self._host.node_is_dark(self, node, reason, state)

    def save(self, durable: Durable, then: Callable[[], None], failed: Callable[[str], None]) -> None:
        """See jobs.Outlets."""
        if self._forgot:
            # In its next life, too, it must know that there was more than this.
            return
        identity = self.next_identity = next_identity(self.next_identity)

        def written() -> None:
            if not self._closed:
                self.identity = identity
                self._send_agent(m.Admitted(identity=identity))
                then()

        def refused(reason: str) -> None:
            if not self._closed:
                failed(reason)

        self._host.save_vote(self, durable, written, refused)

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See jobs.Outlets."""
        self._host.witness(self, nodes, ours)

    def explain(self, node: int, cancel: m.Cancel) -> None:
        """See jobs.Outlets."""
        self._host.explain(self, node, cancel)

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


async def _knock(address: tuple[str, int], deadline_s: float) -> Answer:
    """Whether something listens there, or the machine says that nothing does, or nothing answers at all."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(deadline_s):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        # Who was late himself cannot tell: the answer may have come before the alarm.
        return "silent" if loop.time() - begun < 2 * deadline_s else "unsure"
    except OSError:
        return "silent"
    writer.close()
    return "open"
