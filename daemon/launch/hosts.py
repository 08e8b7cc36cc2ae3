"""`ckptless-run --hosts FILE`: a job on hosts that ssh reaches, a process of `host.py` on each.

The launcher gives out the nodes, tells each host of the others, and shows what ranks print. It does not look
after the job: the daemons find out who is lost, and decide. Where ssh ends, or its connection is dead, the
host ends its node; where this process ends, all do.
"""

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ckptless.daemon.agent.ranks.console import ConsoleOutput
from ckptless.daemon.agent.ranks.signals import ENDING, USERS
from ckptless.daemon.launch import wire
from ckptless.daemon.launch.console import tell_end
from ckptless.daemon.launch.host import FLUSH_S, receive
from ckptless.daemon.launch.hostfile import Host
from ckptless.daemon.launch.nodes import DAEMON_TERM_S, KILL_DEADLINE_S, LEAVE_GRACE_S, POLL_S, Tie
from ckptless.daemon.protocol.codec import PROTOCOL, Decoder, check_protocol, encode
from ckptless.daemon.protocol.errors import ProtocolError, StartError, UsageError
from ckptless.daemon.protocol.limits import one_line
from ckptless.daemon.protocol.messages import Outcome
from ckptless.daemon.protocol.outcome import which_holds
from ckptless.daemon.settings.agent_config import SharedConfig
from ckptless.daemon.settings.config import Peer
from ckptless.daemon.transport.handshake import new_key
from ckptless.daemon.transport.tasks import Tasks, end_all

logger = logging.getLogger(__name__)

HOST = "ckptless.daemon.launch.host"
# ssh's own word that the other end is gone, for a cable that is pulled.
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
# For all hosts to answer; Python may come over a slow file system.
START_S = 120.0
# How a host ends of which the others know more.
OF_ONE_NODE = ("no-quorum", "node-lost")
# Variables that a host has of its own.
_HOSTS_OWN = re.compile(
    r"(SSH|XDG|DBUS|SLURM)_.*|HOME|HOSTNAME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|TERM|DISPLAY|TMPDIR|MAIL|_"
)


@dataclass
class Remote:
    """One host's ssh, and what is known by it."""

    node: int
    host: Host
    address: str
    process: asyncio.subprocess.Process | None = None
    port: int = 0
    ended: bool = False
    outcome: Outcome | None = None
    # What ssh, or the host, has said last on its standard error.
    last: str = "it said nothing"
    decoder: Decoder[wire.FromHost] = field(default_factory=lambda: Decoder(wire.FromHost, wire.HOST_LIMIT))

    @property
    def running(self) -> bool:
        """Whether its ssh is there."""
        return self.process is not None and self.process.returncode is None

    def say(self, message: wire.ToHost) -> None:
        """Send a word, if there is anybody."""
        pipe = self.process.stdin if self.process is not None and self.running else None
        if pipe is not None and not pipe.is_closing():
            pipe.write(encode(message))

    async def hear(self) -> wire.FromHost:
        """The next word. Raises ProtocolError; EOFError where ssh has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        # no deadline: the host's life
        return await receive(self.process.stdout, self.decoder)

    def kill(self) -> None:
        """End ssh; the host ends its node then."""
        if self.process is not None and self.running:
            self.process.kill()


class HostsRun:
    """One run on these hosts, of which the first train; owned by the event loop."""

    def __init__(
        self,
        config: SharedConfig,
        hosts: Sequence[Host],
        env: Mapping[str, str],
        *,
        state_dir: Path | None = None,
        port: int = 0,
        verbose: bool = False,
    ) -> None:
        """`port` 0 is any free one, on each host another."""
        self.config, self.hosts = config, tuple(hosts)
        self._env, self._key = env_for_hosts(env), new_key()
        self._state_dir, self._port, self._verbose = state_dir, port, verbose
        self._remotes: list[Remote] = []
        self._trains = False
        self._stop: signal.Signals | None = None
        self._tasks = Tasks()

    async def run(self) -> int:
        """Start the hosts, pass their output on, and wait for the end. The exit code."""
        loop = asyncio.get_running_loop()
        for number in (*ENDING, *USERS):
            loop.add_signal_handler(number, self._signal, number)
        # Neither blocks, where nobody reads: hosts that hear nothing would end their nodes.
        lost = lambda _kind, text: logger.warning("%s", text)  # noqa: E731
        self._out, self._errors = ConsoleOutput(1, lost), ConsoleOutput(2, lost)
        spec = self.config.spec
        # no deadline: that of the resolver
        addresses = await asyncio.gather(
            *(loop.run_in_executor(None, address_of, host, len(self.hosts)) for host in self.hosts)
        )
        self._remotes = [Remote(n, *both) for n, both in enumerate(zip(self.hosts, addresses, strict=True))]
        try:
            await self._begin()
            logger.info(
                "job %s: nodes %d, spares %d; each host has its part in %s",
                *(spec.job, spec.nodes, spec.spares, self._where),
            )
            await self._wait()
        except StartError:
            if self._stop is None:
                raise
        finally:
            await self._end_all()
        return self._result()

    @property
    def _where(self) -> str:
        return str(self._state_dir or f"~/.local/state/ckptless/{self.config.spec.job}")

    # ------------------------------------------------------------------------------------- start

    async def _begin(self) -> None:
        """Have a process on each host, and tell each of all others. Raises StartError."""
        self._tasks.spawn(self._beat())
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*map(self._start, self._remotes))
        except TimeoutError:
            late = ", ".join(remote.host.name for remote in self._remotes if not remote.port)
            raise StartError(f"{late} did not answer by ssh in {START_S:.0f} s") from None
        peers = tuple(
            Peer(node=remote.node, name=remote.host.name, address=remote.address, port=remote.port)
            for remote in self._remotes
        )
        self._trains = True
        for remote in self._remotes:
            remote.say(wire.Peers(peers=peers))

    async def _start(self, remote: Remote) -> None:
        words = (sys.executable, "-m", HOST)
        command = f"cd {shlex.quote(self.config.cwd)} && exec {shlex.join(words)}"
        pipe = asyncio.subprocess.PIPE
        try:
            remote.process = await asyncio.create_subprocess_exec(
                *(*SSH, remote.host.name, command),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                preexec_fn=Tie(os.getpid()),
            )
        except FileNotFoundError:
            raise StartError("there is no ssh in PATH: install OpenSSH's client") from None
        remote.say(
            wire.Begin(
                protocol=PROTOCOL,
                node=remote.node,
                name=remote.host.name,
                address=remote.address,
                port=self._port,
                key=self._key,
                config=msgspec.json.encode(self.config),
                env=self._env,
                state_dir=str(self._state_dir or ""),
                verbose=self._verbose,
            )
        )
        errors = self._tasks.spawn(self._follow_errors(remote))
        try:
            here = await remote.hear()
        except EOFError:
            # no deadline: START_S; whoever has the other end has just gone
            await asyncio.gather(errors, remote.process.wait())
            raise StartError(f"{remote.host.name}: ssh ended: {remote.last}") from None
        except ProtocolError as error:
            raise StartError(
                f"{remote.host.name} does not answer as ckptless ({error}): see what its shell prints where "
                f"nobody is logged in, and that it has the same version"
            ) from error
        if not isinstance(here, wire.Here):
            raise StartError(f"{remote.host.name} says {type(here).__name__} before it is there")
        check_protocol(here.protocol, remote.host.name)
        remote.port = here.port
        self._tasks.spawn(self._listen(remote))

    # -------------------------------------------------------------------------------------- wait

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(wire.BEAT_S)
            for remote in self._remotes:
                remote.say(wire.Beat())

    async def _follow_errors(self, remote: Remote) -> None:
        """Show what a host logs; until it has its node, only why it has ended, with that."""
        assert remote.process is not None
        assert remote.process.stderr is not None
        # no deadline: the host's life
        while line := await _line(remote.process.stderr):
            remote.last = one_line(line)
            if self._trains:
                # A line of JSON says itself who says it.
                who = "" if self.config.log_format == "json" else f"{remote.host.name}: "
                self._errors.write(f"{who}{remote.last}\n".encode())

    async def _listen(self, remote: Remote) -> None:
        """Hear a host to its end."""
        assert remote.process is not None
        try:
            while not remote.ended:
                message = await remote.hear()
                if isinstance(message, wire.Console):
                    self._out.write(message.data)
                elif isinstance(message, wire.Ended):
                    remote.ended, remote.outcome = True, message.outcome
        except ProtocolError as error:
            logger.warning("%s is not understood any more: %s", remote.host.name, error)
            remote.kill()
        except EOFError:
            pass
        # no deadline: the host's life
        await remote.process.wait()
        if self.outcome() is None and self._stop is None:
            why = "its node has ended" if remote.ended else f"its ssh has ended: {remote.last}"
            logger.warning("%s: %s; the job goes on if enough nodes are left", remote.host.name, why)

    def _signal(self, number: signal.Signals) -> None:
        if number in ENDING and self._stop is None:
            self._stop = number
            logger.warning("%s: ending the job", number.name)
        for remote in self._remotes:
            if self._trains:
                remote.say(wire.Signal(number=number))
            elif self._stop is not None:
                remote.kill()

    async def _wait(self) -> None:
        """Wait until every host has ended, or is late: after the job's end, or the user's signal."""
        loop = asyncio.get_running_loop()
        leave_by = math.inf
        while any(remote.running for remote in self._remotes) and loop.time() < leave_by:
            await asyncio.sleep(POLL_S)
            if leave_by == math.inf and (self._stop is not None or self.outcome() is not None):
                leave_by = loop.time() + self.config.leave_s + LEAVE_GRACE_S + DAEMON_TERM_S + KILL_DEADLINE_S

    async def _end_all(self) -> None:
        """Hosts end their nodes when nobody says anything any more; ssh that stays is killed."""
        for remote in self._remotes:
            if remote.process is not None and remote.process.stdin is not None:
                remote.process.stdin.close()
        running = [remote.process for remote in self._remotes if remote.process is not None]
        for patience_s in (LEAVE_GRACE_S, KILL_DEADLINE_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await asyncio.gather(*(process.wait() for process in running))
                break
            for remote in self._remotes:
                remote.kill()
        await end_all(self._tasks)
        for console in (self._out, self._errors):
            await console.flush(FLUSH_S)

    # ----------------------------------------------------------------------------------- the end

    def outcome(self) -> Outcome | None:
        """The job's end, as hosts tell it; not that of one that the others may go on without."""
        found = (remote.outcome for remote in self._remotes)
        return which_holds(one for one in found if one is not None and one.why not in OF_ONE_NODE)

    def _result(self) -> int:
        outcome = self.outcome() or which_holds(remote.outcome for remote in self._remotes)
        if outcome is not None:
            where = f"{self._where}/node-*/logs on its host"
            return tell_end(self.config.spec.job, outcome, None, where)
        if self._stop is not None:
            return 128 + self._stop
        raise StartError(f"no host is left, and none could say why; each has its logs in {self._where}")


async def _line(reader: asyncio.StreamReader) -> str:
    """The next line that says something, without its end; "" at the end."""
    while not reader.at_eof():
        # A line of more than 64 KiB is left out.
        with contextlib.suppress(ValueError):
            # no deadline: the caller's
            if text := (await reader.readline()).decode(errors="replace").strip():
                return text
    return ""


def env_for_hosts(env: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks on other hosts have of the launcher's environment: all but what is a host's own."""
    return {
        name: value
        for name, value in env.items()
        # Bytes that are no text cannot be told.
        if not _HOSTS_OWN.fullmatch(name) and (name + value).encode(errors="ignore").decode() == name + value
    }


def address_of(host: Host, hosts: int) -> str:
    """The address where other hosts reach this one; blocks for a look-up. Raises UsageError."""
    name = host.address or host.name
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"{host.name}: {name} has no address ({error.strerror}): give one, as address=A, in the hostfile"
        ) from error
    address = str(found[0][4][0])
    if hosts > 1 and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise UsageError(
            f"{host.name} is {address} here, where no other host reaches it: give another, as address=A, in "
            "the hostfile"
        )
    return address
