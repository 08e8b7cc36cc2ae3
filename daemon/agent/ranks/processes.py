"""The agent's training processes: asked of the zygote, watched by pidfd, and reaped with all they leave.

Everything here belongs to one asyncio loop in the agent's main thread. Nobody else may wait for children with
waitpid(-1): a status taken from under us is a death without a reason.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ckptless.daemon.agent.ranks import zygote_messages as wire
from ckptless.daemon.agent.ranks.prctl import set_child_subreaper
from ckptless.daemon.protocol.errors import PeerError, ProtocolError, UsageError

SPAWN_DEADLINE_S = 30.0
EXIT_DEADLINE_S = 5.0
GROUP_DEADLINE_S = 30.0
GROUP_POLL_S = 0.02
# What a process counts as whose status someone else has taken; asyncio's own choice.
STATUS_UNKNOWN = 255
# Read once, when the interpreter or a library is loaded: a rank gets the zygote's, whatever its own say.
READ_AT_LOAD = ("LD_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LC_", "LANG")

# What may be imported ahead where a script does so, and need not be.
ADAPTERS = frozenset(
    {"ckptless.accelerate", "ckptless.lightning", "ckptless.torchtitan", "ckptless.transformers"}
)

OnEvent: TypeAlias = Callable[[str, str], None]


class ZygoteGoneError(PeerError):
    """The zygote died before it answered."""


@dataclass(frozen=True, kw_only=True)
class SpawnSpec:
    """A training process to start.

    `argv` is a script (or, with `module`, a module) and its arguments. `env` is the whole environment; what
    is named in READ_AT_LOAD has an effect only if the zygote was started with the same. `scratch`: see
    `socket_folder.Scratch`; `deaf`: see `zygote_messages.Program`.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    module: bool = False
    scratch: Path | None = None
    deaf: bool = False

    def program(self) -> wire.Program:
        """Return it as the zygote takes it; raises UsageError where the user must mend something."""
        if not self.argv:
            raise UsageError("name a training script or a module to run")
        if not self.cwd.is_dir():
            raise UsageError(f"the working directory {self.cwd} does not exist: name one that does")
        return wire.Program(
            argv=tuple(map(os.fsencode, self.argv)),
            module=self.module,
            env=tuple((os.fsencode(name), os.fsencode(value)) for name, value in self.env.items()),
            cwd=os.fsencode(self.cwd),
            scratch=os.fsencode(self.scratch) if self.scratch is not None else b"",
            deaf=self.deaf,
        )


class Process:
    """A child of the agent's that leads its session and process group: a training process, or the zygote.

    `pidfd` is closed, and `returncode` set, when the death is seen. `returncode` is as in subprocess: None
    while alive, minus the signal's number if one ended it. The rest of its process group ends with it, but
    for the zygote, whose helpers may serve the ranks: that has an `on_death`, which is called.
    """

    def __init__(self, pid: int, on_event: OnEvent, on_death: Callable[[], None] | None = None) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.returncode: int | None = None
        self._on_event, self._then = on_event, on_death
        self._loop = asyncio.get_running_loop()
        self._dead = asyncio.Event()
        self._loop.add_reader(self.pidfd, self._on_death)

    async def wait(self) -> int:
        """Return the status once it is dead. Lasts as long as the process: bound it with asyncio.timeout."""
        # no deadline: the caller's: see above
        await self._dead.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Send it `sig`; nothing if it is dead."""
        if self.returncode is None:
            signal.pidfd_send_signal(self.pidfd, sig)

    def _on_death(self) -> None:
        self._loop.remove_reader(self.pidfd)
        if self._then is None:
            # Before the reaping: the unreaped leader keeps the group's number from being given to others.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._reap()
        os.close(self.pidfd)
        self._dead.set()
        if self._then is None:
            self._reap_group(self._loop.time() + GROUP_DEADLINE_S)
        else:
            self._then()

    def _reap(self) -> int:
        try:
            status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            status = None
        if status is None:
            self._on_event(
                "process-status-lost", f"the status of process {self.pid} was taken by someone else"
            )
            return STATUS_UNKNOWN
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def _reap_group(self, deadline: float) -> None:
        """Reap the DataLoader workers and such, which we inherited, as they go."""
        try:
            while os.waitid(os.P_PGID, self.pid, os.WEXITED | os.WNOHANG) is not None:
                pass
        except ChildProcessError:
            return
        if self._loop.time() < deadline:
            self._loop.call_later(GROUP_POLL_S, self._reap_group, deadline)
        else:
            self._on_event(
                "group-lingers", f"processes of {self.pid}'s group outlive SIGKILL by {GROUP_DEADLINE_S:g} s"
            )


class ZygoteLink:
    """One zygote, the socket to it, and who waits for which answer. A new zygote is a new link.

    `started` is its first word.
    """

    def __init__(self, pid: int, sock: socket.socket, on_event: OnEvent) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        sock.setblocking(False)
        self.process = Process(pid, on_event, self._on_death)
        self._waiting: dict[int, asyncio.Future[wire.Spawned]] = {}
        self._last_id = 0
        self.started: asyncio.Future[wire.Ready] = self._loop.create_future()
        self._loop.add_reader(self._socket, self._on_packet)

    @property
    def status(self) -> str:
        """The zygote's end, in words."""
        code = self.process.returncode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"status {code}"

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self.process.returncode is not None

    async def request(self, program: int, gate: int, stdout: int, stderr: int) -> wire.Spawned:
        """Send a spawn request and return its answer; raises ZygoteGoneError if it dies before."""
        if self.gone:
            raise ZygoteGoneError(f"the zygote is gone ({self.status})")
        self._last_id += 1
        number = self._last_id
        packet = wire.encode(wire.Spawn(version=wire.VERSION, id=number))
        answer: asyncio.Future[wire.Spawned] = self._loop.create_future()
        self._waiting[number] = answer
        try:
            # Whole or not at all. A full buffer means hundreds of unanswered requests.
            socket.send_fds(self._socket, [packet], [program, gate, stdout, stderr])
            # no deadline: the caller's: see `_ask`
            return await answer
        except ConnectionError as error:
            # Its socket closes before its pidfd tells: whoever tries again must find it gone.
            await self.discard()
            raise ZygoteGoneError(f"the zygote is gone ({self.status})") from error
        except BlockingIOError as error:
            raise PeerError("the zygote does not read its requests") from error
        finally:
            del self._waiting[number]

    async def wait_gone(self) -> None:
        """Wait for its death, at most EXIT_DEADLINE_S: TimeoutError."""
        async with asyncio.timeout(EXIT_DEADLINE_S):
            await self.process.wait()

    async def discard(self) -> None:
        """Kill it if it lives, and see it dead."""
        self.process.kill()
        await self.wait_gone()

    def hang_up(self) -> None:
        """Tell the zygote to exit."""
        if not self.gone:
            self._socket.shutdown(socket.SHUT_WR)

    def _on_packet(self) -> None:
        try:
            packet = self._receive()
            if packet is None:
                return
            if packet:
                self._take(wire.decode_reply(packet))
                return
        except ProtocolError as error:
            self._fail(error)
        # It has closed the socket, or talks nonsense: either way it is of no more use.
        self._loop.remove_reader(self._socket)
        self.process.kill()

    def _receive(self) -> bytes | None:
        """Return the next packet, empty at the end; None if there is none yet."""
        try:
            # no deadline: the socket does not block
            return self._socket.recv(wire.MAX_PACKET_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # It died with requests unread. The kernel says so once, before the answers it had sent.
            return self._receive()

    def _take(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Ready):
            if not self.started.done():
                self.started.set_result(reply)
            return
        answer = self._waiting.get(reply.id)
        # Nobody there: the asker gave up and closed the gate, so the process exits by itself.
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _fail(self, error: Exception) -> None:
        answers: tuple[asyncio.Future[Any], ...] = (self.started, *self._waiting.values())
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)
                # Marks it as seen: a link whose start was given up has nobody left to ask.
                answer.exception()

    def _on_death(self) -> None:
        self._loop.remove_reader(self._socket)
        # What it had still said counts: a process it reported must not be started twice.
        with contextlib.suppress(ProtocolError):
            while packet := self._receive():
                self._take(wire.decode_reply(packet))
        self._socket.close()
        self._fail(ZygoteGoneError(f"the zygote is gone ({self.status})"))


class Zygote:
    """The process that training processes are forked from.

    `on_event(kind, text)` hears of what was mended or could not be: "zygote-died", "zygote-restarted",
    "zygote-warning", "environment", and what `Process` reports. Processes outlive the zygote.
    `ahead`: it has the next process forked before that is asked for.
    """

    def __init__(self, on_event: OnEvent, *, ahead: bool = False) -> None:
        self._on_event, self._ahead = on_event, ahead
        self.preload: tuple[str, ...] = ()
        self._env: dict[str, str] = {}
        self._deadline_s = 0.0
        self._link: ZygoteLink | None = None
        self._starting = asyncio.Lock()
        self._spawning = 0
        self._alive: dict[int, Process] = {}
        self._mismatches: set[str] = set()

    @property
    def pid(self) -> int | None:
        """The zygote's process id, None when it is not running."""
        return None if self._link is None or self._link.gone else self._link.process.pid

    async def start(
        self,
        preload: Sequence[str],
        env: Mapping[str, str],
        deadline_s: float,
        own: tuple[int, int] | None = None,
    ) -> None:
        """Start the zygote, in place of a running one, and wait until it has imported `preload`.

        Waits at most `deadline_s`, also when `spawn` starts it again. Makes the caller a subreaper. `env`
        should be the ranks' environment without what differs between them. `own`: the pid of a zygote that
        the caller has already, and the descriptor of the socket to it. Raises UsageError if a module cannot
        be imported, PeerError if the zygote dies or is late; with adapters it is tried
        once more, as long, without them.
        """
        set_child_subreaper()
        self.preload, self._env, self._deadline_s = tuple(preload), dict(env), deadline_s
        async with self._starting:
            await self.close()
            await self._start(own)

    async def spawn(
        self, spec: SpawnSpec, stdout: int, stderr: int | None = None, deadline_s: float = SPAWN_DEADLINE_S
    ) -> Process:
        """Start a process; a zygote that has died is started again, once, on top of `deadline_s`.

        It writes to the descriptors, which stay the caller's; to `stdout` alone where `stderr` is None. If
        this raises or is cancelled, no process runs. Raises UsageError for a spec that cannot be run,
        PeerError if the zygote fails.
        """
        program = wire.write_program(spec.program())
        outputs = stdout, stdout if stderr is None else stderr
        self._compare_environment(spec.env)
        self.reap_orphans()
        self._spawning += 1
        try:
            restarted = await self._ensure_running()
            try:
                return await self._spawn_once(program, outputs, deadline_s)
            except ZygoteGoneError:
                if restarted:
                    raise
            await self._ensure_running()
            return await self._spawn_once(program, outputs, deadline_s)
        finally:
            self._spawning -= 1
            os.close(program)

    async def close(self) -> None:
        """Stop the zygote. The processes go on."""
        link, self._link = self._link, None
        if link is None:
            return
        link.hang_up()
        try:
            await link.wait_gone()
        except TimeoutError:
            await link.discard()
        self.reap_orphans()

    def reap_orphans(self) -> None:
        """Reap what ranks left outside their process groups and the agent adopted, once it is dead.

        Such a process may serve others still (a tracker's helper, say), so it is not killed. `spawn` calls
        this; an agent that never spawns may, now and then.
        """
        if self._spawning:
            # A process that died at once may be known only by its pid, on its way to us.
            return
        self._alive = {pid: process for pid, process in self._alive.items() if process.returncode is None}
        ours = os.getsid(0)
        for pid in _children():
            # Our session's are the agent's own subprocesses.
            if pid not in self._alive and pid != self.pid and os.getsid(pid) != ours:
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)

    async def _ensure_running(self) -> bool:
        """Start the zygote if it is not running, and say whether that was so."""
        async with self._starting:
            if self.pid is not None:
                return False
            if self._link is None:
                raise PeerError("the zygote is not started")
            self._on_event("zygote-died", f"the zygote has ended: {self._link.status}")
            await self._start()
            self._on_event("zygote-restarted", f"a new zygote runs as process {self.pid}")
            return True

    async def _start(self, own: tuple[int, int] | None = None) -> None:
        try:
            await self._begin(own)
        except (UsageError, PeerError) as error:
            if ADAPTERS.isdisjoint(self.preload):
                raise
            self._on_event("zygote-warning", f"{error}: now each process imports its framework by itself")
            self.preload = tuple(name for name in self.preload if name not in ADAPTERS)
            await self._begin()

    async def _begin(self, own: tuple[int, int] | None = None) -> None:
        if own is None:
            pid, sock = _launch(self.preload, self._env, ahead=self._ahead)
        else:
            pid, sock = _inherited(*own)
        link = ZygoteLink(pid, sock, self._on_event)
        try:
            async with asyncio.timeout(self._deadline_s):
                reply = await link.started
            wire.check_version(reply.version)
            if reply.error:
                raise UsageError(reply.error)
        except TimeoutError as error:
            await link.discard()
            modules = ", ".join(self.preload)
            raise PeerError(
                f"the zygote was not ready in {self._deadline_s:g} s (imports: {modules})"
            ) from error
        except BaseException:
            await link.discard()
            raise
        self._link = link
        for warning in reply.warnings:
            self._on_event("zygote-warning", warning)

    async def _spawn_once(self, program: int, outputs: tuple[int, int], deadline_s: float) -> Process:
        if self._link is None:
            raise PeerError("the zygote was closed")
        # Both ends close on every way out: whoever waits at the gate without the byte exits.
        gate, opener = os.pipe()
        try:
            pid = await _ask(self._link, (program, gate, *outputs), deadline_s)
            process = self._alive[pid] = Process(pid, self._on_event)
            with contextlib.suppress(BrokenPipeError):
                # Broken: it died at the gate, which its pidfd tells.
                os.write(opener, b"\n")
        finally:
            os.close(gate)
            os.close(opener)
        return process

    def _compare_environment(self, env: Mapping[str, str]) -> None:
        for name in sorted(env.keys() | self._env.keys()):
            if not name.startswith(READ_AT_LOAD) or env.get(name) == self._env.get(name):
                continue
            if name not in self._mismatches:
                self._mismatches.add(name)
                had, wanted = self._env.get(name), env.get(name)
                self._on_event(
                    "environment",
                    f"{name} is {wanted!r} for a rank but was {had!r} when its libraries were loaded",
                )


async def _ask(link: ZygoteLink, fds: tuple[int, int, int, int], deadline_s: float) -> int:
    """Have the zygote make a process, and return its pid."""
    try:
        async with asyncio.timeout(deadline_s):
            reply = await link.request(*fds)
    except TimeoutError as error:
        # Stuck for one is stuck for all: the next spawn starts another.
        link.process.kill()
        raise PeerError(f"the zygote made no process in {deadline_s:g} s") from error
    if reply.error:
        raise PeerError(f"the zygote could not make a process: {reply.error}")
    return reply.pid


def _launch(preload: Sequence[str], env: Mapping[str, str], *, ahead: bool) -> tuple[int, socket.socket]:
    """A new zygote's pid, and the socket to it. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "ckptless.daemon.agent.ranks.zygote", "--fd", str(theirs.fileno())]
        for module in preload:
            command += ["--preload", module]
        if ahead:
            command.append("--ahead")
        try:
            popen = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A Ctrl-C at the terminal is the agent's to answer.
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    # Its pidfd tells of its death: nobody else may wait for it, as subprocess would when it forgets it.
    popen.returncode = 0
    return popen.pid, ours


def _inherited(pid: int, fd: int) -> tuple[int, socket.socket]:
    """The zygote that this process has had since before it was the agent (see `local_fork`)."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return pid, sock


def _children() -> list[int]:
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in listing.read_text().split()]
