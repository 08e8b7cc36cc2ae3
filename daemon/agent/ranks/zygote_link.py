"""The agent's end of one zygote: its process, the socket to it, and who waits for which answer."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from ckptless.daemon.agent.ranks import zygote_messages as wire
from ckptless.daemon.api.errors import PeerError, ProtocolError

EXIT_DEADLINE_S = 5.0


class ZygoteGoneError(PeerError):
    """The zygote died before it answered."""


class Child(Protocol):
    """A child process, as subprocess.Popen has it."""

    pid: int
    returncode: int | None

    def wait(self, timeout: float | None = None) -> int:
        """Reap it; its status."""


class Hatched:
    """A child that the agent has had since before it was the agent: see `hatch`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Reap it; to be called when its pidfd has told of its death."""
        # no deadline: its pidfd has told of its death
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def hatched(pid: int, fd: int) -> tuple[Child, socket.socket]:
    """The zygote that came with this process, and the socket to it."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    sock.setblocking(False)
    return Hatched(pid), sock


class ZygoteLink:
    """One zygote process and the socket to it.

    `started` is its first word (Ready or PreloadFailed); `gone` is set when its death has been seen. It ends
    for good then: a new zygote is a new link.
    """

    def __init__(self, child: Child, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._child, self._socket = child, sock
        self.pid = child.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._waiting: dict[int, asyncio.Future[wire.Reply]] = {}
        self._last_id = 0
        self.gone = asyncio.Event()
        self.started: asyncio.Future[wire.Reply] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._on_death)
        self._loop.add_reader(self._socket, self._on_packet)

    @property
    def status(self) -> str:
        """How the zygote ended, in words."""
        code = self._child.returncode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"status {code}"

    async def request(self, program: int, gate: int, stdout: int, stderr: int) -> wire.Reply:
        """Send a spawn request and return its answer; raises ZygoteGoneError if it dies before."""
        if self.gone.is_set():
            raise ZygoteGoneError(f"the zygote is gone ({self.status})")
        self._last_id += 1
        number = self._last_id
        packet = wire.encode(wire.Spawn(version=wire.VERSION, id=number))
        answer: asyncio.Future[wire.Reply] = self._loop.create_future()
        self._waiting[number] = answer
        try:
            # Whole or not at all. A full buffer means hundreds of unanswered requests.
            socket.send_fds(self._socket, [packet], [program, gate, stdout, stderr])
            # no deadline: the caller's: see `processes._ask`
            return await answer
        except ConnectionError as error:
            # Its socket closes before its pidfd tells: whoever tries again must find it gone.
            self.kill()
            await self.wait_gone()
            raise ZygoteGoneError(f"the zygote is gone ({self.status})") from error
        except BlockingIOError as error:
            raise PeerError("the zygote does not read its requests") from error
        finally:
            del self._waiting[number]

    def kill(self) -> None:
        """Kill the zygote if it lives; `gone` follows."""
        if not self.gone.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait_gone(self) -> None:
        """Wait for its death, at most EXIT_DEADLINE_S: TimeoutError."""
        async with asyncio.timeout(EXIT_DEADLINE_S):
            await self.gone.wait()

    def hang_up(self) -> None:
        """Tell the zygote to exit."""
        if not self.gone.is_set():
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
        self.kill()

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
        if isinstance(reply, wire.Spawned | wire.SpawnFailed):
            answer = self._waiting.get(reply.id)
        else:
            answer = self.started
        # Nobody there: the asker gave up and closed the gate, so the process exits by itself.
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _fail(self, error: Exception) -> None:
        for answer in (self.started, *self._waiting.values()):
            if not answer.done():
                answer.set_exception(error)
                # Marks it as seen: a link whose start was given up has nobody left to ask.
                answer.exception()

    def _on_death(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._socket)
        os.close(self._pidfd)
        self._child.wait(EXIT_DEADLINE_S)
        self.gone.set()
        # What it had still said counts: a process it reported must not be started twice.
        with contextlib.suppress(ProtocolError):
            while packet := self._receive():
                self._take(wire.decode_reply(packet))
        self._socket.close()
        self._fail(ZygoteGoneError(f"the zygote is gone ({self.status})"))


def launch(preload: Sequence[str], env: Mapping[str, str]) -> tuple[Child, socket.socket]:
    """A new zygote, and the socket to it. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "ckptless.daemon.agent.ranks.zygote", "--fd", str(theirs.fileno())]
        for module in preload:
            command += ["--preload", module]
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
    ours.setblocking(False)
    return popen, ours
