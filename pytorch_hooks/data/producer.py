"""The producer: a process, forked from a rank as a DataLoader's workers are, that makes a node's batches.

It has the data set because the rank has it: nothing is pickled. It is forked in the rank's main thread,
between two steps. In the child there is that thread only, and what other threads held stays locked; so the
child runs nothing but the loader's code and this file, and leaves by os._exit. It ends with its rank, and
with its agent.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ckptless.daemon.api import ring as m
from ckptless.daemon.api import ring_entry as entry
from ckptless.daemon.api.errors import CkptlessError, PeerError, ProtocolError
from ckptless.daemon.api.messages import PROTOCOL
from ckptless.pytorch_hooks.data import batch_codec
from ckptless.pytorch_hooks.data.idle import Replicas
from ckptless.pytorch_hooks.data.ring_socket import RingSocket
from ckptless.pytorch_hooks.data.workers import BATCH_MEMORY
from ckptless.pytorch_hooks.state import codec

Made: TypeAlias = tuple[int, Any, Any]
"""(Sequence number, batch, position after it)."""
Produce: TypeAlias = Callable[[int, Any], Iterator[Made]]
"""Of a stream, from a position on, to the stream's end."""

PROCESS_NAME = "ckptless-data"
NICE = 5
PR_SET_PDEATHSIG = 1
# Bound once, at import: a freshly forked child must not be the first to look up a symbol.
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p
MAP_FIXED = 0x10


class ProducerProcess:
    """A child that makes batches; `close` it. The thread that makes this must live as long as the process."""

    def __init__(self, agent_socket: str, lease: int, manifest: str, produce: Produce) -> None:
        for stream in (sys.stdout, sys.stderr):
            # What is still in there must not be written twice.
            stream.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run(parent, agent_socket, lease, manifest, produce)
        self.pidfd = os.pidfd_open(self.pid)

    def close(self) -> None:
        """End it, and wait until it has ended: it is killed, which nothing can delay for long."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        # Suppressed: somebody in this process waits for every child.
        with contextlib.suppress(ChildProcessError):
            # no deadline: it was killed just now
            os.waitpid(self.pid, 0)
        os.close(self.pidfd)


def _run(parent: int, agent_socket: str, lease: int, manifest: str, produce: Produce) -> None:
    """The child's whole life."""
    status = 1
    try:
        _settle(parent)
        _Worker(agent_socket, lease, manifest, produce).work()
        status = 0
    except PeerError:
        status = 0  # the agent does not want it any more, or is gone
    except BaseException:  # noqa: BLE001 - nothing of the parent's may run in here, its handlers included
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _settle(parent: int) -> None:
    """Become a process of its own."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise PeerError("the rank has ended")
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # A Ctrl-C, and what Slurm sends to all there is, are the rank's to answer: this ends with it.
    for word in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
        signal.signal(signal.Signals[f"SIG{word}"], signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _let_go_of_sockets()
    _let_go_of_batches()
    # The collector's writes would copy the pages that are shared with the rank.
    gc.freeze()
    Path("/proc/self/comm").write_text(PROCESS_NAME)
    os.nice(NICE)
    # OpenMP's threads have not come along.
    torch.set_num_threads(1)


def _let_go_of_sockets() -> None:
    """The rank's connections must end when it does, and not when this one has ended, too."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the names are all that is wanted
        fd = int(name)
        try:
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:
            continue  # that of the listing
        if is_socket and fd > 2:
            # Not closed: somebody's object would close the number once more, when it is another's.
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _let_go_of_batches() -> None:
    """What the rank has mapped would be kept for as long as this process lives."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if BATCH_MEMORY in line:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            # Something else in its place, and not nothing: its owner's copy here may unmap it once more.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
            _mmap(begin, end - begin, mmap.PROT_READ, flags, -1, 0)


class _Worker:
    """Makes what it is asked for, one after the other."""

    def __init__(self, agent_socket: str, lease: int, manifest: str, produce: Produce) -> None:
        self._manifest, self._produce = manifest, produce
        self._socket: RingSocket[m.ToProducer] = RingSocket(agent_socket, m.ToProducer)
        self._socket.send(m.ProducerHello(protocol=PROTOCOL, lease=lease))
        # For each stream: of which history, which number comes next, and whoever makes it.
        self._at: dict[int, tuple[int, int, Iterator[Made]]] = {}
        self._replicas = Replicas()

    def work(self) -> None:
        """Until the agent hangs up: PeerError."""
        while True:
            found = self._socket.next()
            if found is None:
                # no deadline: to wait is what a producer does; the agent's end is its own
                self._socket.wait(None)
                continue
            job, fd = found
            assert fd is not None
            try:
                answer = self._make(job, fd)
            finally:
                os.close(fd)
            self._socket.send(answer)

    def _make(self, job: m.RingMake, fd: int) -> m.FromProducer:
        try:
            made = self._next(job)
            if made is None:
                return m.RingAtEnd(stream=job.stream, seq=job.seq)
            batch, after = made
            position = codec.encode(after, name="position", limit=entry.POSITION_LIMIT)
            nbytes = write(fd, self._manifest, job.stream, job.seq, (batch, position))
            return m.RingMade(stream=job.stream, seq=job.seq, nbytes=nbytes, position=position)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything; the rank raises it
            self._at.pop(job.stream, None)
            return m.RingFailed(stream=job.stream, seq=job.seq, text=_text_of(error))

    def _let_go_of(self, replica: int) -> None:
        """Of whoever makes a replica's batches, of any epoch."""
        for stream in [one for one in self._at if one % m.STREAMS == replica]:
            del self._at[stream]

    def _next(self, job: m.RingMake) -> tuple[Any, Any] | None:
        """The batch, and the position after it; None at the stream's end."""
        for idle in self._replicas.ask(job.stream % m.STREAMS):
            self._let_go_of(idle)
        history, seq, batches = self._at.pop(job.stream, (-1, -1, iter(())))
        if (history, seq) != (job.history, job.seq):
            # Who was in the middle of another epoch is not asked for the rest of it any more.
            self._let_go_of(job.stream % m.STREAMS)
            seq, batches = job.base, self._produce(job.stream, codec.decode(job.position))
        for number, batch, after in batches:
            if number != seq:
                raise ProtocolError(f"the loader made batch {number} in place of batch {seq}")
            seq += 1
            if number == job.seq:
                self._at[job.stream] = (job.history, seq, batches)
                return batch, after
        return None


def write(fd: int, manifest: str, stream: int, seq: int, made: tuple[object, bytes]) -> int:
    """Write an entry of (batch, position after it) to an empty memfd: its bytes. UsageError, OSError."""
    batch, position = made
    encoded = batch_codec.encode(batch)
    digest = entry.body_digest(position, encoded.nbytes, encoded.parts)
    header = entry.EntryHeader(manifest, stream, seq, len(position), encoded.nbytes, digest)
    os.ftruncate(fd, header.nbytes)
    _write_all(fd, memoryview(entry.encode(header) + position), 0)
    for offset, part in encoded.parts:
        _write_all(fd, part, header.batch_at + offset)
    return header.nbytes


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _text_of(error: Exception) -> str:
    if isinstance(error, CkptlessError):
        # The notes have the traceback of what failed in a worker.
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return text[: m.TEXT_LIMIT]
    # The last lines tell more than the first.
    return "".join(traceback.format_exception(error))[-m.TEXT_LIMIT :]
