"""Local mode: every "node" is a daemon and an agent with a loopback address and a state directory of its own.

The launcher stands in for two things that a cluster has: Slurm, which gives out nodes, and systemd, which
starts a daemon again. Everything else is the same code as on a cluster. When the launcher dies, however it
dies, the kernel ends what it started (PR_SET_PDEATHSIG), and what those leave behind is adopted and ended.
torch is loaded once for all agents' zygotes, see `agent/local_fork.py`.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from ckptless.daemon.agent.ranks.console import rank_log_path
from ckptless.daemon.agent.ranks.prctl import set_child_subreaper, set_pdeathsig
from ckptless.daemon.agent.ranks.processes import Process, SpawnSpec, Zygote
from ckptless.daemon.agent.ranks.signals import ENDING, USERS
from ckptless.daemon.agent.ranks.socket_folder import SocketFolder
from ckptless.daemon.ckptlessd.state_dir import open_state_dir
from ckptless.daemon.launch.console import log_end, tell_end
from ckptless.daemon.launch.late import LateNodes
from ckptless.daemon.ledger.paths import default_state_dir
from ckptless.daemon.protocol.errors import StartError, UsageError
from ckptless.daemon.protocol.forming import forget_wanted, nodes_asked_for, nodes_up
from ckptless.daemon.protocol.messages import Outcome
from ckptless.daemon.protocol.outcome import outcome_path, read_outcome, which_holds
from ckptless.daemon.protocol.peercred import unix_address
from ckptless.daemon.settings.agent_config import AgentConfig, SharedConfig, agent_config, thread_env
from ckptless.daemon.settings.config import LocalConfig, Peer
from ckptless.daemon.transport.handshake import new_key
from ckptless.daemon.transport.tasks import end_all

logger = logging.getLogger(__name__)

DAEMON, AGENT = "ckptless.daemon.ckptlessd.main", "ckptless.daemon.agent.main"
LOCAL_FORK = "ckptless.daemon.agent.local_fork"
# What an agent may take for its own end, beyond what its ranks and the last save may.
LEAVE_GRACE_S = 10.0
DAEMON_TERM_S = 5.0
KILL_DEADLINE_S = 5.0
POLL_S = 0.05
RESTART_PAUSE_S = 0.3
RESTARTS = 20
# A daemon that works, and does not listen after so many times as long as one may do nothing, will not.
MOST_TIMES = 20
LAST_LINES = 3

Child: TypeAlias = Process | asyncio.subprocess.Process


@dataclass
class LocalNode:
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

    def __init__(
        self, config: SharedConfig, *, state_dir: Path | None = None, port: int = 0, verbose: bool = False
    ) -> None:
        """`config` but for what each node has of its own; `port` 0 is any free one, on each node another."""
        self.spec = config.spec
        self._port, self._verbose = port, verbose
        self._moves_latest = state_dir is None
        root = state_dir or default_state_dir().parent / config.spec.job
        self.state_dir = root.absolute()
        self._config = msgspec.structs.replace(config, draw_dir=str(self.state_dir))
        founders = self.spec.nodes + self.spec.spares
        self._late = LateNodes(founders, self.spec.late)
        self._tag = secrets.token_hex(4)
        self._nodes: list[LocalNode] = []
        # It has torch loaded; each agent is a fork of it.
        self._zygote = Zygote(_log)
        # The first signal that ends the job, from the user or the system.
        self._stop: signal.Signals | None = None
        # A second Ctrl-C: nobody wants to wait for anything any more.
        self._hurried = False

    async def run(self) -> int:
        """Start everything, wait for the end, leave nothing. The exit code. Raises the tree's errors."""
        set_child_subreaper()
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self._stopped, number)
        for number in USERS:
            loop.add_signal_handler(number, self._forward, number)
        self._sockets = SocketFolder(self.spec.job)
        try:
            self._prepare()
            await self._start_all()
            logger.info(
                "job %s: nodes %d, spares %d; follow it with: ckptctl --state-dir %s events -f",
                self.spec.job,
                self.spec.nodes,
                self.spec.spares,
                self.state_dir,
            )
            await self._wait()
        finally:
            try:
                await self._end_all()
            finally:
                self._sockets.close()
        return self._result()

    def lose(self, agent: int) -> None:
        """Kill a node, whose agent has this process id: its daemon first, so that nobody says goodbye."""
        for node in self._nodes:
            if node.agent is not None and node.agent.pid == agent:
                for child in (node.daemon, node.agent):
                    if child is not None:
                        send(child, signal.SIGKILL)

    def _stopped(self, number: signal.Signals) -> None:
        if self._stop is None:
            self._stop = number
        elif number is signal.SIGINT:
            self._hurried = True

    # ----------------------------------------------------------------------------------- prepare

    def _prepare(self) -> None:
        """Directories, key, configuration files. Raises UsageError."""
        open_state_dir(self.state_dir)
        self._point_latest()
        forget_wanted(self.state_dir)
        key_file = self.state_dir / "key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(new_key())
        # A /24 of loopback for this run: its ports cannot meet another run's.
        net = f"127.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        total = self.spec.nodes + self.spec.spares + self.spec.late
        peers = tuple(self._peer(number, f"{net}.{number + 1}") for number in range(total))
        for peer in peers:
            node = LocalNode(peer.node, peer, self.state_dir / peer.name)
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
                log_format=self._config.log_format,
            )
            _write(node.dir / "daemon.json", daemon)
            config = self._agent_config(node)
            added = {name: value for name, value in config.env.items() if os.environ.get(name) != value}
            _write(node.dir / "agent.json", msgspec.structs.replace(config, env=added))
            self._nodes.append(node)

    def _peer(self, number: int, address: str) -> Peer:
        port = self._port or _free_port(address)
        return Peer(node=number, name=f"node-{number}", address=address, port=port)

    def _point_latest(self) -> None:
        """`latest` beside the runs points at the newest, which is what ckptctl shows by default."""
        latest = default_state_dir()
        if not self._moves_latest or latest.parent != self.state_dir.parent:
            return
        partial = latest.with_name(f".latest-{self._tag}")
        partial.symlink_to(self.state_dir.name)
        partial.rename(latest)

    def _socket(self, node: LocalNode, what: str) -> str:
        return self._sockets.socket(f"{node.number}-{what}")

    def _agent_config(self, node: LocalNode) -> AgentConfig:
        env = dict(os.environ)
        most = max((self.spec.nodes, *self.spec.sizes))
        env.update(thread_env(env, most * self.spec.slots_per_node))
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return agent_config(
            self._config,
            spec=self.spec,
            node=node.number,
            name=node.peer.name,
            address=node.peer.address,
            env=env,
            daemon_socket=self._socket(node, "daemon"),
            rank_socket=self._socket(node, "ranks"),
            log_dir=str(node.dir / "logs"),
            copies_addresses=(node.peer.address,),
        )

    # ------------------------------------------------------------------------------------- start

    def _arguments(self, node: LocalNode, what: str) -> list[str]:
        return ["--local", str(node.dir / f"{what}.json"), *(["--verbose"] if self._verbose else [])]

    async def _start_daemon(self, node: LocalNode) -> None:
        with (node.dir / "daemon.log").open("ab") as output:
            node.daemon = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", DAEMON, *self._arguments(node, "daemon")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_Tie(os.getpid()),
            )
        node.started.append(node.daemon)

    async def _start_all(self) -> None:
        config = self._agent_config(self._nodes[0])
        warm = asyncio.create_task(self._zygote.start(config.preload, config.env, config.zygote_deadline_s))
        try:
            await self._start_daemons()
            # no deadline: `zygote_deadline_s`
            await warm
        finally:
            await end_all([warm])
        for node in self._founders:
            await self._begin_agent(node)
        if not self.spec.late:
            await self._zygote.close()

    @property
    def _founders(self) -> list[LocalNode]:
        return self._nodes[: self._late.first]

    async def _begin_agent(self, node: LocalNode) -> None:
        node.agent = await self._start_agent(node, ["-m", AGENT, *self._arguments(node, "agent")])
        node.started.append(node.agent)

    async def _draw_in(self) -> None:
        """Start those of the further nodes that the job wants: on a cluster Slurm would give them."""
        names = nodes_up(self.state_dir)
        up = {node.number for node in self._nodes if node.peer.name in names}
        ended = {node.number for node in self._nodes if node.agent and node.agent.returncode is not None}
        for _ in range(self._late.missing(nodes_asked_for(self.state_dir), up, ended)):
            node = self._nodes[self._late.start()]
            logger.info("%s: drawn in", node.peer.name)
            await self._start_daemon(node)
            await self._daemon_ready(node)
            await self._begin_agent(node)

    async def _start_agent(self, node: LocalNode, program: Sequence[str]) -> Process:
        preloads = [f"--preload={module}" for module in self._zygote.preload]
        spec = SpawnSpec(argv=(LOCAL_FORK, *preloads, *program), env=os.environ, cwd=Path.cwd(), module=True)
        with (node.dir / "agent.log").open("ab") as errors:
            return await self._zygote.spawn(spec, 1, errors.fileno())

    async def _start_daemons(self) -> None:
        for node in self._founders:
            await self._start_daemon(node)
        # no deadline: each has its own
        await asyncio.gather(*map(self._daemon_ready, self._founders))

    async def _daemon_ready(self, node: LocalNode) -> None:
        """Wait until the daemon's Unix socket listens, which it does once everything else does."""
        assert node.daemon is not None
        name, listens = node.peer.name, self._socket(node, "daemon")
        try:
            await wait_ready(name, node.daemon, listens, self._config.start_s, lambda: self._stop is not None)
        except StartError as error:
            raise StartError(f"{error}: {last_lines(node.dir / 'daemon.log')}") from error

    # -------------------------------------------------------------------------------------- wait

    async def _wait(self) -> None:
        """Wait until every agent has ended, or is late; start daemons that die again while the job runs."""
        loop = asyncio.get_running_loop()
        told, leave_by = False, math.inf
        while self._agents_left and loop.time() < leave_by:
            await asyncio.sleep(POLL_S)
            self._adopt_orphans()
            if self._stop is not None and not told:
                told, leave_by = True, loop.time() + self._leave_s
                self._signal_agents(self._stop)
            elif leave_by == math.inf and self.outcome() is not None:
                leave_by = loop.time() + self._leave_s
            if self._hurried:
                leave_by = loop.time()
            if not told:
                for node in self._nodes:
                    await self._revive_daemon(node)
                if self.spec.late and self.outcome() is None:
                    await self._draw_in()
        for node in self._agents_left:
            logger.warning("%s: its agent does not end; it is killed", node.peer.name)
            assert node.agent is not None
            send(node.agent, signal.SIGKILL)

    @property
    def _agents_left(self) -> list[LocalNode]:
        return [node for node in self._nodes if node.agent is not None and node.agent.returncode is None]

    @property
    def _leave_s(self) -> float:
        """The time from the job's end, or the user's signal, until every agent must have ended."""
        return self._config.leave_s + LEAVE_GRACE_S

    def _forward(self, number: signal.Signals) -> None:
        """A user's own signal: by way of the agents to the ranks."""
        for node in self._agents_left:
            assert node.agent is not None
            send(node.agent, number)

    def _signal_agents(self, number: signal.Signals) -> None:
        logger.warning("%s: ending the job; Ctrl-C does it at once", number.name)
        for node in self._agents_left:
            assert node.agent is not None
            send(node.agent, number)
            # One that is stopped could not act on it.
            for child in (node.agent, node.daemon):
                if child is not None:
                    send(child, signal.SIGCONT)

    async def _revive_daemon(self, node: LocalNode) -> None:
        """Start a daemon again, as systemd does on a cluster (Restart=always)."""
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
        ours = {process.pid for node in self._nodes for process in node.started} | {self._zygote.pid}
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
        await self._zygote.close()
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
        """The job's end as the daemons wrote it."""
        spec = self.spec
        return which_holds(read_outcome(node.dir, spec.job, spec.launch) for node in self._nodes)

    def _result(self) -> int:
        outcome = self.outcome()
        if outcome is None:
            if self._stop is not None:
                return 128 + self._stop
            raise StartError(f"no node is left, and none could say why; logs are in {self.state_dir}")
        log = None
        if outcome.rank is not None and outcome.node is not None:
            log = rank_log_path(self._nodes[outcome.node].dir / "logs", outcome.rank)
        return tell_end(self.spec.job, outcome, log, f"{self.state_dir}/node-*/logs")


def _log(kind: str, text: str) -> None:
    """Tell what becomes of the launcher's zygote, from which each node's is forked."""
    logger.log(logging.WARNING if kind == "zygote-warning" else logging.DEBUG, "%s: %s", kind, text)


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


# ---------------------------------------------------------------------------- the nodes' processes


def send(child: Child, number: signal.Signals) -> None:
    """A signal, to one that lives."""
    if child.returncode is not None:
        return
    if isinstance(child, Process):
        child.kill(number)
    else:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)


async def end(children: Sequence[Child], term_s: float) -> None:
    """SIGTERM, and SIGKILL after `term_s` seconds. Raises TimeoutError for one that outlives that."""
    for number, deadline_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, KILL_DEADLINE_S)):
        for child in children:
            send(child, number)
            # One that is stopped could not act on it.
            send(child, signal.SIGCONT)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*(child.wait() for child in children))
        except TimeoutError:
            if number is signal.SIGKILL:
                raise
        else:
            return


@dataclass(frozen=True)
class _Tie:
    """Runs in the child before exec: it is to end when the launcher does."""

    parent: int

    def __call__(self) -> None:
        set_pdeathsig(signal.SIGKILL)
        if os.getppid() != self.parent:
            os._exit(1)


# ------------------------------------------------------------------- whether a daemon has started


async def wait_ready(
    name: str, daemon: asyncio.subprocess.Process, listens: str, patience_s: float, stop: Callable[[], bool]
) -> None:
    """Wait until the socket `listens` takes connections, or `stop` says so.

    Raises StartError for a daemon that has ended, or that has used no CPU time for `patience_s`; on a busy
    machine one that works may take MOST_TIMES as long.
    """
    loop = asyncio.get_running_loop()
    began = moved = loop.time()
    last = 0
    while not stop():
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe, contextlib.suppress(OSError):
            probe.connect(unix_address(listens))
            return
        if daemon.returncode is not None:
            raise StartError(f"{name}'s daemon did not start: it has ended with code {daemon.returncode}")
        ticks, state = _cpu(daemon.pid)
        if ticks != last:
            last, moved = ticks, loop.time()
        if loop.time() - began > MOST_TIMES * patience_s:
            raise StartError(
                f"{name}'s daemon (process {daemon.pid}, state {state}) is not ready after "
                f"{MOST_TIMES * patience_s:.0f} s, though it works: see its log"
            )
        if loop.time() - moved > patience_s:
            raise StartError(
                f"{name}'s daemon (process {daemon.pid}, state {state}) is not ready, and has done nothing "
                f"for {patience_s:.0f} s: see what holds it up, or give more with --start-timeout"
            )
        await asyncio.sleep(POLL_S)


def _cpu(pid: int) -> tuple[int, str]:
    """Return proc(5)'s clock ticks in user and kernel mode, and the state; (-1, "X") where it is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1, "X"
    return int(words[11]) + int(words[12]), words[0]


def last_lines(path: Path) -> str:
    """The end of a log, on one line."""
    lines = log_end(path)
    return " / ".join(lines[-LAST_LINES:]) if lines else "it said nothing"
