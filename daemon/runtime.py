"""One job in this daemon, at its edges: links to other daemons, the local agent, probes, the job's key."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.codec import encode
from ckptless.daemon.api.errors import ProtocolError
from ckptless.daemon.api.records import Record
from ckptless.daemon.config import Timers
from ckptless.daemon.control import edges as e
from ckptless.daemon.control.decree import Decided, Durable
from ckptless.daemon.jobs import JobSession, Memory
from ckptless.daemon.mesh import Mesh
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.handshake import new_key
from ckptless.daemon.peers.vouch import Vouch
from ckptless.daemon.roster import Roster

logger = logging.getLogger(__name__)

PROBE_S = 0.1
PROBE_DEADLINE_S = 0.5
# A daemon that was away asks the others how the job ended.
LINGER_S = 120.0
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

    def node_is_dark(self, runtime: "JobRuntime", node: int, reason: str) -> None:
        """This daemon leads, and one of the job's nodes does not answer any more at all."""

    def save_vote(self, runtime: "JobRuntime", durable: Durable, then: Callable[[], None]) -> None:
        """See jobs.Outlets.save."""

    def witness(self, runtime: "JobRuntime", nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See roster.Cluster."""


class JobRuntime:
    """Owned by the daemon's event loop."""

    def __init__(self, job: str, uid: int, roster: Roster, host: Host, memory: Memory) -> None:
        self.job, self.uid, self.roster = job, uid, roster
        self.identity, self._forgot = memory.identity, memory.lost
        self._host = host
        self.session = JobSession(job, roster, self, host.now, memory)
        self._mesh = Mesh(job, roster, host.vouch, host.timers)
        self._agent: asyncio.StreamWriter | None = None
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._key: bytes | None = None
        self._begun_at = host.now()
        self._ended_at: float | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to look for the other daemons."""
        self._mesh.on_up = self._peer_up
        self._mesh.on_down = self._peer_down
        self._mesh.on_message = self._peer_message
        self._mesh.start()
        for node in self.roster.nodes:
            # Until its daemon has been met, whether a node lives is asked of its agent.
            if node != self.roster.me:
                self._probe_from_now(node, None, 0.0)

    @property
    def mesh(self) -> Mesh:
        """The links to the other daemons."""
        return self._mesh

    def tick(self) -> None:
        """Time has passed."""
        self.session.feed(e.Tick())

    @property
    def forgettable(self) -> bool:
        """Whether the job has been over for long enough that everybody has heard of it."""
        return self._ended_at is not None and self._host.now() - self._ended_at > LINGER_S

    @property
    def age_s(self) -> float:
        """Seconds since this daemon heard of the job."""
        return self._host.now() - self._begun_at

    def note(self, level: Literal["info", "warning", "error"], kind: str, text: str) -> None:
        """Put an event into every ledger of the job, and into the log."""
        self.session.feed(e.Report(self.roster.me, m.AgentEvent(level=level, kind=kind, text=text)))

    def cut_short(self, reason: str) -> None:
        """Something above the job has ended it; where it is over already, nothing happens."""
        if self.session.control.outcome is None:
            self.session.feed(e.Report(self.roster.me, m.Cancel(exit_code=CUT_SHORT_CODE, reason=reason)))

    async def close(self) -> None:
        """Hang up everywhere; nothing is told to anybody."""
        self._closed = True
        await self._mesh.close()
        for task in self._probes.values():
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        if self._agent is not None:
            self._agent.close()

    # ------------------------------------------------------------------------------------- peers

    def _peer_up(self, node: int) -> None:
        probe = self._probes.pop(node, None)
        if probe is not None:
            probe.cancel()
        if self._key is not None:
            self._mesh.send_key(node, self._key)
        self.session.feed(e.Connected(node))

    def _peer_down(self, node: int, why: str, quiet_s: float) -> None:
        logger.info("%s: node-%d: %s (last heard of %.2f s ago)", self.job, node, why, quiet_s)
        self.session.feed(e.PeerDown(node))
        self._probe_from_now(node, why, quiet_s)

    def _peer_message(self, node: int, message: p.DaemonMessage) -> None:
        if isinstance(message, p.Beat):
            return
        if message.job != self.job:
            raise ProtocolError(f"a message of job {message.job!r} over a connection of {self.job!r}")
        if isinstance(message, p.JobKey):
            self._learn_key(self._mesh.unmask(node, message))
        else:
            self.session.hear(node, message)

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

    # ------------------------------------------------------------------------------------ probes

    def _probe_from_now(self, node: int, why: str | None, quiet_s: float) -> None:
        if node not in self._probes:
            self._probes[node] = asyncio.create_task(self._probe(node, why, quiet_s))

    async def _probe(self, node: int, why: str | None, quiet_s: float) -> None:
        """A daemon is away. While its agent answers, its node lives; once it does not, the node is lost.

        `why` its connection ended, None where there was none yet; it had been silent for `quiet_s` then.
        """
        loop = asyncio.get_running_loop()
        since = loop.time() - quiet_s
        control = self.session.control
        while control.nodes[node].lost is None and control.outcome is None:
            address = self.session.agent_address(node)
            answer = await _knock(address) if address is not None else None
            self.session.feed(e.AgentAnswers(node, answer == "open"))
            dark = loop.time() - since > self._host.timers.dark_s
            gone: str | None = None
            if answer == "refused":
                gone = "its agent is gone"
            elif dark and address is not None and answer is None:
                gone = "its agent cannot be reached"
            elif dark and address is None and why is not None:
                gone = "no agent of it is known"
            # Who hears nobody may be the one that is cut off: it says nothing of the others.
            if gone is not None and (answer == "refused" or control.decides):
                reason = f"{why or 'its daemon was never met'}; {gone}"
                quiet_s, dark = loop.time() - since, answer is None
                self.lose(e.NodeLost(node, reason, quiet_s, dark, source="membership"))
                return
            await asyncio.sleep(PROBE_S)

    def lose(self, loss: e.NodeLost) -> None:
        """A node is lost, of which only this daemon may know; the others hear it from here."""
        self.session.feed(loss)
        self.to_all_daemons(
            p.Gone(
                job=self.job,
                node=loss.node,
                reason=loss.reason,
                age_s=loss.age_s,
                source=loss.source,
                dark=loss.dark,
            )
        )

    # ------------------------------------------------------------------------------------- agent

    def agent_connected(self, writer: asyncio.StreamWriter) -> None:
        """The job's agent on this node is there; an older connection of it is forgotten."""
        self._agent = writer
        self._send_agent(m.Admitted(identity=self.identity))
        if self._key is not None:
            self._send_agent(m.JobKey(key=self._key))

    def agent_says(self, message: m.FromAgent) -> None:
        """A message of it."""
        self.session.feed(e.Report(self.roster.me, message))

    def agent_gone(self, writer: asyncio.StreamWriter) -> None:
        """Its process is gone (or hung up, which it does only at its end)."""
        if self._agent is not writer:
            return
        self._agent = None
        if self.session.control.outcome is None:
            self.lose(e.NodeLost(self.roster.me, "its agent is gone", 0.0, source="agent"))

    def _send_agent(self, message: m.ToAgent) -> None:
        if self._agent is not None:
            self._agent.write(encode(message))

    # ------------------------------------------------------------------- Outlets, for JobSession

    def to_daemon(self, node: int, message: p.DaemonMessage) -> None:
        """See jobs.Outlets."""
        self._mesh.send(node, message)

    def to_all_daemons(self, message: p.DaemonMessage) -> None:
        """See jobs.Outlets. The first assignment goes with the key that its agents need."""
        decided = isinstance(message, p.Agree) and isinstance(message.say, Decided)
        if decided and self.session.control.leads and self._key is None:
            self._learn_key(new_key())
        self._mesh.send_all(message)

    def to_agent(self, order: m.Order) -> None:
        """See jobs.Outlets."""
        self._send_agent(order)

    def write(self, records: Sequence[Record]) -> None:
        """See jobs.Outlets."""
        self._host.write(records)

    def ended(self, outcome: m.Outcome) -> None:
        """See jobs.Outlets."""
        self._ended_at = self._host.now()
        self._host.ended(self, outcome)

    def node_is_dark(self, node: int, reason: str) -> None:
        """See jobs.Outlets."""
        self._host.node_is_dark(self, node, reason)

    def save(self, durable: Durable, then: Callable[[], None]) -> None:
        """See jobs.Outlets."""
        if self._forgot:
            # In its next life, too, it must know that there was more than this.
            return
        self._host.save_vote(self, durable, lambda: None if self._closed else then())

    def ask_witness(self, nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See jobs.Outlets."""
        self._host.witness(self, nodes, ours)

    def witnessed(self, nodes: Sequence[int]) -> None:
        """The cluster's manager holds these nodes for dead; see `roster.Cluster.witness`."""
        self.session.feed(e.Witnessed(tuple(nodes)))


async def _knock(address: tuple[str, int]) -> str | None:
    """Whether something listens: "open", "refused" (the machine lives, the process does not) or None."""
    try:
        async with asyncio.timeout(PROBE_DEADLINE_S):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, TimeoutError):
        return None
    writer.close()
    return "open"
