"""The daemon's Unix socket, to which any local process may connect: nothing that one does stops the daemon.

A descriptor that comes with bytes (SCM_RIGHTS) is closed by whoever receives these, or closes the socket they
lie in; and close(2) may take as long as its sender chose (SO_LINGER). So where the kernel can (Linux 6.16)
descriptors are refused (SO_PASSRIGHTS), and everywhere both receive(2) and close(2) are a `CallThread`'s: one
thread for each user, which can hold up that user alone, and is interrupted when it is stuck.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from ckptless.daemon.ckptlessd.admission import Admission
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import PeerError
from ckptless.daemon.protocol.fdsocket import take_descriptor
from ckptless.daemon.protocol.peercred import peer_credentials

logger = logging.getLogger(__name__)

R = TypeVar("R")

# SOL_SOCKET option of Linux 6.16: 0 has sendmsg(2) refuse descriptors (EPERM); sockets inherit it from theirs
# that listens. Python has no name for it.
SO_PASSRIGHTS = 83
BACKLOG = 4096
ACCEPT_AT_ONCE = 256
# No descriptor is left: connections wait in the kernel until then.
AGAIN_S = 1.0
READ_NBYTES = 1 << 16
# To a process that does not read; a large job's orders are about as large.
UNSENT_LIMIT = CONTROL_LIMIT
# A call that the kernel does not finish in this time is interrupted; at once, where so many more wait.
STUCK_S, MOST_WAITING = 0.25, 16
# So many descriptors come with one byte at most (SCM_MAX_FD).
_MOST_FDS = 253
# Interrupts a system call, and does nothing else. By default it is ignored, which interrupts nothing.
_INTERRUPT = signal.SIGURG


def refuse_descriptors(sock: socket.socket, *, refuse: bool = True) -> None:
    """Have the kernel refuse descriptors that are sent to `sock`, where it can."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0 if refuse else 1)


def _may_hold_descriptors(sock: socket.socket) -> bool:
    """Whether descriptors could be sent to `sock` from the moment when somebody connected."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) != 0
    except OSError:
        return True


class CallThread:
    """A thread that makes one call after the other; nothing waits for its end, the process's neither."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._since: float | None = None
        self._thread = threading.Thread(target=self._run, name="ckptless-client", daemon=True)
        self._thread.start()

    def call(self, do: Callable[[], R]) -> "asyncio.Future[R]":
        """Make a call after those before it, whether or not anybody waits for what it gives."""
        answer: asyncio.Future[R] = self._loop.create_future()
        self._calls.put((do, answer))
        return answer

    def end(self) -> None:
        """End the thread: no call follows."""
        self._calls.put(None)

    def look(self) -> None:
        """Interrupt a call that is stuck: tcp_close ends its wait then."""
        since, ident = self._since, self._thread.ident
        patience = STUCK_S if self._calls.qsize() < MOST_WAITING else 0.0
        if since is not None and ident is not None and time.monotonic() - since > patience:
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(ident, _INTERRUPT)

    def _run(self) -> None:
        # no deadline: `end` is the last that comes
        while (item := self._calls.get()) is not None:
            do, answer = item
            self._since = time.monotonic()
            given: Any = None
            error: Exception | None = None
            try:
                given = do()
            except Exception as raised:  # noqa: BLE001  # it is whoever waits for it that it is raised for
                error = raised
            self._since = None
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, answer, given, error)


def _settle(answer: "asyncio.Future[Any]", given: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(given)
    else:
        answer.set_exception(error)
        answer.exception()  # nobody may wait for it


class Client:
    """A process at the other end of a connection; owned by the event loop, `close` it.

    One task reads at a time. Calls raise OSError, and PeerError where the other end has hung up.
    """

    def __init__(self, sock: socket.socket, worker: CallThread, ended: Callable[["Client"], None]) -> None:
        self.pid, self.uid = peer_credentials(sock)
        self._sock, self._worker, self._ended = sock, worker, ended
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._waiting: asyncio.Future[None] | None = None
        self.open = True
        # It is an agent, or waits for an answer: it gives way to nobody.
        self.stays = False

    async def read(self, nbytes: int = READ_NBYTES) -> bytes:
        """Return what has come, at most so many bytes; b"" at the end of the connection."""
        while await self._ready(self._loop.add_reader, self._loop.remove_reader):
            try:
                # no deadline: there is something to read, and a worker that is stuck is interrupted
                return await self._worker.call(lambda: self._sock.recv(nbytes))
            except BlockingIOError:
                continue
            except ConnectionError:
                break
        return b""

    def write(self, message: object) -> None:
        """Queue a message. Whoever leaves too many unread is hung up on."""
        self.write_frame(encode(message))

    def write_frame(self, data: bytes) -> None:
        """Queue a message that is encoded already."""
        if not self.open:
            return
        if len(self._unsent) + len(data) > UNSENT_LIMIT:
            logger.warning("process %d of uid %d does not read what it is told", self.pid, self.uid)
            self.close()
            return
        self._unsent += data
        if len(self._unsent) == len(data):
            self._flush()

    @property
    def has_unsent(self) -> bool:
        """Whether it has left so much unread that the kernel takes no more for it."""
        return bool(self._unsent)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError as error:
            logger.debug("process %d of uid %d: %s", self.pid, self.uid, error)
            self.close()
            return
        self._loop.remove_writer(self._sock)

    # ------------------------------------------------------------------ messages and descriptors

    async def send(self, message: object) -> None:
        """Send a message, before a descriptor that belongs to it."""
        self.write(message)
        await self.drain()  # no deadline: the caller's

    async def drain(self) -> None:
        """Wait until the kernel has all that was written."""
        while self._unsent and await self._ready(self._loop.add_writer, self._loop.remove_writer):
            self._flush()
        if not self.open:
            raise PeerError("the other end hung up")

    async def receive(self, kind: Any) -> Any:
        """A message of type `kind`, and not a byte more. Raises ProtocolError."""
        decoder: Decoder[Any] = Decoder(kind, CONTROL_LIMIT)
        while not (messages := decoder.feed(await self._some(decoder.missing))):
            pass
        return messages[0]

    async def _some(self, nbytes: int) -> bytes:
        data = await self.read(nbytes)
        if not data:
            raise PeerError("the other end hung up")
        return data

    async def send_fd(self, fd: int) -> None:
        """Pass a descriptor, which stays the caller's."""
        while await self._ready(self._loop.add_writer, self._loop.remove_writer):
            with contextlib.suppress(BlockingIOError):
                socket.send_fds(self._sock, [b"\0"], [fd])
                return
        raise PeerError("the other end hung up")

    def take_descriptors(self) -> None:
        """Have the kernel let them come from now on."""
        refuse_descriptors(self._sock, refuse=False)

    async def receive_fd(self) -> int:
        """A descriptor, which is the caller's from here on. Raises ProtocolError where none comes."""
        while await self._ready(self._loop.add_reader, self._loop.remove_reader):
            call = self._worker.call(lambda: take_descriptor(self._sock, _MOST_FDS))
            try:
                return await asyncio.shield(call)
            except BlockingIOError:
                continue
            except asyncio.CancelledError:
                call.add_done_callback(self._discard_taken)
                raise
        raise PeerError("the other end hung up")

    def _discard_taken(self, call: "asyncio.Future[int]") -> None:
        if not call.cancelled() and call.exception() is None:
            self.discard([call.result()])

    def discard(self, fds: list[int]) -> None:
        """Close descriptors that this client has sent."""
        self._worker.call(lambda: close_all(fds))

    # ------------------------------------------------------------------------------------- close

    async def _ready(self, watch: Callable[..., Any], unwatch: Callable[..., Any]) -> bool:
        """Wait until the socket can be read (written); False where it is closed at this end."""
        if not self.open:
            return False
        self._waiting = ready = self._loop.create_future()
        watch(self._sock, _wake, ready)
        try:
            await ready  # no deadline: the caller's
        finally:
            self._waiting = None
            if self.open:
                unwatch(self._sock)
        return self.open

    def close(self) -> None:
        """Hang up; what is not sent by then is lost. Harmless when it is closed."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._unsent.clear()
        if self._waiting is not None:
            _wake(self._waiting)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._worker.call(self._sock.close).add_done_callback(lambda _: self._ended(self))


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


class UnixServer:
    """Accepts on a socket that listens; `on_client(client)` owns what it is given."""

    def __init__(
        self,
        sock: socket.socket,
        admission: Admission,
        now: Callable[[], float],
        on_client: Callable[[Client], None],
    ) -> None:
        self._sock, self._admission, self._now, self._on_client = sock, admission, now, on_client
        # Of each user, in the order in which they came.
        self._clients: dict[int, dict[Client, None]] = {}
        # One for each user that has a connection, and how many it has; those beyond the limits share one.
        self._workers: dict[int | None, CallThread] = {}
        self._uses: dict[int | None, int] = {}
        self._again: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept from now on."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(_INTERRUPT, lambda _number, _frame: None)
        refuse_descriptors(self._sock)
        self._sock.setblocking(False)
        self._watch()

    def _watch(self) -> None:
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = self._sock.accept()  # no deadline: it does not block
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("no connection can be taken: %s", error)
                loop.remove_reader(self._sock)
                self._again = loop.call_later(AGAIN_S, self._watch)
                return
            sock.setblocking(False)
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        pid, uid = peer_credentials(sock)
        why = self._admission.enter(uid)
        if why:
            self.tell_refused(pid, uid, why)
            if not _may_hold_descriptors(sock):
                sock.close()
                return
        key = uid if not why or uid in self._workers else None
        self._uses[key] = self._uses.get(key, 0) + 1
        if key not in self._workers:
            self._workers[key] = CallThread()
        worker = self._workers[key]
        if why:
            worker.call(sock.close).add_done_callback(lambda _: self._unuse(key))
            worker.look()
            return
        if self._admission.crowded:
            self._make_room()
        client = Client(sock, worker, self._left)
        self._clients.setdefault(uid, {})[client] = None
        self._on_client(client)

    def _make_room(self) -> None:
        """Close, of whoever has most connections, the one that has been here longest for nothing."""
        for uid in sorted(self._clients, key=lambda uid: len(self._clients[uid]), reverse=True):
            if self._admission.may_stay(uid):
                continue
            for one in self._clients[uid]:
                if one.open and not one.stays:
                    self.tell_refused(one.pid, uid, "it says nothing, and many others want to")
                    one.close()
                    return

    def _left(self, client: Client) -> None:
        mine = self._clients[client.uid]
        del mine[client]
        if not mine:
            del self._clients[client.uid]
        self._admission.leave(client.uid)
        self._unuse(client.uid)

    def _unuse(self, key: int | None) -> None:
        if key not in self._workers:
            return  # this server is closed
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self._workers.pop(key).end()

    def tell_refused(self, pid: int, uid: int, why: str) -> None:
        """Log that a process is refused, or what it said is; of each user once in a while."""
        self._admission.tell_refused(uid, f"process {pid} of uid {uid}: {why}", self._now())

    def look(self) -> None:
        """Now and then: see that no worker is stuck."""
        for worker in self._workers.values():
            worker.look()

    def close(self) -> None:
        """Accept no more, and hang up on everybody. The socket itself stays open."""
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._sock)
        for client in [client for mine in self._clients.values() for client in mine]:
            client.close()
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()


def listen(path: Path, mode: int) -> socket.socket:
    """A socket at `path` to which those may connect whom `mode` lets. Raises OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Under its name it is there with its mode, and listens.
    new = path.with_name(f".{path.name}")
    new.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # chmod(2) would follow a link that somebody has put there meanwhile.
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(str(new))
        finally:
            os.umask(before)
        refuse_descriptors(sock)
        sock.listen(BACKLOG)
        new.rename(path)
    except BaseException:
        sock.close()
        raise
    return sock
