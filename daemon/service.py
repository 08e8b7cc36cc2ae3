"""The daemon: start and stop, and the wiring of mesh, agents, jobs and ledger. The composition root."""

import asyncio
import logging
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ckptless.daemon.api import messages as m
from ckptless.daemon.api.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.api.errors import CkptlessError, ProtocolError
from ckptless.daemon.api.peercred import peer_credentials
from ckptless.daemon.api.records import Record
from ckptless.daemon.api.unixpath import is_abstract, unix_address
from ckptless.daemon.clock import Clock
from ckptless.daemon.config import DaemonConfig, open_state_dir, read_key
from ckptless.daemon.control import edges as e
from ckptless.daemon.jobs import JobSession
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.ledger.writer import LedgerWriter
from ckptless.daemon.mesh import Mesh
from ckptless.daemon.peers import messages as p

logger = logging.getLogger(__name__)

TICK_S = 0.05
PROBE_S = 0.1
PROBE_DEADLINE_S = 1.0
LEDGER_FILE = "ledger.db"
OUTCOME_FILE = "outcome.json"
READ_NBYTES = 1 << 16


class Service:
    """One daemon. `run` returns when it is told to stop."""

    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._clock = Clock()
        self._state_dir = Path(config.state_dir)
        open_state_dir(self._state_dir)
        self._ledger = LedgerWriter(Ledger.open(self._state_dir / LEDGER_FILE))
        self._mesh = Mesh(config, read_key(Path(config.key_file)))
        self._jobs: dict[str, JobSession] = {}
        self._agents: dict[str, asyncio.StreamWriter] = {}
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises OSError where an address is taken."""
        self._mesh.on_up = self._peer_up
        self._mesh.on_down = self._peer_down
        self._mesh.on_message = self._peer_message
        server: asyncio.Server | None = None
        try:
            await self._mesh.start()
            # Last: whoever finds the socket finds a daemon that is ready.
            server = await self._listen()
            self._spawn(self._tick())
            await stop.wait()
        finally:
            if server is not None:
                server.close()
            await self._close()

    async def _listen(self) -> asyncio.Server:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._spawn(self._agent_connected(reader, writer))

        name = self._config.socket
        if is_abstract(name):
            return await asyncio.start_unix_server(connected, unix_address(name))
        Path(name).unlink(missing_ok=True)
        server = await asyncio.start_unix_server(connected, name)
        Path(name).chmod(0o600)
        return server

    async def _close(self) -> None:
        await self._mesh.close()
        for task in [*self._tasks, *self._probes.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._probes.values(), return_exceptions=True)
        for writer in self._agents.values():
            writer.close()
        await self._ledger.close()
        if not is_abstract(self._config.socket):
            Path(self._config.socket).unlink(missing_ok=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for session in list(self._jobs.values()):
                session.feed(e.Tick())

    def _session(self, job: str) -> JobSession:
        session = self._jobs.get(job)
        if session is None:
            nodes = [peer.node for peer in self._config.peers]
            session = JobSession(job, nodes, self._config.node, self, self._clock.now)
            self._jobs[job] = session
            for node in self._mesh.up:
                session.feed(e.Connected(node))
        return session

    # ------------------------------------------------------------------------------------- peers

    def _peer_up(self, node: int) -> None:
        probe = self._probes.pop(node, None)
        if probe is not None:
            probe.cancel()
        for session in self._jobs.values():
            session.feed(e.Connected(node))

    def _peer_down(self, node: int, why: str) -> None:
        logger.info("node-%d: %s", node, why)
        for session in self._jobs.values():
            session.feed(e.PeerDown(node))
        if node not in self._probes:
            self._probes[node] = asyncio.create_task(self._probe(node, why))

    def _peer_message(self, node: int, message: p.DaemonMessage) -> None:
        if not isinstance(message, p.Beat):
            self._session(message.job).hear(node, message)

    async def _probe(self, node: int, why: str) -> None:
        """A daemon is away. While its agents answer, its node lives; once none does, the node is lost."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            for session in list(self._jobs.values()):
                gone = await self._agent_gone(session, node, loop.time() - since)
                if gone is not None:
                    age_s = loop.time() - since
                    reason = f"{why}, and {gone}"
                    session.feed(e.NodeLost(node, reason, age_s))
                    self._mesh.send_all(p.Gone(job=session.job, node=node, reason=reason, age_s=age_s))
            if all(session.control.nodes[node].lost is not None for session in self._jobs.values()):
                return
            await asyncio.sleep(PROBE_S)

    async def _agent_gone(self, session: JobSession, node: int, away_s: float) -> str | None:
        """Why the node's agent is gone for good, or None while it may live."""
        if session.control.nodes[node].lost is not None or session.control.outcome is not None:
            return None
        address = session.agent_address(node)
        if address is None:
            return "no agent of it is known" if away_s > self._config.dark_s else None
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                _, writer = await asyncio.open_connection(*address)
        except ConnectionRefusedError:
            return "its agent is gone"
        except (OSError, TimeoutError) as error:
            return f"its agent cannot be reached ({error})" if away_s > self._config.dark_s else None
        writer.close()
        return None

    # ------------------------------------------------------------------------------------ agents

    async def _agent_connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An agent, from its hello to the end of its connection."""
        pid, uid = peer_credentials(writer.get_extra_info("socket"))
        if uid not in (0, os.getuid()):
            logger.warning("refused uid %d (pid %d)", uid, pid)
            writer.close()
            return
        decoder: Decoder[m.FromAgent] = Decoder(m.FromAgent, CONTROL_LIMIT)
        session: JobSession | None = None
        try:
            while data := await reader.read(READ_NBYTES):
                for message in decoder.feed(data):
                    session = self._agent_says(message, session, writer)
        except (ProtocolError, ConnectionError) as error:
            logger.warning("agent %d: %s", pid, error)
        except asyncio.CancelledError:
            session = None  # it is this daemon that ends, of which nothing follows for the agent
            raise
        finally:
            writer.close()
            if session is not None and self._agents.get(session.job) is writer:
                del self._agents[session.job]
                self._agent_lost(session)

    def _agent_says(
        self, message: m.FromAgent, session: JobSession | None, writer: asyncio.StreamWriter
    ) -> JobSession:
        if isinstance(message, m.AgentHello):
            if message.protocol != m.PROTOCOL:
                raise ProtocolError(f"the agent speaks protocol {message.protocol}, the daemon {m.PROTOCOL}")
            session = self._session(message.spec.job)
            self._agents[session.job] = writer
        if session is None:
            raise ProtocolError("the first message of an agent must be its hello")
        session.feed(e.Report(self._config.node, message))
        return session

    def _agent_lost(self, session: JobSession) -> None:
        """The agent's process is gone (or hung up, which it does only at its end)."""
        if session.control.outcome is not None:
            return
        reason = "its agent is gone"
        session.feed(e.NodeLost(self._config.node, reason, 0.0))
        gone = p.Gone(job=session.job, node=self._config.node, reason=reason, age_s=0.0)
        self._mesh.send_all(gone)

    # ------------------------------------------------------------------- Outlets, for JobSession

    def to_daemon(self, node: int, message: p.DaemonMessage) -> None:
        """See jobs.Outlets."""
        self._mesh.send(node, message)

    def to_all_daemons(self, message: p.DaemonMessage) -> None:
        """See jobs.Outlets."""
        self._mesh.send_all(message)

    def to_agent(self, job: str, order: m.Order) -> None:
        """See jobs.Outlets."""
        writer = self._agents.get(job)
        if writer is not None:
            writer.write(encode(order))

    def write(self, records: Sequence[Record]) -> None:
        """See jobs.Outlets."""
        self._ledger.write(records)

    def ended(self, job: str, outcome: m.Outcome) -> None:
        """See jobs.Outlets. The outcome stands in a file too, whole or not at all."""
        path = self._state_dir / OUTCOME_FILE
        partial = path.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode({"job": job, **msgspec.to_builtins(outcome)}))
        partial.rename(path)


async def serve_forever(config: DaemonConfig, stop: asyncio.Event) -> int:
    """Run a daemon; its exit code. An error of the tree is logged in one line."""
    try:
        await Service(config).run(stop)
    except CkptlessError as error:
        logger.error("%s", error)  # noqa: TRY400  # one sentence; the traceback says nothing more
        return error.exit_code
    except OSError as error:
        logger.error("cannot listen: %s", error)  # noqa: TRY400
        return 3
    return 0
