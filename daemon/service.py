"""The daemon: start and stop, who may connect, and which jobs there are. The composition root."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.codec import CONTROL_LIMIT, Decoder, check_protocol, encode
from ckptless.daemon.api.errors import CkptlessError, LedgerError, PeerError, ProtocolError
from ckptless.daemon.api.eviction import Evict
from ckptless.daemon.api.fdsocket import FdSocket
from ckptless.daemon.api.keeping import Claim, Keep, Taken, WhatIsKept
from ckptless.daemon.api.peercred import peer_credentials
from ckptless.daemon.api.reading import Read
from ckptless.daemon.api.records import Record
from ckptless.daemon.api.saving import Save, SaveDone
from ckptless.daemon.api.unixpath import is_abstract, unix_address
from ckptless.daemon.clock import Clock
from ckptless.daemon.cluster import Cluster
from ckptless.daemon.config import DaemonConfig, Timers
from ckptless.daemon.control import eviction, story
from ckptless.daemon.control.decree import NO_BALLOT, Durable, first_decree
from ckptless.daemon.control.edges import DarkState
from ckptless.daemon.control.keeping import Entry
from ckptless.daemon.control.telling import Line
from ckptless.daemon.evict import evict
from ckptless.daemon.jobs import LIFE_BITS, Memory, is_as_new
from ckptless.daemon.keeper import Keeper
from ckptless.daemon.ledger.reader import LedgerReader
from ckptless.daemon.ledger.writer import LedgerWriter
from ckptless.daemon.peers import messages as p
from ckptless.daemon.peers.link import Link, serve
from ckptless.daemon.peers.vouch import Vouch
from ckptless.daemon.roster import Roster
from ckptless.daemon.runtime import JobRuntime
from ckptless.daemon.save import save
from ckptless.daemon.state_dir import open_state_dir

logger = logging.getLogger(__name__)

TICK_S = 0.05
LEDGER_FILE = "ledger.db"
READ_NBYTES = 1 << 16
_Aside: TypeAlias = m.JobStarted | m.JobEnded | Evict | Save | Read | WhatIsKept | Keep | Claim
_Heard: TypeAlias = m.FromAgent | m.Pong | SaveDone | _Aside
_ASIDE = (m.JobStarted, m.JobEnded, Evict, Save, Read, WhatIsKept, Keep, Claim)
# So long an answer may wait for whoever does not read it.
ANSWER_DEADLINE_S = 10.0


class Service:
    """One daemon. `run` returns when it is told to stop. Also the Host of its jobs.

    `agents` is the Unix socket that systemd listens on for it, if it does; it stays when the daemon ends.
    """

    def __init__(
        self, config: DaemonConfig, cluster: Cluster, vouch: Vouch, agents: socket.socket | None = None
    ) -> None:
        self._config, self._cluster = config, cluster
        self._agents = agents
        self.vouch = vouch
        self.timers: Timers = config.timers
        self.now: Callable[[], float] = Clock().now
        self._state_dir = Path(config.state_dir)
        self.ledger = LedgerWriter(self._state_dir / LEDGER_FILE, lambda: open_state_dir(self._state_dir))
        self.ledger.on_set_aside = self._set_aside
        self._reader = LedgerReader(self._state_dir / LEDGER_FILE)
        self.keeper = Keeper(config.keep, self.now)
        self.keeper.on_event = self._kept
        self._jobs: dict[str, JobRuntime] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_tick: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None

    @property
    def jobs(self) -> tuple[JobRuntime, ...]:
        """Those that run, and those that ended lately."""
        return tuple(self._jobs.values())

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises OSError where an address is taken."""
        servers: list[asyncio.Server] = []
        try:
            peers, _ = await serve(self._config.address, self._config.port, self._peer_connected)
            servers.append(peers)
            await self.ledger.start()
            # Last: whoever finds the socket finds a daemon that is ready.
            servers.append(await self._listen())
            self._spawn(self._tick())
            self.on_ready()
            # no deadline: a daemon's life
            await stop.wait()
        finally:
            for server in servers:
                server.close()
            await self._close()

    async def _listen(self) -> asyncio.Server:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._spawn(self._agent_connected(reader, writer))

        if self._agents is not None:
            return await asyncio.start_unix_server(connected, sock=self._agents)
        name = self._config.socket
        if is_abstract(name):
            return await asyncio.start_unix_server(connected, unix_address(name))
        Path(name).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        Path(name).unlink(missing_ok=True)
        server = await asyncio.start_unix_server(connected, name)
        Path(name).chmod(self._config.socket_mode)
        return server

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(job.close() for job in self._jobs.values()))
        self.keeper.close()
        self._reader.close()
        await self.ledger.close()
        if self._agents is None and not is_abstract(self._config.socket):
            Path(self._config.socket).unlink(missing_ok=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for name, job in list(self._jobs.items()):
                if not self._ticked(job) or job.forgettable:
                    del self._jobs[name]
                    self._spawn(job.close())
            self.keeper.look()
            self.on_tick()

    @staticmethod
    def _ticked(job: JobRuntime) -> bool:
        """One job's mistake must not be the end of the others."""
        try:
            job.tick()
        except Exception:
            logger.exception("job %s: its control plane has failed; it is given up here", job.job)
            return False
        return True

    # ------------------------------------------------------------------------------------- peers

    def _peer_connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._serve_peer(reader, writer))

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Another daemon has dialled, for one job; it dials again until this daemon knows that job."""
        who = writer.get_extra_info("peername")
        try:
            link: Link[p.DaemonMessage] = await Link.accept(
                (reader, writer), self._node_in, self.vouch, p.DaemonMessage
            )
            await self._jobs[link.job].mesh.adopt(link)
        except _UnknownJobError as error:
            logger.debug("%s: %s", who, error)
        except (OSError, TimeoutError, CkptlessError) as error:
            logger.warning("refused a connection from %s: %s", who, error or type(error).__name__)

    def _node_in(self, job: str) -> int:
        if job not in self._jobs:
            raise _UnknownJobError(f"job {job!r} is not known here (yet)")
        return self._jobs[job].roster.me

    # ------------------------------------------------------------------------------------ agents

    async def _agent_connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An agent, from its hello to the end of its connection."""
        pid, uid = peer_credentials(writer.get_extra_info("socket"))
        decoder: Decoder[_Heard] = Decoder(_Heard, CONTROL_LIMIT)
        job: JobRuntime | None = None
        try:
            while data := await reader.read(READ_NBYTES):
                for message in decoder.feed(data):
                    if isinstance(message, _ASIDE):
                        await self._aside(message, uid, writer)
                        continue
                    if isinstance(message, m.AgentHello):
                        job = await self._admit(message, uid)
                        job.agent_connected(writer)
                    if job is None:
                        raise ProtocolError("the first message of an agent must be its hello")
                    job.agent_says(message)
        except (CkptlessError, ConnectionError) as error:
            logger.warning("agent %d of uid %d: %s", pid, uid, error)
            if job is None and isinstance(error, CkptlessError):
                writer.write(encode(m.Denied(reason=str(error))))
        except asyncio.CancelledError:
            job = None  # it is this daemon that ends, of which nothing follows for the agent
            raise
        finally:
            writer.close()
            if job is not None:
                job.agent_gone(writer)

    async def _aside(self, message: _Aside, uid: int, writer: asyncio.StreamWriter) -> None:
        """What others than agents say, and they on a connection of its own. Raises CkptlessError."""
        if isinstance(message, Evict):
            writer.write(encode(evict(self.jobs, message, uid)))
        elif isinstance(message, Read):
            await self._read_out(message, uid, writer)
        elif isinstance(message, Keep | Claim):
            await self._move_memory(message, uid, writer)
        elif isinstance(message, WhatIsKept):
            writer.write(encode(self.keeper.shown(uid)))
        elif isinstance(message, Save):
            self._spawn(self._save(message, uid, writer))
        else:
            self._notice(message, uid)

    async def _save(self, message: Save, uid: int, writer: asyncio.StreamWriter) -> None:
        answer = await save(self.jobs, message, uid)
        if not writer.is_closing():
            writer.write(encode(answer))

    async def _read_out(self, message: Read, uid: int, writer: asyncio.StreamWriter) -> None:
        """What the ledger has of a job of the asker's. Raises CkptlessError."""
        sees_all = eviction.sees_all(uid, os.getuid())
        writer.write(await self._reader.answer(message, uid, sees_all=sees_all))
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                await writer.drain()
        except TimeoutError as error:
            raise PeerError("it does not read what it has asked for") from error

    async def _move_memory(self, message: Keep | Claim, uid: int, writer: asyncio.StreamWriter) -> None:
        """An ending agent's memory comes here, or that of an earlier start goes back. Raises CkptlessError.

        The other end sends nothing more before it is answered, so that no descriptor is lost in the stream.
        """
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a ReadTransport, too
        try:
            fd = os.dup(writer.get_extra_info("socket").fileno())
        except OSError as error:
            raise PeerError(f"run {message.run}: it has hung up already") from error
        link: FdSocket[Taken] = FdSocket(socket.socket(fileno=fd), Taken)
        try:
            if isinstance(message, Claim):
                await self._cluster.check_owner(message.run, uid)
                await self.keeper.give(message, uid, link)
            else:
                await self.keeper.take(message, (uid, self._keeps_for(message.run, uid)), link)
            writer.close()
        except OSError as error:
            raise PeerError(f"memory of run {message.run}: {error or type(error).__name__}") from error
        finally:
            link.close()

    def _keeps_for(self, name: str, uid: int) -> int:
        """This node's number in a run whose agent may leave its memory here. Raises PeerError."""
        run = self._jobs.get(name)
        if run is None or run.uid != uid:
            raise PeerError(f"no run {name!r} of uid {uid} is known here")
        outcome = run.session.control.outcome
        if outcome is not None and outcome.state == "done":
            raise PeerError(f"run {name} is done: there is nothing to go on with")
        return run.roster.me

    def _kept(self, entry: Entry, kind: str, text: str) -> None:
        """Its job may be long over for this daemon: of this its own ledger alone is told."""
        level: Literal["info", "warning"] = "warning" if kind == "memory-dropped" else "info"
        logger.info("job %s: %s: %s", entry.run, kind, text)
        event_id = f"{entry.node}.{secrets.token_hex(5)}.{kind}"
        said = Line(level, kind, text)
        self.write((story.event(event_id, entry.run, entry.node, said, (self.now(), None)),))

    def _set_aside(self, text: str) -> None:
        for job in self._jobs.values():
            job.set_aside(text)
            self._spawn(self._own(job.job, job.uid, new=False))

    def _notice(self, message: m.JobStarted | m.JobEnded, uid: int) -> None:
        """The prolog's and the epilog's word, which counts only from root. Raises PeerError."""
        if uid not in (0, os.getuid()):
            raise PeerError(f"uid {uid} may not say when jobs begin and end")
        check_protocol(message.protocol, "ckptless-notify or the SPANK plugin")
        self._cluster.notice(message)
        if isinstance(message, m.JobEnded):
            for name, job in self._jobs.items():
                if name.partition(".")[0] == str(message.job_id):
                    job.cut_short("Slurm has ended the job")

    async def _admit(self, hello: m.AgentHello, uid: int) -> JobRuntime:
        """The runtime of an agent's job. Raises ProtocolError or PeerError."""
        check_protocol(hello.protocol, "the agent")
        name = hello.spec.job
        roster = await self._cluster.admit(hello, uid)
        if name not in self._jobs:
            await self._own(name, uid, new=not hello.identity)
            memory = await self._remember(hello, roster)
            if name not in self._jobs:
                self._jobs[name] = JobRuntime(name, uid, roster, self, memory)
                self._jobs[name].start()
        known = self._jobs[name]
        if (known.uid, known.roster) != (uid, roster):
            raise PeerError(f"job {name} is known with other nodes or another user")
        return known

    async def _own(self, name: str, uid: int, *, new: bool) -> None:
        """Note whose job it is, who may read of it. Raises LedgerError for a `new` one only."""
        try:
            if await self.ledger.own(name, uid):
                logger.warning("job %s: another user's job had this name; its records are removed", name)
        except LedgerError as error:
            if new:
                raise
            logger.warning("job %s: uid %d cannot read of it here: %s", name, uid, error)

    async def _remember(self, hello: m.AgentHello, roster: Roster) -> Memory:
        """What is on the disk of what this daemon has promised the others. Raises LedgerError."""
        name = hello.spec.job
        # The same for every daemon of the job, as its agents all have their spec from one launcher.
        first = first_decree(roster.nodes, hello.spec.domains)
        nothing = Durable(promised=NO_BALLOT, vote=None, known=first)
        life = secrets.randbits(LIFE_BITS)
        try:
            kept = await self.ledger.vote(name)
        except LedgerError as error:
            if not hello.identity:
                raise
            return self._forgotten(hello, nothing, f"its ledger cannot be read: {error}")
        if kept is not None and is_as_new(kept[0], hello.identity):
            return Memory(life, *kept)
        if hello.identity:
            what = "nothing is left of" if kept is None else "its agent knows of something later than"
            return self._forgotten(hello, nothing, f"{what} what it knew of it")
        identity = secrets.token_hex(8)
        # Before the agent hears of it: whoever knows the identity knows that there was something to forget.
        # And a job that this daemon could not vote for does not begin here.
        await self.ledger.save_now(name, identity, nothing)
        if self.ledger.trouble:
            raise LedgerError(self.ledger.trouble)
        return Memory(life, identity, nothing)

    @staticmethod
    def _forgotten(hello: m.AgentHello, nothing: Durable, why: str) -> Memory:
        """It may have promised anything: it follows, and neither votes nor leads."""
        logger.warning("job %s: this daemon does not vote: %s", hello.spec.job, why)
        return Memory(secrets.randbits(LIFE_BITS), hello.identity, nothing, lost=why)

    # ---------------------------------------------------------------------- Host, for JobRuntime

    def write(self, records: Sequence[Record]) -> None:
        """See runtime.Host."""
        self.ledger.write(records)

    def ended(self, runtime: JobRuntime, outcome: m.Outcome) -> None:
        """See runtime.Host."""
        self._cluster.ended(runtime, outcome)

    def node_is_dark(self, runtime: JobRuntime, node: int, reason: str, state: DarkState) -> None:
        """See runtime.Host."""
        self._cluster.node_is_dark(runtime, node, reason, state)

    def save_vote(
        self,
        runtime: JobRuntime,
        durable: Durable,
        then: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """See runtime.Host."""
        self.ledger.save_vote(runtime.job, (runtime.next_identity, durable), then, failed)

    def witness(self, runtime: JobRuntime, nodes: Sequence[int], ours: Sequence[int]) -> None:
        """See runtime.Host."""
        self._cluster.witness(runtime, nodes, ours)

    def explain(self, runtime: JobRuntime, node: int, cancel: m.Cancel) -> None:
        """See runtime.Host."""
        self._cluster.explain(runtime, node, cancel)


class _UnknownJobError(PeerError):
    """Another daemon was faster: its agent is here already, ours is not yet."""


async def serve_forever(service: Service, stop: asyncio.Event) -> int:
    """Run a daemon; its exit code. An error of the tree is logged in one line."""
    try:
        await service.run(stop)
    except CkptlessError as error:
        logger.error("%s", error)  # noqa: TRY400  # one sentence; the traceback says nothing more
        return error.exit_code
    except OSError as error:
        logger.error("cannot listen: %s", error)  # noqa: TRY400
        return 3
    return 0
