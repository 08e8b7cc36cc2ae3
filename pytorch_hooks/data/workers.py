"""Processes that make values in the background: forked, each sending what an iterator gives through a pipe.

Forked as DataLoader's workers are, so that datasets and functions need not be pickled; with the same limits:
no CUDA in them, and one torch thread. What comes back is encoded by `state.codec`, not pickled either. A
worker is as far ahead as its pipe holds, and one value more. It dies with the thread that forked it.
"""

from __future__ import annotations

import ctypes
import gc
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
from typing import Any, NoReturn

import torch

from ckptless.daemon.api.errors import BadRecordError, CkptlessError, DataError, UsageError
from ckptless.pytorch_hooks.state import codec

LIMIT = 2 << 30
"""Bytes of one value at most."""

END_DEADLINE_S = 10.0
# What the agent's memfds of batches are called (daemon/agent/dataloader/memory.py).
BATCH_MEMORY = "/memfd:ckptless-batch"
READ_NBYTES = 1 << 20

# Kind; bytes that follow; of a value the nanoseconds in which it was made.
_FRAME = struct.Struct("<BQ")
_VALUE, _ERROR, _END = range(3)
_PR_SET_PDEATHSIG = 1
_ERRORS: dict[str, type[CkptlessError]] = {e.__name__: e for e in (DataError, BadRecordError, UsageError)}


class WorkerDied(Exception):
    """A worker ended without a word; the text says how."""


class Worker:
    """One process. `make` is called in it, and gives the values. Main thread only; `close` ends it."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _live(make, writer, parent)
        os.close(writer)
        self.pid = pid
        self._owner = parent
        self._reader = reader
        self._closed = False

    def next(self, timeout_s: float) -> Any:
        """The next value. Raises StopIteration, WorkerDied, DataError if none comes in time, and what `make`
        raised: a DataError or UsageError, with its traceback as a note.
        """
        limit = time.monotonic() + timeout_s
        kind, nbytes = _FRAME.unpack(self._read(_FRAME.size, limit, timeout_s))
        if kind not in (_VALUE, _ERROR, _END) or nbytes > LIMIT:
            raise WorkerDied(f"sent a frame of kind {kind} and {nbytes} bytes")
        payload = self._read(nbytes, limit, timeout_s)
        if kind == _END:
            raise StopIteration
        value = codec.decode(payload, limit=LIMIT)
        if kind == _ERROR:
            name, text, notes = value
            error = _ERRORS.get(name, DataError)(text)
            for note in notes:
                error.add_note(note)
            raise error
        return value

    def _read(self, nbytes: int, limit: float, timeout_s: float) -> bytearray:
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while done < nbytes:
            if not poll.poll(max(0.0, limit - time.monotonic()) * 1000):
                raise DataError(
                    f"no batch from producer {self.pid} for {timeout_s:.0f} s: look at what the transform "
                    f"does, or give "
                    "the loader a larger timeout_s"
                )
            count = os.readv(self._reader, [view[done : done + READ_NBYTES]])
            if not count:
                raise WorkerDied(self._how_it_ended())
            done += count
        return data

    def _how_it_ended(self) -> str:
        status = self._wait()
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

    def _wait(self) -> int | None:
        """Its exit status, once it has ended; None if it does not."""
        fd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(END_DEADLINE_S * 1000):
                return None
        finally:
            os.close(fd)
        self.pid, pid = 0, self.pid
        # no deadline: it is dead: its pidfd has told
        return os.waitpid(pid, 0)[1]

    def close(self) -> None:
        """Kill it, and wait until it is gone. Only its owner does; in a copy of that nothing happens."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        os.close(self._reader)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()


# --------------------------------------------------------------------------------------- in the worker


def _live(make: Callable[[], Iterator[Any]], writer: int, parent: int) -> NoReturn:
    code = 1
    try:
        _settle(parent)
        code = _serve(make, writer)
    except BrokenPipeError:
        # The owner has hung up.
        code = 0
    except BaseException:  # noqa: BLE001  # nothing of the parent's stack may run here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _settle(parent: int) -> None:
    """Become a process of its own: end with the parent, keep nothing of it that others wait for."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
        os._exit(1)
    # So do the workers of a DataLoader in here, which else wait for ever where their queue is full.
    os.register_at_fork(after_in_child=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    # Ctrl-C, and what Slurm sends to all there is, are the parent's to answer; so are its signal handlers.
    for word in ("INT", "HUP", "QUIT", "USR1", "USR2"):
        signal.signal(signal.Signals[f"SIG{word}"], signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.set_wakeup_fd(-1)
    _let_go()
    # The parent's objects are not ours to finalize.
    gc.freeze()
    torch.set_num_threads(1)


def _let_go() -> None:
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
            continue
        if (is_socket or is_batch) and fd > 2:
            os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


def _serve(make: Callable[[], Iterator[Any]], writer: int) -> int:
    try:
        for value in make():
            _send(writer, _VALUE, codec.encode(value, name="batch", limit=LIMIT))
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  # told to the owner, who raises it
        notes = list(getattr(error, "__notes__", ()))
        text = str(error)
        if not isinstance(error, CkptlessError):
            text = f"the producer failed: {error!r}"
            notes.append(traceback.format_exc())
        _send(writer, _ERROR, codec.encode([type(error).__name__, text, notes]))
        return 1
    _send(writer, _END, b"")
    return 0


def _send(writer: int, kind: int, payload: bytes) -> None:
    os.write(writer, _FRAME.pack(kind, len(payload)))
    view = memoryview(payload)
    while view:
        view = view[os.write(writer, view[:READ_NBYTES]) :]
