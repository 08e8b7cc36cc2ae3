"""The daemon: start and stop, who may connect, and which jobs there are. The composition root."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ckptless import __version__
from ckptless.daemon.ckptlessd.admission import Admission
from ckptless.daemon.ckptlessd.clock import Clock
from ckptless.daemon.ckptlessd.cluster import Cluster
from ckptless.daemon.ckptlessd.consensus.quorum import first_decree
from ckptless.daemon.ckptlessd.health.watch import Health
from ckptless.daemon.ckptlessd.job_host import JobHost, Surroundings
from ckptless.daemon.ckptlessd.metrics.readings import Facts, LedgerFacts
from ckptless.daemon.ckptlessd.peering import Roster
from ckptless.daemon.ckptlessd.planning.event_lines import Line
from ckptless.daemon.ckptlessd.recovery import eviction, ledger_rows
from ckptless.daemon.ckptlessd.requests import drill, evict, resize, save
from ckptless.daemon.ckptlessd.requeue_memory import RequeueMemory
from ckptless.daemon.ckptlessd.requeue_table import Entry
from ckptless.daemon.ckptlessd.session import LIFE_BITS, Forgotten, Memory, recall
from ckptless.daemon.ckptlessd.state_dir import open_state_dir
from ckptless.daemon.ckptlessd.unix_server import Client, UnixServer, listen
from ckptless.daemon.ledger.reader import LedgerReader
from ckptless.daemon.ledger.store import RETENTION, Owner
from ckptless.daemon.ledger.writer import LedgerWriter
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import AGENT_LIMIT, HELLO_LIMIT, Decoder, check_protocol
from ckptless.daemon.protocol.errors import (
    CkptlessError,
    LedgerError,
    NewerLedgerError,
    PeerError,
    ProtocolError,
    StateDirError,
)
from ckptless.daemon.protocol.health import HealthReport, WhatIsWell
from ckptless.daemon.protocol.keeping import Claim, Keep, WhatIsKept
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Durable
from ckptless.daemon.protocol.records import printable
from ckptless.daemon.protocol.requests import DrillJob, Evict, Read, ResizeJob
from ckptless.daemon.protocol.saving import Save, SaveDone
from ckptless.daemon.settings.config import DaemonConfig, Timers
from ckptless.daemon.transport.credentials import Credentials
from ckptless.daemon.transport.link import Link
from ckptless.daemon.transport.listener import Listener
from ckptless.daemon.transport.tasks import Tasks, end_all

logger = logging.getLogger(__name__)

TICK_S = 0.05
LEDGER_FILE = "ledger.db"
# EX_CONFIG of sysexits(3): it would end like this again, so the unit has it as RestartPreventExitStatus=.
NOT_AGAIN = 78
# Whoever connects says in this time what it wants.
SPEAK_S = 5.0
# Of one Slurm job on this node, at a time. So many that are over are remembered, too.
RUNS_PER_JOB = 16
# A hello counts as so many messages: a new run is built for it, and written to the disk.
HELLO_COST = 20
_Aside: TypeAlias = (
    m.JobStarted
    | m.JobEnded
    | Evict
    | DrillJob
    | ResizeJob
    | Save
    | Read
    | WhatIsKept
    | WhatIsWell
    | Keep
    | Claim
)
_Heard: TypeAlias = m.FromAgent | m.Pong | SaveDone | _Aside
# So long an answer may wait for whoever does not read it.
ANSWER_DEADLINE_S = 10.0


class Service:
    """One daemon. `run` returns when it is told to stop.

    `agents` is the Unix socket that systemd listens on for it, if it does; it stays when the daemon ends.
    """

    def __init__(
        self,
        config: DaemonConfig,
        cluster: Cluster,
        credentials: Credentials,
        agents: socket.socket | None = None,
    ) -> None:
        self._config, self._cluster = config, cluster
        self._agents = agents
        self._server: UnixServer | None = None
        self._admission = Admission((0, os.getuid()))
        # Of other nodes, by their address: what is logged of them.
        self._greeting = Admission()
        self._listener = Listener(self._peer_connected, on_refused=self._peer_refused)
        self.now = Clock().now
        state_dir = Path(config.state_dir)
        self.ledger = LedgerWriter(state_dir / LEDGER_FILE, lambda: open_state_dir(state_dir))
        self.ledger.on_set_aside = self._set_aside
        self.retention = RETENTION
        self._reader = LedgerReader(state_dir / LEDGER_FILE)
        self._tasks = Tasks()
        self._around = Surroundings(self.now, config.timers, credentials, self.ledger, cluster, self._tasks)
        self.requeue_memory = RequeueMemory(config.keep, self.now)
        self.requeue_memory.on_event = self._kept
        self._jobs: dict[str, JobHost] = {}
        self._admitting = asyncio.Lock()
        # Of a local run's node nobody looks at the health.
        self.health: Health | None = None
        self.on_tick: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None

    def set_timers(self, timers: Timers) -> None:
        """Set how daemons watch each other, in jobs that begin from now on."""
        self._around.timers = timers

    @property
    def jobs(self) -> tuple[JobHost, ...]:
        """Return the jobs that run, and those that ended lately."""
        return tuple(self._jobs.values())

    def facts(self) -> Facts:
        """Return what its metrics are made of."""
        ledger = self.ledger
        return Facts(
            jobs={job.job: job.session.control for job in self.jobs},
            tally=self._around.tally,
            ledger=LedgerFacts(ledger.nbytes, ledger.waiting, ledger.lost, not ledger.trouble),
            health=self.health.report(evidence=False) if self.health is not None else None,
            version=__version__,
            now=self.now(),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises OSError where an address is taken."""
        listening: socket.socket | None = None
        try:
            self._listener.open(self._config.address, self._config.port)
            await self.ledger.start()
            self._tasks.spawn(self._prune())
            # Last: whoever finds the socket finds a daemon that is ready.
            listening = self._agents or listen(Path(self._config.socket), self._config.socket_mode)
            self._server = UnixServer(listening, self._admission, self.now, self._connected)
            self._server.start()
            self._tasks.spawn(self._tick())
            self.on_ready()
            # no deadline: a daemon's life
            await stop.wait()
        finally:
            await self._listener.close()
            if self._server is not None:
                self._server.close()
            if listening is not None and listening is not self._agents:
                listening.close()
                Path(self._config.socket).unlink(missing_ok=True)
            await self._close()

    async def _close(self) -> None:
        await end_all(self._tasks)
        # no deadline: what they wait for is cancelled first
        await asyncio.gather(*(job.close() for job in self._jobs.values()))
        self.requeue_memory.close()
        self._reader.close()
        await self.ledger.close()

    async def _tick(self) -> None:
        while True:
            due_s = self.now() + TICK_S
            await asyncio.sleep(TICK_S)
            self._around.tally.delays.add(max(0.0, self.now() - due_s))
            for name, job in list(self._jobs.items()):
                if not self._ticked(job) or job.forgettable:
                    del self._jobs[name]
                    self._tasks.spawn(job.close())
                    self._tasks.spawn(self._prune())
            self.requeue_memory.look()
            if self._server is not None:
                self._server.look()
            self.on_tick()

    async def _prune(self) -> None:
        try:
            removed = await self.ledger.call(lambda ledger: ledger.prune(self.now(), self.retention))
        except LedgerError as error:
            logger.warning("nothing of older jobs could be removed: %s", error)
        else:
            if removed:
                logger.warning(
                    "ledger.size: %d jobs that were over first are removed before their time", removed
                )

    @staticmethod
    def _ticked(job: JobHost) -> bool:
        """One job's mistake must not be the end of the others."""
        try:
            job.tick()
        except Exception:
            logger.exception("job %s: its control plane has failed; it is given up here", job.job)
            return False
        return True

    # ------------------------------------------------------------------------------------- peers

    def _peer_connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._serve_peer(reader, writer))

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Another daemon has dialled, for one job; it dials again until this daemon knows that job."""
        who = str((writer.get_extra_info("peername") or ("?",))[0])
        try:
            link: Link[p.DaemonMessage] = await Link.accept(
                (reader, writer), self._node_in, self._around.credentials, p.DaemonMessage
            )
            await self._linked(link.job).peer_links.adopt(link)
        except _UnknownJobError as error:
            logger.debug("%s: %s", who, error)
        except (OSError, TimeoutError, CkptlessError) as error:
            self._peer_refused(who, str(error) or type(error).__name__)

    def _peer_refused(self, who: str, why: str) -> None:
        self._greeting.tell_refused(who, f"a connection from {who}: {why}", self.now())

    def _node_in(self, link: str) -> int:
        return self._linked(link).roster.me

    def _linked(self, link: str) -> JobHost:
        """The run that a connection is for; see PeerLinks.name. Raises _UnknownJobError."""
        for job in self._jobs.values():
            if job.peer_links.name == link:
                return job
        raise _UnknownJobError(f"job {link!r} is not known here (yet)")

    # ------------------------------------------------------------------------------------ agents

    def _connected(self, client: Client) -> None:
        self._tasks.spawn(self._serve_client(client))

    async def _serve_client(self, client: Client) -> None:
        """A local process, from its first message to the end of its connection."""
        decoder: Decoder[_Heard] = Decoder(_Heard, HELLO_LIMIT)
        visit = _Visit(client, decoder)
        try:
            while data := await self._read(visit):
                await self._pace(client, 0, len(data))
                for message in decoder.feed(data):
                    await self._pace(client, HELLO_COST if isinstance(message, m.AgentHello) else 1, 0)
                    client.stays = True
                    await self._hear(message, visit)
                    client.stays = visit.job is not None
        except (CkptlessError, ConnectionError) as error:
            assert self._server is not None
            self._server.tell_refused(client.pid, client.uid, str(error))
            if visit.job is None and isinstance(error, CkptlessError):
                client.write(m.Denied(reason=str(error)))
        except asyncio.CancelledError:
            visit.job = None  # it is this daemon that ends, of which nothing follows for the agent
            raise
        finally:
            client.close()
            if visit.job is not None:
                visit.job.agent_gone(client)

    async def _read(self, visit: "_Visit") -> bytes:
        """Return what has come. Raises PeerError where somebody who is no agent yet takes too long."""
        client = visit.client
        if visit.job is not None:
            return await client.read()
        try:
            async with asyncio.timeout(SPEAK_S):
                data = await client.read()
        except TimeoutError as error:
            raise PeerError(f"it has not said in {SPEAK_S:.0f} s what it wants") from error
        if not visit.begun:
            visit.begun = True
            if int.from_bytes(data[:4], "little") > HELLO_LIMIT and await self._has_job(client.uid):
                visit.decoder.limit = AGENT_LIMIT  # a job of thousands of nodes names them
        return data

    async def _pace(self, client: Client, messages: int, nbytes: int) -> None:
        """Wait, so that no user takes more than a part of this daemon's time; others come in between."""
        await asyncio.sleep(self._admission.pace(client.uid, messages, nbytes, self.now()))

    async def _has_job(self, uid: int) -> bool:
        return uid in (0, os.getuid()) or await self._cluster.has_job(uid)

    async def _hear(self, message: _Heard, visit: "_Visit") -> None:
        """A message of whoever has connected. Raises CkptlessError."""
        client = visit.client
        if isinstance(message, _Aside):
            await self._aside(message, client)
            return
        if isinstance(message, m.AgentHello):
            if visit.job is not None:
                raise ProtocolError("an agent says hello once")
            visit.job = await self._admit(message, client.uid)
            visit.decoder.limit = AGENT_LIMIT
            visit.job.agent_connected(client)
        if visit.job is None:
            raise ProtocolError("the first message of an agent must be its hello")
        visit.job.agent_says(message)

    async def _aside(self, message: _Aside, client: Client) -> None:
        """Answer what others than agents say, and they on a connection of its own. Raises CkptlessError."""
        if isinstance(message, Evict):
            client.write(evict(self.jobs, message, client.uid))
        elif isinstance(message, DrillJob):
            client.write(drill(self.jobs, message, client.uid))
        elif isinstance(message, ResizeJob):
            client.write(resize(self.jobs, message, client.uid))
        elif isinstance(message, Read):
            await self._read_out(message, client)
        elif isinstance(message, Keep | Claim):
            await self._move_memory(message, client)
        elif isinstance(message, WhatIsKept):
            client.write(self.requeue_memory.shown(client.uid))
        elif isinstance(message, WhatIsWell):
            client.write(self._health_of(message, client.uid))
        elif isinstance(message, Save):
            client.write(await save(self.jobs, message, client.uid))
        else:
            self._notice(message, client.uid)

    def _health_of(self, message: WhatIsWell, uid: int) -> HealthReport:
        """Return how this node is. Raises ProtocolError."""
        check_protocol(message.protocol, "ckptctl")
        if self.health is None:
            return HealthReport(node=self._config.name, act=None)
        return self.health.report(evidence=eviction.sees_all(uid, os.getuid()))

    async def _read_out(self, message: Read, client: Client) -> None:
        """Send what the ledger has of a job of the asker's. Raises CkptlessError."""
        sees_all = eviction.sees_all(client.uid, os.getuid())
        client.write_frame(await self._reader.answer(message, client.uid, sees_all=sees_all))
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                await client.drain()
        except TimeoutError as error:
            raise PeerError("it does not read what it has asked for") from error

    async def _move_memory(self, message: Keep | Claim, client: Client) -> None:
        """An ending agent's memory comes here, or that of an earlier start goes back. Raises CkptlessError.

        The other end sends nothing more before it is answered, so that no descriptor is lost in the stream.
        """
        try:
            if isinstance(message, Claim):
                await self._cluster.check_owner(message.run, client.uid)
                await self.requeue_memory.give(message, client.uid, client)
            else:
                owner = (client.uid, self._keeps_for(message.run, client.uid))
                await self.requeue_memory.take(message, owner, client)
            client.close()
        except OSError as error:
            raise PeerError(f"memory of run {message.run}: {error or type(error).__name__}") from error

    def _keeps_for(self, name: str, uid: int) -> int:
        """Return this node's number in a run whose agent may leave its memory here. Raises PeerError."""
        run = self._jobs.get(name)
        if run is None or run.uid != uid:
            raise PeerError(f"no run {name!r} of uid {uid} is known here")
        outcome = run.session.control.outcome
        if outcome is not None and outcome.state == "done":
            raise PeerError(f"run {name} is done: there is nothing to go on with")
        return run.roster.me

    def _kept(self, entry: Entry, kind: str, text: str) -> None:
        """Write an event of kept memory to this daemon's own ledger alone: the job may be long over."""
        level: Literal["info", "warning"] = "warning" if kind == "memory-dropped" else "info"
        logger.info("job %s: %s: %s", entry.run, kind, text)
        event_id = f"{entry.node}.{secrets.token_hex(5)}.{kind}"
        said = Line(level, kind, text)
        row = ledger_rows.event(event_id, entry.run, entry.node, said, (self.now(), None))
        self.ledger.write([printable(row)])

    def _set_aside(self, text: str) -> None:
        for job in self._jobs.values():
            job.set_aside(text)
            self._tasks.spawn(self._own(job.job, Owner(job.uid, job.launch), anew=False))

    def _notice(self, message: m.JobStarted | m.JobEnded, uid: int) -> None:
        """The prolog's and the epilog's word, which counts only from root. Raises PeerError."""
        if uid not in (0, os.getuid()):
            raise PeerError(f"uid {uid} may not say when jobs begin and end")
        check_protocol(message.protocol, "ckptless-notify or the SPANK plugin")
        self._cluster.notice(message)
        if isinstance(message, m.JobEnded):
            for name, job in self._jobs.items():
                # Of a node that was given back Slurm only takes it from the job, which goes on.
                if name.partition(".")[0] == str(message.job_id) and not job.is_given_back:
                    job.cut_short("Slurm has ended the job")

    async def _admit(self, hello: m.AgentHello, uid: int) -> JobHost:
        """The runtime of an agent's job. Raises ProtocolError or PeerError."""
        check_protocol(hello.protocol, "the agent")
        name = hello.spec.job
        roster = await self._cluster.admit(hello, uid)
        # One after the other: two runs of one name must not have their records mixed.
        async with self._admitting:
            await self._let_go(name, hello.spec.launch, roster.me)
            if name not in self._jobs:
                self._make_room(name)
                await self._own(name, Owner(uid, hello.spec.launch), anew=not hello.identity)
                memory = await self._remember(hello, roster)
                self._jobs[name] = JobHost(name, uid, roster, self._around, memory)
                self._jobs[name].start()
        known = self._jobs[name]
        if (known.uid, known.roster) != (uid, roster):
            raise PeerError(f"job {name} is known with other nodes or another user")
        return known

    async def _let_go(self, name: str, launch: str, me: int) -> None:
        """Forget another run of this name, or that this node had another number in this one before.

        Raises PeerError where that goes on here.
        """
        known = self._jobs.get(name)
        if known is None or (known.launch == launch and known.roster.me == me):
            return
        if known.launch == launch and not known.goes_on:
            logger.info("job %s: this node was node-%d, and is node-%d now", name, known.roster.me, me)
        elif known.goes_on:
            raise PeerError(f"another run called {name} goes on here: give all runs of a job one --log-dir")
        del self._jobs[name]
        await known.close()

    def _make_room(self, name: str) -> None:
        """Let a job have one run more; one that is over makes room for it. Raises PeerError."""
        job = name.partition(".")[0]
        runs = {one: run for one, run in self._jobs.items() if one.partition(".")[0] == job}
        over = [one for one, run in runs.items() if run.is_over]
        if len(runs) - len(over) >= RUNS_PER_JOB:
            raise PeerError(f"job {job} has {RUNS_PER_JOB} runs already, which is the most at a time")
        if len(over) >= RUNS_PER_JOB:
            self._tasks.spawn(self._jobs.pop(over[0]).close())

    async def _own(self, name: str, owner: Owner, *, anew: bool) -> None:
        """Note whose run it is. Raises PeerError; LedgerError where it begins `anew`."""
        try:
            before = await self.ledger.own(name, owner, anew=anew)
        except LedgerError as error:
            if anew:
                raise
            logger.warning("job %s: uid %d cannot read of it here: %s", name, owner.uid, error)
            return
        if before is not None and not anew:
            raise PeerError(f"a later run has the name {name} here")
        if before is not None:
            logger.warning("job %s: an earlier run had this name; its records are removed", name)

    async def _remember(self, hello: m.AgentHello, roster: Roster) -> Memory:
        """Return what this daemon has promised the others, from the disk. Raises LedgerError."""
        name, launch = hello.spec.job, hello.spec.launch
        # The same for every daemon of the job, as its agents all have their spec from one launcher.
        first = first_decree(roster.founders, hello.spec.domains)
        nothing = Durable(promised=NO_BALLOT, vote=None, known=first)
        life = secrets.randbits(LIFE_BITS)
        try:
            kept = await self.ledger.vote(name)
        except LedgerError as error:
            if not hello.identity:
                raise
            return self._forgotten(hello, nothing, f"its ledger cannot be read: {error}")
        match recall(kept, launch, hello.identity):
            case Forgotten(why):
                return self._forgotten(hello, nothing, why)
            case (identity, durable):
                return Memory(life, identity, durable, launch=launch)
        identity = launch + secrets.token_hex(8)
        # Before the agent hears of it: whoever knows the identity knows that there was something to forget.
        # And a job that this daemon could not vote for does not begin here.
        await self.ledger.save_now(name, identity, nothing)
        if self.ledger.trouble:
            raise LedgerError(self.ledger.trouble)
        return Memory(life, identity, nothing, launch=launch)

    @staticmethod
    def _forgotten(hello: m.AgentHello, nothing: Durable, why: str) -> Memory:
        """Return the memory of one that may have promised anything: it neither votes nor leads."""
        logger.warning("job %s: this daemon does not vote: %s", hello.spec.job, why)
        life = secrets.randbits(LIFE_BITS)
        return Memory(life, hello.identity, nothing, lost=why, launch=hello.spec.launch)


@dataclass
class _Visit:
    """A connection of a local process; `job` is its agent's, once it has been let in."""

    client: Client
    decoder: Decoder[_Heard]
    job: JobHost | None = None
    begun: bool = False


class _UnknownJobError(PeerError):
    """Another daemon was faster: its agent is here already, ours is not yet."""


async def serve_forever(service: Service, stop: asyncio.Event) -> int:
    """Run a daemon; its exit code. An error of the tree is logged in one line."""
    try:
        await service.run(stop)
    except (NewerLedgerError, StateDirError) as error:
        logger.error("%s; then start ckptlessd again", error)  # noqa: TRY400  # see below
        return NOT_AGAIN
    except CkptlessError as error:
        logger.error("%s", error)  # noqa: TRY400  # one sentence; the traceback says nothing more
        return error.exit_code
    except OSError as error:
        logger.error("cannot listen: %s", error)  # noqa: TRY400
        return 3
    return 0
