"""Local mode: every "node" is a daemon and an agent with a loopback address and a state directory of its own.

The launcher stands in for two things that a cluster has: Slurm, which gives out nodes, and systemd, which
starts a daemon again. Everything else is the same code as on a cluster. When the launcher dies, however it
dies, the kernel ends what it started (PR_SET_PDEATHSIG), and what those leave behind is adopted and ended.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ckptless.daemon.agent.config import (
    DEFAULT_SHUTDOWN_S,
    AgentConfig,
    DataConfig,
    ReplicationConfig,
    thread_env,
)
from ckptless.daemon.agent.ranks.console import rank_log_path
from ckptless.daemon.agent.ranks.prctl import set_child_subreaper
from ckptless.daemon.agent.ranks.processes import Process
from ckptless.daemon.agent.ranks.socket_folder import SocketFolder
from ckptless.daemon.agent.signals import ENDING, USERS
from ckptless.daemon.agent.versions.twin_check import TwinsMode
from ckptless.daemon.api.errors import StartError, UsageError
from ckptless.daemon.api.messages import JobSpec, Limits, Outcome
from ckptless.daemon.api.outcome import outcome_path, read_outcome, which_holds
from ckptless.daemon.api.saving import SaveConfig
from ckptless.daemon.ckptlessd.state_dir import open_state_dir
from ckptless.daemon.config import LocalConfig, Peer
from ckptless.daemon.launch.last_words import last_words
from ckptless.daemon.launch.nest import (
    AGENT,
    KILL_DEADLINE_S,
    Child,
    Nest,
    end,
    send,
    start_daemon,
)
from ckptless.daemon.launch.ready import DEFAULT_START_S, last_lines, wait_ready
from ckptless.daemon.launch.saving import saved_step
from ckptless.daemon.ledger.paths import default_state_dir
from ckptless.daemon.peers.handshake import new_key

logger = logging.getLogger(__name__)

# What an agent may take for its own end, beyond what its ranks and the last save may.
LEAVE_GRACE_S = 10.0
DAEMON_TERM_S = 5.0
POLL_S = 0.05
RESTART_PAUSE_S = 0.3
RESTARTS = 20
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Checked options of a local run."""

    argv: tuple[str, ...]
    module: bool
    nodes: int
    spares: int
    slots: int
    start_tries: int
    max_stall_s: float
    preload: tuple[str, ...]
    tee: tuple[int, ...] | None
    copies: int
    twins: TwinsMode
    job: str
    state_dir: Path | None
    port: int
    verbose: bool
    recovers: bool = True
    domains: tuple[str, ...] = ()
    save: SaveConfig | None = None
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    shutdown_s: float = DEFAULT_SHUTDOWN_S
    start_s: float = DEFAULT_START_S


@dataclass
class Node:
    """A node's files and processes."""

    number: int
    peer: Peer
    dir: Path
    daemon: asyncio.subprocess.Process | None = None
    agent: Process | None = None
    restarts: int = 0
    started: list[Child] = field(default_factory=list)


class LocalRun:
    """One run, from empty directories to no process left."""

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._spec = JobSpec(
            job=options.job,
            command=options.argv,
            nodes=options.nodes,
            spares=options.spares,
            slots_per_node=options.slots,
            limits=Limits.from_max_stall(options.max_stall_s, options.start_tries),
            domains=options.domains,
            run_id=secrets.token_hex(16),
            launch=secrets.token_hex(16),
            saved_step=saved_step(options.save),
            recovers=options.recovers,
        )
        root = options.state_dir or default_state_dir().parent / options.job
        self.state_dir = root.absolute()
        self._tag = secrets.token_hex(4)
        self._nodes: list[Node] = []
        self._nest = Nest()
        self._stop: asyncio.Future[signal.Signals] | None = None
        # A second Ctrl-C: nobody wants to wait for anything any more.
        self._hurried = False

    async def run(self) -> int:
        """Start everything, wait for the end, leave nothing. The exit code. Raises the tree's errors."""
        set_child_subreaper()
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        for number in ENDING:
            loop.add_signal_handler(number, self._stopped, number)
        for number in USERS:
            loop.add_signal_handler(number, self._forward, number)
        self._sockets = SocketFolder(self._spec.job)
        try:
            self._prepare()
            await self._start_all()
            logger.info(
                "job %s: nodes %d, spares %d; follow it with: ckptctl --state-dir %s events -f",
                self._spec.job,
                self._options.nodes,
                self._options.spares,
                self.state_dir,
            )
            await self._wait()
        finally:
            try:
                await self._end_all()
            finally:
                self._sockets.close()
        return self._result()

    def _stopped(self, number: signal.Signals) -> None:
        assert self._stop is not None
        if not self._stop.done():
            self._stop.set_result(number)
        elif number is signal.SIGINT:
            self._hurried = True

    # ----------------------------------------------------------------------------------- prepare

    def _prepare(self) -> None:
        """Directories, key, configuration files. Raises UsageError."""
        open_state_dir(self.state_dir)
        self._point_latest()
        key_file = self.state_dir / "key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(new_key())
        # A /24 of loopback for this run: its ports cannot meet another run's.
        net = f"127.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        total = self._options.nodes + self._options.spares
        peers = tuple(self._peer(number, f"{net}.{number + 1}") for number in range(total))
        for peer in peers:
            node = Node(peer.node, peer, self.state_dir / peer.name)
            open_state_dir(node.dir)
            (node.dir / "logs").mkdir(exist_ok=True)
            # An earlier run of this name may have left one, which is not this run's.
            outcome_path(node.dir).unlink(missing_ok=True)
            daemon = LocalConfig(
                node=peer.node,
                state_dir=str(node.dir),
                socket=self._socket(node, "daemon"),
                key_file=str(key_file),
                peers=peers,
            )
            _write(node.dir / "daemon.json", daemon)
            config = self._agent_config(node)
            added = {name: value for name, value in config.env.items() if os.environ.get(name) != value}
            _write(node.dir / "agent.json", msgspec.structs.replace(config, env=added))
            self._nodes.append(node)

    def _peer(self, number: int, address: str) -> Peer:
        port = self._options.port or _free_port(address)
        return Peer(node=number, name=f"node-{number}", address=address, port=port)

    def _point_latest(self) -> None:
        """`latest` beside the runs points at the newest, which is what ckptctl shows by default."""
        latest = default_state_dir()
        if self._options.state_dir is not None or latest.parent != self.state_dir.parent:
            return
        partial = latest.with_name(f".latest-{self._tag}")
        partial.symlink_to(self.state_dir.name)
        partial.rename(latest)

    def _socket(self, node: Node, what: str) -> str:
        return self._sockets.socket(f"{node.number}-{what}")

    def _agent_config(self, node: Node) -> AgentConfig:
        options = self._options
        env = dict(os.environ)
        env.update(thread_env(env, options.nodes * options.slots))
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return AgentConfig(
            node=node.number,
            name=node.peer.name,
            address=node.peer.address,
            spec=self._spec,
            argv=options.argv,
            module=options.module,
            env=env,
            cwd=str(Path.cwd()),
            daemon_socket=self._socket(node, "daemon"),
            rank_socket=self._socket(node, "ranks"),
            log_dir=str(node.dir / "logs"),
            preload=options.preload,
            tee=options.tee,
            copies=options.copies,
            twins=options.twins,
            save=options.save,
            replication=options.replication,
            data=options.data,
            shutdown_s=options.shutdown_s,
            start_s=options.start_s,
            copies_address=node.peer.address,
        )

    # ------------------------------------------------------------------------------------- start

    def _arguments(self, node: Node, what: str) -> list[str]:
        return ["--local", str(node.dir / f"{what}.json"), *(["--verbose"] if self._options.verbose else [])]

    async def _start_daemon(self, node: Node) -> None:
        node.daemon = await start_daemon(self._arguments(node, "daemon"), node.dir / "daemon.log")
        node.started.append(node.daemon)

    async def _start_all(self) -> None:
        warm = asyncio.create_task(self._nest.warm(self._agent_config(self._nodes[0])))
        try:
            await self._start_daemons()
            # no deadline: `zygote_deadline_s`
            await warm
        finally:
            warm.cancel()
            await asyncio.gather(warm, return_exceptions=True)
        await self._start_agents()

    async def _start_agents(self) -> None:
        preload = self._options.preload
        for node in self._nodes:
            words = ["-m", AGENT, *self._arguments(node, "agent")]
            node.agent = await self._nest.agent(words, preload, node.dir / "agent.log")
            node.started.append(node.agent)
        await self._nest.close()

    async def _start_daemons(self) -> None:
        for node in self._nodes:
            await self._start_daemon(node)
        # no deadline: each has its own
        await asyncio.gather(*map(self._daemon_ready, self._nodes))

    async def _daemon_ready(self, node: Node) -> None:
        """Its Unix socket listens once everything else does."""
        assert node.daemon is not None
        name, listens = node.peer.name, self._socket(node, "daemon")
        try:
            await wait_ready(name, node.daemon, listens, self._options.start_s, lambda: self._interrupted)
        except StartError as error:
            raise StartError(f"{error}: {last_lines(node.dir / 'daemon.log')}") from error

    @property
    def _interrupted(self) -> bool:
        return self._stop is not None and self._stop.done()

    # -------------------------------------------------------------------------------------- wait

    async def _wait(self) -> None:
        """Until every agent has ended, or is late; daemons that die are started again while the job runs."""
        loop = asyncio.get_running_loop()
        told, leave_by = False, math.inf
        while self._agents_left and loop.time() < leave_by:
            await asyncio.sleep(POLL_S)
            self._adopt_orphans()
            if self._interrupted and not told:
                told, leave_by = True, loop.time() + self._leave_s
                self._signal_agents()
            elif leave_by == math.inf and self.outcome() is not None:
                leave_by = loop.time() + self._leave_s
            if self._hurried:
                leave_by = loop.time()
            if not told:
                for node in self._nodes:
                    await self._revive_daemon(node)
        for node in self._agents_left:
            logger.warning("%s: its agent does not end; it is killed", node.peer.name)
            assert node.agent is not None
            send(node.agent, signal.SIGKILL)

    @property
    def _agents_left(self) -> list[Node]:
        return [node for node in self._nodes if node.agent is not None and node.agent.returncode is None]

    @property
    def _leave_s(self) -> float:
        """From the job's end, or the user's signal, until every agent must have ended."""
        save_s = self._options.save.end_s if self._options.save is not None else 0.0
        return self._options.shutdown_s + save_s + LEAVE_GRACE_S

    def _forward(self, number: signal.Signals) -> None:
        """A user's own signal: by way of the agents to the ranks."""
        for node in self._agents_left:
            assert node.agent is not None
            send(node.agent, number)

    def _signal_agents(self) -> None:
        assert self._stop is not None
        logger.warning("%s: ending the job; Ctrl-C does it at once", self._stop.result().name)
        for node in self._agents_left:
            assert node.agent is not None
            send(node.agent, self._stop.result())
            # One that is stopped could not act on it.
            for child in (node.agent, node.daemon):
                if child is not None:
                    send(child, signal.SIGCONT)

    async def _revive_daemon(self, node: Node) -> None:
        """What systemd does on a cluster (Restart=always)."""
        if node.daemon is None or node.daemon.returncode is None or self.outcome() is not None:
            return
        await asyncio.sleep(RESTART_PAUSE_S)
        alive = node.agent is not None and node.agent.returncode is None
        if alive and node.restarts < RESTARTS:
            node.restarts += 1
            logger.warning("%s: the daemon has died; starting it again", node.peer.name)
            await self._start_daemon(node)

    def _adopt_orphans(self) -> None:
        """Processes of a dead agent become ours; whatever they are, their node is gone."""
        ours = {process.pid for node in self._nodes for process in node.started} | {self._nest.pid}
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for pid in {int(child) for child in children} - ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    # --------------------------------------------------------------------------------------- end

    async def _end_all(self) -> None:
        """Agents first, then daemons; SIGTERM, then SIGKILL; then whatever was orphaned."""
        await end([node.agent for node in self._nodes if node.agent is not None], self._leave_s)
        await end([node.daemon for node in self._nodes if node.daemon is not None], DAEMON_TERM_S)
        await self._nest.close()
        await self._end_orphans()

    async def _end_orphans(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + KILL_DEADLINE_S
        while loop.time() < deadline:
            self._adopt_orphans()
            if not Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                return
            await asyncio.sleep(POLL_S)

    def outcome(self) -> Outcome | None:
        """What the daemons wrote of the job's end."""
        spec = self._spec
        return which_holds(read_outcome(node.dir, spec.job, spec.launch) for node in self._nodes)

    def _result(self) -> int:
        outcome = self.outcome()
        if outcome is None:
            if self._stop is not None and self._stop.done():
                return 128 + self._stop.result()
            raise StartError(f"no node is left, and none could say why; logs are in {self.state_dir}")
        level = logging.INFO if outcome.exit_code == 0 else logging.ERROR
        logger.log(level, "job %s %s: %s", self._spec.job, outcome.state, outcome.reason)
        if outcome.exit_code != 0:
            log = None
            if outcome.rank is not None and outcome.node is not None:
                log = rank_log_path(self._nodes[outcome.node].dir / "logs", outcome.rank)
            last_words(log, outcome.rank, f"{self.state_dir}/node-*/logs")
        return outcome.exit_code


def _write(path: Path, config: msgspec.Struct) -> None:
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(config))


def _free_port(address: str) -> int:
    """A port that nothing listens on at `address`, which only this run uses. Raises UsageError."""
    try:
        with socket.create_server((address, 0)) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error.strerror}") from error
