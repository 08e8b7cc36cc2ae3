"""Processes that make values in the background, and a pool of them that takes turns at a replica's batches.

Forked as DataLoader's workers are, so that datasets and functions need not be pickled; with the same limits:
no CUDA in them, and one torch thread. What comes back through a pipe is encoded by `state.codec`, not pickled
either. A worker is as far ahead as its pipe holds, and one value more. It dies with the thread that forked
it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import select
import signal
import stat
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ckptless.daemon.protocol.errors import BadRecordError, CkptlessError, DataError, UsageError
from ckptless.pytorch_hooks.data.order import DataPosition, DataReplica
from ckptless.pytorch_hooks.data.production import Production
from ckptless.pytorch_hooks.state import codec

logger = logging.getLogger(__name__)

LIMIT = 2 << 30
"""Bytes of one value at most."""

END_DEADLINE_S = 10.0
DEATHS_IN_A_ROW = 3
# What the agent's memfds of batches are called (daemon/agent/dataloader/node.py).
BATCH_MEMORY = "/memfd:ckptless-batch"
READ_NBYTES = 1 << 20

# Kind; bytes that follow.
_FRAME = struct.Struct("<BQ")
_VALUE, _ERROR, _END = range(3)
_ERRORS: dict[str, type[CkptlessError]] = {e.__name__: e for e in (DataError, BadRecordError, UsageError)}
_PR_SET_PDEATHSIG = 1
_MAP_FIXED = 0x10
# Bound once, at import: a freshly forked child must not be the first to look up a symbol.
_libc = ctypes.CDLL(None, use_errno=True)
_prctl, _mmap = _libc.prctl, _libc.mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p


class WorkerDied(Exception):
    """A worker ended without a word; the text says how."""


# ------------------------------------------------------------------------------------------- a child process


class Child:
    """A forked process that calls `work` and then ends; `close` it. Main thread only.

    In the child there is that thread only, and what other threads held stays locked: so it runs nothing but
    `work`, and leaves by os._exit.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        for stream in (sys.stdout, sys.stderr):
            # What is still in there must not be written twice.
            stream.flush()
        self._owner = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _live(work, self._owner)
        self._pidfd: int | None = os.pidfd_open(self.pid)

    def wait(self, deadline_s: float) -> int | None:
        """Return the exit status once the process has ended; None if it does not, or somebody else got it."""
        assert self._pidfd is not None
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(deadline_s * 1000):
            return None
        os.close(self._pidfd)
        self._pidfd = None
        try:
            # no deadline: it is dead: its pidfd has told
            return os.waitpid(self.pid, 0)[1]
        except ChildProcessError:
            return None

    def close(self) -> None:
        """Kill it, and wait until it is gone. Only its owner does; in a copy of that nothing happens."""
        if self._pidfd is not None and os.getpid() == self._owner:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self.wait(END_DEADLINE_S)


def _live(work: Callable[[], None], parent: int) -> NoReturn:
    """The child's whole life."""
    code = 1
    try:
        _settle(parent)
        work()
        code = 0
    except BaseException:  # noqa: BLE001  # nothing of the parent's stack may run here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _settle(parent: int) -> None:
    """Become a process of its own: end with the parent, keep nothing of it that others wait for."""
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
        os._exit(1)
    os.register_at_fork(after_in_child=_settle_below)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C, and what Slurm sends to all there is, are the parent's to answer.
    for word in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
        signal.signal(signal.Signals[f"SIG{word}"], signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _let_go_of_files()
    _let_go_of_batches()
    # The parent's objects are not ours to finalize, and the collector's writes would copy shared pages.
    gc.freeze()
    # OpenMP's threads have not come along.
    torch.set_num_threads(1)


def _settle_below() -> None:
    """Settle the workers of a DataLoader in here, which else wait for ever where their queue is full."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _let_go_of_files() -> None:
    """A peer of the parent must see the connection end when the parent does; and a batch that the parent was
    about to write is not kept by us.

    The numbers stay taken, so that no object which closes its descriptor closes a later one of ours.
    """
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        try:
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
            is_batch = str(entry.readlink()).startswith(BATCH_MEMORY)
        except OSError:
            continue  # that of the listing
        if (is_socket or is_batch) and fd > 2:
            os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


def _let_go_of_batches() -> None:
    """Unmap what the parent has mapped: it would be kept for as long as this process lives."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if BATCH_MEMORY in line:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            # Something else in its place, and not nothing: its owner's copy here may unmap it once more.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _mmap(begin, end - begin, mmap.PROT_READ, flags, -1, 0)


# ---------------------------------------------------------------------------------------------- a worker


class Worker(Child):
    """A child that calls `make`, which gives the values. Main thread only; `close` ends it."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._reader, writer = os.pipe2(os.O_CLOEXEC)

        def work() -> None:
            os.close(self._reader)
            _serve(make, writer)

        super().__init__(work)
        os.close(writer)

    def next(self, timeout_s: float) -> Any:
        """The next value. Raises StopIteration, WorkerDied, DataError if none comes in time, and what `make`
        raised: a DataError or UsageError, with its traceback as a note.
        """
        limit_s = time.monotonic() + timeout_s
        kind, nbytes = _FRAME.unpack(self._read(_FRAME.size, limit_s, timeout_s))
        if kind not in (_VALUE, _ERROR, _END) or nbytes > LIMIT:
            raise WorkerDied(f"sent a frame of kind {kind} and {nbytes} bytes")
        if kind == _END:
            raise StopIteration
        value = codec.decode_apart(self._read(nbytes, limit_s, timeout_s), 0, nbytes)
        if kind == _ERROR:
            name, text, notes = value
            error = _ERRORS.get(name, DataError)(text)
            for note in notes:
                error.add_note(note)
            raise error
        return value

    def _read(self, nbytes: int, limit_s: float, timeout_s: float) -> bytearray:
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while done < nbytes:
            if not poll.poll(max(0.0, limit_s - time.monotonic()) * 1000):
                raise DataError(
                    f"no batch from producer {self.pid} for {timeout_s:.0f} s: look at what the transform "
                    "does, or give the loader a larger timeout_s"
                )
            count = os.readv(self._reader, [view[done : done + READ_NBYTES]])
            if not count:
                raise WorkerDied(self._how_it_ended())
            done += count
        return data

    def _how_it_ended(self) -> str:
        status = self.wait(END_DEADLINE_S)
        if status is None:
            return "closed its pipe and lives"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        hint = {
            "SIGBUS": ": was a data file cut off, or /dev/shm full?",
            "SIGKILL": ": is there enough memory?",
        }
        return f"was killed by {name}{hint.get(name, '')}"

    def close(self) -> None:
        """See Child."""
        if self._reader >= 0 and os.getpid() == self._owner:
            os.close(self._reader)
            self._reader = -1
        super().close()


def _serve(make: Callable[[], Iterator[Any]], writer: int) -> None:
    try:
        try:
            for value in make():
                _send(writer, _VALUE, value)
            _send(writer, _END, None)
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001  # told to the owner, who raises it
            notes = list(getattr(error, "__notes__", ()))
            text = str(error)
            if not isinstance(error, CkptlessError):
                text = f"the producer failed: {error!r}"
                notes.append(traceback.format_exc())
            _send(writer, _ERROR, [type(error).__name__, text, notes])
    except BrokenPipeError:
        return  # the owner has hung up


def _send(writer: int, kind: int, value: Any) -> None:
    encoded = codec.encode_apart(value)
    if encoded.nbytes > LIMIT:
        raise UsageError(f"a batch takes {encoded.nbytes} bytes where {LIMIT} are the limit")
    _write_all(writer, _FRAME.pack(kind, encoded.nbytes if kind != _END else 0))
    if kind == _END:
        return
    end = 0
    for offset, part in encoded.parts:
        _write_all(writer, bytes(offset - end))
        _write_all(writer, part)
        end = offset + len(part)


def _write_all(writer: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(writer, view[:READ_NBYTES]) :]


# ------------------------------------------------------------------------------------------------ a pool


class _Word(NamedTuple):
    """The word of a pool's worker: a batch with its number, the source's state after it, and of each record
    left out of it why; or that its epoch has no more batches (`number` is -1).
    """

    epoch: int
    number: int
    batch: Any = None
    stream: Any = None
    skipped: Any = ()


class Pool:
    """`count` workers, 1 or more, each with a batch or more ahead. Main thread only; close it.

    `tell(kind, text)` hears of a worker that died and was replaced.
    """

    def __init__(self, count: int, timeout_s: float, tell: Callable[[str, str], None]) -> None:
        self._count, self._timeout_s, self._tell = count, timeout_s, tell
        self.workers: list[Worker] = []
        # Where the workers stand; None where nobody may rely on them.
        self._at: tuple[DataReplica, int, int] | None = None

    def epoch(
        self, production: Production, position: DataPosition
    ) -> Iterator[tuple[Any, DataPosition, Any]]:
        """The rest of an epoch: batch, the position after it, and of each record left out of it why.

        Raises DataError, UsageError; the pool is closed then.
        """
        if self._at != (production.layout, position.epoch, position.batch):
            self.close()
            self.workers.extend(self._worker(production, position, turn) for turn in range(self._count))
        while True:
            # Until the batch is there: nobody else may take this pool for one that stands somewhere.
            self._at = None
            try:
                found = self._next(production, position)
            except BaseException:
                self.close()
                raise
            if found.number < 0:
                break
            skips = position.skipped + len(found.skipped)
            position = DataPosition(position.epoch, position.batch + 1, skips, found.stream)
            self._at = (production.layout, position.epoch, position.batch)
            yield found.batch, position, found.skipped
        self._at = (production.layout, position.epoch + 1, 0)

    def _worker(self, production: Production, position: DataPosition, turn: int) -> Worker:
        return Worker(lambda: _produce(production, position, turn, self._count))

    def _next(self, production: Production, position: DataPosition) -> _Word:
        turn = position.batch % self._count
        for _ in range(DEATHS_IN_A_ROW):
            try:
                found = _Word(*self.workers[turn].next(self._timeout_s))
                while found.number < 0 and found.epoch < position.epoch:
                    # Another worker has told the end of that epoch.
                    found = _Word(*self.workers[turn].next(self._timeout_s))
            except WorkerDied as death:
                why = f"the producer of batch {position.batch} of epoch {position.epoch} {death}"
                logger.warning("%s; another one takes its place", why)
                self._tell("data-producer-died", why)
                self.workers[turn].close()
                self.workers[turn] = self._worker(production, position, turn)
                continue
            if found.epoch != position.epoch or found.number not in (-1, position.batch):
                raise DataError(
                    f"a producer made batch {found.number} of epoch {found.epoch}, not {position}"
                )
            return found
        raise DataError(f"{why}, {DEATHS_IN_A_ROW} times in a row")

    def close(self) -> None:
        """End the workers; the next epoch starts new ones."""
        self._at = None
        while self.workers:
            self.workers.pop().close()


def _produce(
    production: Production, position: DataPosition, turn: int, turns: int
) -> Iterator[tuple[Any, ...]]:
    """Give a worker's batches, as _Words, of this epoch and of all that follow, and the end of each."""
    while True:
        for made in production.produce(position, turn=turn, turns=turns):
            after = made.after
            yield after.epoch, after.batch - 1, made.batch, after.stream, list(made.skipped)
        yield position.epoch, -1
        position = DataPosition(epoch=position.epoch + 1)
