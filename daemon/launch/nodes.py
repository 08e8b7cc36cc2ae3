"""A job's nodes on this machine: a daemon and an agent each, from their files to no process left.

Whoever gives out nodes says which: local mode has all of a job's here, a host of a site without Slurm one.
What systemd does on a cluster is done here: a daemon that dies is started again. When this process dies,
however it dies, the kernel ends what it started (PR_SET_PDEATHSIG), and what those leave behind is adopted
and ended. torch is loaded once for all agents' zygotes, see `agent/local_fork.py`.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
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
from ckptless.daemon.protocol.errors import StartError, UsageError
from ckptless.daemon.protocol.messages import Outcome
from ckptless.daemon.protocol.outcome import outcome_path, read_outcome, which_holds
from ckptless.daemon.protocol.peercred import unix_address
from ckptless.daemon.settings.agent_config import AgentConfig, SharedConfig
from ckptless.daemon.settings.config import LocalConfig, Peer
from ckptless.daemon.transport.listener import listen
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
class Node:
    """A node's files and processes."""

    number: int
    peer: Peer
    dir: Path
    daemon: asyncio.subprocess.Process | None = None
    agent: Process | None = None
    restarts: int = 0
    started: list[Child] = field(default_factory=list)


class Nodes(ABC):
    """The nodes of one run that are here; owned by the event loop.

    `_prepare` is to `_add` them, and `_agent_config` says what each agent is told. `console` is where the
    agents' output goes.
    """

    def __init__(
        self, config: SharedConfig, state_dir: Path, *, verbose: bool = False, console: int = 1
    ) -> None:
        self.spec, self.state_dir = config.spec, state_dir
        self._config, self._verbose, self._console = config, verbose, console
        self._nodes: list[Node] = []
        # Of all ranks; None: each node's are in its own directory.
        self._log_dir: Path | None = None
        # It has torch loaded; each agent is a fork of it.
        self._zygote = Zygote(_log)
        # The first signal that ends the job, from the user or the system.
        self._stop: signal.Signals | None = None
        # A second Ctrl-C: nobody wants to wait for anything any more.
        self._hurried = False

    @abstractmethod
    def _prepare(self) -> None:
        """Make directories, key and configuration files. Raises UsageError."""

    @abstractmethod
    def _agent_config(self, node: Node) -> AgentConfig:
        """Return what a node's agent is told."""

    async def run(self) -> int:
        """Start everything, wait for the end, leave nothing. The exit code. Raises the tree's errors."""
        await self.live()
        return self._result()

    async def live(self) -> None:
        """Start everything, wait for the end, leave nothing. Raises the tree's errors."""
        set_child_subreaper()
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self.stop, number)
        for number in USERS:
            loop.add_signal_handler(number, self.forward, number)
        self._sockets = SocketFolder(self.spec.job)
        try:
            self._prepare()
            await self._start_all()
            await self._wait()
        finally:
            try:
                await self._end_all()
            finally:
                self._sockets.close()

    def lose(self, node: Node) -> None:
        """Kill a node: its daemon first, so that nobody says goodbye."""
        for child in (node.daemon, node.agent):
            if child is not None:
                send(child, signal.SIGKILL)

    def stop(self, number: signal.Signals) -> None:
        """End the job, by this signal."""
        if self._stop is None:
            self._stop = number
        elif number is signal.SIGINT:
            self._hurried = True

    def forward(self, number: signal.Signals) -> None:
        """Pass a user's own signal on: by way of the agents to the ranks."""
        for node in self._agents_left:
            assert node.agent is not None
            send(node.agent, number)

    # ----------------------------------------------------------------------------------- prepare

    def _add(self, peer: Peer, daemon: LocalConfig) -> None:
        """Make a node's directory, and the files that its daemon and its agent read. Raises UsageError."""
        node = Node(peer.node, peer, Path(daemon.state_dir))
        open_state_dir(node.dir)
        self._logs_of(node).mkdir(exist_ok=True)
        # An earlier run of this name may have left one, which is not this run's.
        outcome_path(node.dir).unlink(missing_ok=True)
        write_config(node.dir / "daemon.json", daemon)
        config = self._agent_config(node)
        added = {name: value for name, value in config.env.items() if os.environ.get(name) != value}
        write_config(node.dir / "agent.json", msgspec.structs.replace(config, env=added))
        self._nodes.append(node)

    def _logs_of(self, node: Node) -> Path:
        """Return where what a node's ranks print goes."""
        return self._log_dir or node.dir / "logs"

    def _socket(self, number: int, what: str) -> str:
        return self._sockets.socket(f"{number}-{what}")

    # ------------------------------------------------------------------------------------- start

    def _arguments(self, node: Node, what: str) -> list[str]:
        return ["--local", str(node.dir / f"{what}.json"), *(["--verbose"] if self._verbose else [])]

    async def _start_daemon(self, node: Node) -> None:
        with (node.dir / "daemon.log").open("ab") as output:
            node.daemon = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", DAEMON, *self._arguments(node, "daemon")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=Tie(os.getpid()),
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
    def _founders(self) -> list[Node]:
        """The nodes that the job begins with."""
        return self._nodes

    async def _begin_agent(self, node: Node) -> None:
        node.agent = await self._start_agent(node, ["-m", AGENT, *self._arguments(node, "agent")])
        node.started.append(node.agent)

    async def _start_agent(self, node: Node, program: Sequence[str]) -> Process:
        preloads = [f"--preload={module}" for module in self._zygote.preload]
        spec = SpawnSpec(argv=(LOCAL_FORK, *preloads, *program), env=os.environ, cwd=Path.cwd(), module=True)
        with (node.dir / "agent.log").open("ab") as errors:
            return await self._zygote.spawn(spec, self._console, errors.fileno())

    async def _start_daemons(self) -> None:
        for node in self._founders:
            await self._start_daemon(node)
        # no deadline: each has its own
        await asyncio.gather(*map(self._daemon_ready, self._founders))

    async def _daemon_ready(self, node: Node) -> None:
        """Wait until the daemon's Unix socket listens, which it does once everything else does."""
        assert node.daemon is not None
        name, listens = node.peer.name, self._socket(node.number, "daemon")
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

    async def _draw_in(self) -> None:  # noqa: B027  # a host has none
        """Start further nodes that the job wants, where there may be any."""

    @property
    def _agents_left(self) -> list[Node]:
        return [node for node in self._nodes if node.agent is not None and node.agent.returncode is None]

    @property
    def _leave_s(self) -> float:
        """The time from the job's end, or the user's signal, until every agent must have ended."""
        return self._config.leave_s + LEAVE_GRACE_S

    def _signal_agents(self, number: signal.Signals) -> None:
        logger.warning("%s: ending the job; Ctrl-C does it at once", number.name)
        for node in self._agents_left:
            assert node.agent is not None
            send(node.agent, number)
            # One that is stopped could not act on it.
            for child in (node.agent, node.daemon):
                if child is not None:
                    send(child, signal.SIGCONT)

    async def _revive_daemon(self, node: Node) -> None:
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
        """The job's end as the daemons here wrote it."""
        spec = self.spec
        return which_holds(read_outcome(node.dir, spec.job, spec.launch) for node in self._nodes)

    def _result(self) -> int:
        outcome = self.outcome()
        if outcome is None:
            if self._stop is not None:
                return 128 + self._stop
            raise StartError(f"no node is left, and none could say why; logs are in {self.state_dir}")
        where = str(self._log_dir or f"{self.state_dir}/node-*/logs")
        return tell_end(self.spec.job, outcome, self.log_of(outcome), where)

    def log_of(self, outcome: Outcome) -> Path | None:
        """Return the log of the rank that ended the job, where one did, and its node is here."""
        for node in self._nodes:
            if outcome.rank is not None and outcome.node == node.number:
                return rank_log_path(self._logs_of(node), outcome.rank)
        return None


def _log(kind: str, text: str) -> None:
    """Tell what becomes of this process's zygote, from which each node's is forked."""
    logger.log(logging.WARNING if kind == "zygote-warning" else logging.DEBUG, "%s: %s", kind, text)


def write_config(path: Path, config: msgspec.Struct) -> None:
    """Write what a daemon or an agent is told, for nobody else to read."""
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(config))


def free_port(address: str) -> int:
    """A port that nothing listens on at `address`, a numeric one. Raises UsageError."""
    try:
        with listen(address) as server:
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
class Tie:
    """Runs in the child before exec: it is to end when the launcher does."""

    parent: int

    def __call__(self) -> None:
        """Say so to the kernel."""
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
