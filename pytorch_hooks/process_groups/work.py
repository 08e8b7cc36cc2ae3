"""Works that end when their generation ends, whatever the backend below them does."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic, Protocol, TypeVar, cast

import torch

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.agent_session.page import NOWHERE, Page
from ckptless.pytorch_hooks.errors import CollectiveFailed, GenerationEnded
from ckptless.pytorch_hooks.process_groups.sockets import Opened
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private.works import NO_TIMEOUT, shows

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_S = 5.0


class Pending(Protocol):
    """Something that somebody waits for."""

    def release(self) -> None:
        """Let the waiter go: the scope is over and says why."""


class Early:
    """Says what a script may do before `run.keep`: all, where everybody starts anew; else only meet.

    Survivors' groups are over then, and a new process's do nothing yet: a sum would be no sum, silently.
    """

    def __init__(self, *, anew: bool) -> None:
        self.anew = anew
        # What was asked for first. A script that never calls run.keep asks for more and more.
        self.asked = ""

    def leaves_out(self, what: str) -> bool:
        """Whether this is not to be done, and nobody misses it: a barrier. Raises UsageError for others."""
        if "barrier" in what:
            return not self.anew
        self.asked = self.asked or what
        if not self.anew:
            self.refuse()
        return False

    def refuse(self) -> None:
        """Raise UsageError where anything was asked for that a new process cannot have after a fault."""
        if self.asked:
            raise UsageError(
                f"{self.asked} before run.keep: after a fault a new process has nobody to talk to there. "
                "Do it in the function that run.keep is given, or behind run.keep"
            )


class Scope:
    """One generation as its groups and works see it: alive, broken by itself, or ended by a verdict."""

    def __init__(
        self, generation: int, on_broken: Callable[[Scope, str], None], page: Page | None = None
    ) -> None:
        self.generation = generation
        # Where this rank's agent sees how far it is.
        self.page = page or Page()
        self.ended = False
        self.broken: str | None = None
        # Collectives begun here.
        self.calls = 0
        # Until the script calls run.keep, what it has asked for: a new process has nobody to talk to there.
        self.early: Early | None = None
        self.opened: list[Opened] = []
        # What is called, each in a thread, when the scope ends; and how many of these have not returned.
        self.aborts: list[Callable[[], object]] = []
        self.aborting = 0
        # Reentrant, since abort() may come in a signal handler of the thread that holds it.
        self.lock = threading.RLock()
        self._on_broken = on_broken
        self._unsettled: set[Pending] = set()

    def error(self) -> GenerationEnded | CollectiveFailed | None:
        """The reason why nothing may be done in this generation any more, or None."""
        if self.ended:
            return GenerationEnded(f"generation {self.generation} is over")
        if self.broken is not None:
            return CollectiveFailed(f"generation {self.generation} is broken: {self.broken}")
        return None

    def check(self) -> None:
        """Raise if this generation is over or broken."""
        if self.ended or self.broken is not None:
            raise cast("BaseException", self.error())

    def track(self, pending: Pending) -> None:
        """Have an end of the scope release this from now on; at once, if it has come already."""
        with self.lock:
            self._unsettled.add(pending)
            over = self.ended or self.broken is not None
        if over:
            pending.release()

    def settled(self, pending: Pending, counted: int = NOWHERE) -> None:
        """The backend has let go of it, a collective that is `counted` there."""
        with self.lock:
            self._unsettled.discard(pending)
            self.page.done(counted)

    def over(self, counted: int) -> None:
        """Note that a collective which nobody tracks is over, or was none."""
        with self.lock:
            self.page.done(counted)

    @property
    def unsettled(self) -> int:
        """The number of operations that the backend still works on, or is stuck in."""
        with self.lock:
            return len(self._unsettled)

    @property
    def busy(self) -> bool:
        """Whether anything is still at work in a backend, or takes one down."""
        with self.lock:
            return bool(self._unsettled or self.aborting)

    def settle(self, seconds: float) -> None:
        """Wait a little for the backend to let go of its operations (and of their tensors)."""
        deadline = time.monotonic() + seconds
        while self.unsettled and time.monotonic() < deadline:
            time.sleep(0.0005)

    def end(self) -> None:
        """The verdict: free every waiter, then cut the connections. Milliseconds, idempotent, any thread.

        It stands before a device is freed: whoever comes out of a wait for one finds `check` raising.
        """
        with self.lock:
            self.ended = True
            waiting = list(self._unsettled)
            opened = list(self.opened)
            aborts, self.aborts = self.aborts, []
            self.aborting += len(aborts)
        for pending in waiting:
            pending.release()
        for sockets in opened:
            sockets.shut()
        for abort in aborts:
            # All at once: each may wait for what another one holds up.
            elsewhere(functools.partial(self._abort, abort))

    def _abort(self, abort: Callable[[], object]) -> None:
        """Call it. One that raises has not freed what it was to free, and never counts as done."""
        try:
            abort()
        except Exception as error:  # noqa: BLE001  # a user's may raise anything
            logger.warning("collectives cannot be left: %r", error)
            return
        with self.lock:
            self.aborting -= 1

    def wait_aborted(self, seconds: float) -> bool:
        """Wait until all aborts have returned; whether they have."""
        deadline = time.monotonic() + seconds
        while self.aborting and time.monotonic() < deadline:
            time.sleep(0.0005)
        return not self.aborting

    def breaks(self, text: str) -> None:
        """An operation failed by itself. The first one is told to whoever listens; all waiters go free."""
        with self.lock:
            if self.ended or self.broken is not None:
                return
            self.broken = text
            waiting = list(self._unsettled)
        for pending in waiting:
            pending.release()
        self._on_broken(self, text)

    def run(self, call: Callable[[], T]) -> T:
        """The result of a blocking native call, made in another thread; left alone when the scope ends."""
        errand = _Errand(self, call)
        elsewhere(errand.go)
        return errand.outcome()


class _Errand(Generic[T]):
    """A blocking call in a helper thread, and the waiter for it."""

    def __init__(self, scope: Scope, call: Callable[[], T]) -> None:
        self._scope = scope
        self._call = call
        self._over = threading.Event()
        self._results: list[T] = []
        self._cause: Exception | None = None
        scope.track(self)

    def go(self) -> None:
        try:
            self._results.append(self._call())
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that waits
            self._cause = error
        finally:
            self._scope.settled(self)
            self._over.set()

    def release(self) -> None:
        self._over.set()

    def outcome(self) -> T:
        # no deadline: the call's own timeout, or the end of the scope
        self._over.wait()
        cause, self._cause = self._cause, None
        try:
            error = self._scope.error()
            if error is not None:
                raise error from cause
            if cause is not None:
                raise cause
            return self._results[0]
        finally:
            del cause  # its traceback holds this frame: a cycle, and a backend in it


class _Helpers:
    """Threads for blocking waits, kept for a while when done: one per wait would cost more than the wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = 0

    def run(self, task: Callable[[], None]) -> None:
        with self._lock:
            self._tasks.put(task)
            if self._free:
                self._free -= 1
                return
        threading.Thread(target=self._loop, name="ckptless-wait", daemon=True).start()

    def _loop(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._free:
                        self._free -= 1
                        return
                continue  # a task has been put for this thread between the two lines
            task()
            del task  # it holds a work, and through it tensors
            with self._lock:
                self._free += 1


_helpers = _Helpers()


def elsewhere(task: Callable[[], None]) -> None:
    """Run a blocking task in a helper thread (a daemon: it never holds up the end of the process)."""
    _helpers.run(task)


class AbortableWork(torch_private.Work):
    """Completes with the backend's work, or as soon as its scope is over.

    In torch 2.13 nothing wakes a thread that waits inside Gloo: cutting the sockets mostly does, but a
    blocked sender's wake-up can get lost (2 to 3 % of aborts). So nobody waits inside Gloo, but here.
    C++ (DDP's Reducer) cannot see an exception set from Python on a future: there the future completes with
    the tensors, unreduced, and `Scope.check` is what stands before the update: when an optimizer's step
    begins, and where that calls a closure for its gradients, after that.
    """

    def __init__(
        self,
        scope: Scope,
        work: torch_private.Work,
        tensors: Sequence[torch.Tensor],
        counted: int = NOWHERE,
    ) -> None:
        super().__init__()
        self._scope = scope
        self._work = work
        # Where on the page, and when it began.
        self._counted, self._began_s = counted, time.monotonic()
        self._value: object = list(tensors)
        self._cause: Exception | None = None
        self._done = False
        self._good = False
        self._future: torch.futures.Future[object] | None = None
        self._gate = threading.Lock()  # held until done: a plain lock is the cheapest thing to wait on
        # no deadline: it is new, and free
        self._gate.acquire()
        scope.track(self)
        try:
            future = work.get_future()
        except RuntimeError as error:
            if "getFuture" not in str(error):
                raise
            elsewhere(self._wait_inside)  # send, recv, reduce_scatter in Gloo
        else:
            future.add_done_callback(self._completed)

    # -- what the backend's threads call

    def _completed(self, future: torch.futures.Future[object]) -> None:
        try:
            value = future.value()
        except Exception as error:  # noqa: BLE001 - it becomes the cause of what wait() raises
            self._failed(error)
        else:
            self._finish(good=True, value=value)
        self._scope.settled(self, self._counted)

    def _wait_inside(self) -> None:
        try:
            # no deadline: the group's own timeout; this is a helper's thread
            self._work.wait()
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
        else:
            self._finish(good=True, value=self._value)
        self._scope.settled(self, self._counted)

    def _failed(self, error: Exception) -> None:
        self._cause = error.with_traceback(None)  # its frames hold this work: a cycle, and the backend in it
        # Broken first, complete after: whoever sees the tensors of a failed work finds check() raising.
        self._scope.breaks(str(error))
        self._finish(good=False, value=self._value)

    def _finish(self, *, good: bool, value: object) -> None:
        with self._scope.lock:
            if self._done:
                return
            self._done = True
            self._good = good
            self._value = value
            future = self._future
        self._gate.release()
        if future is not None:
            self._scope.page.tail(self._began_s)
            future.set_result(value)

    # -- what Scope calls

    def release(self) -> None:
        """Complete as failed: the scope is over."""
        self._finish(good=False, value=self._value)

    # -- what torch and the user call

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the collective, at most `timeout` (zero: the group's own); raises when it failed."""
        seconds = timeout.total_seconds() if timeout else 0.0
        since_s = time.monotonic()
        if not self._gate.acquire(timeout=seconds if seconds > 0 else -1):
            self._scope.breaks(f"a work was not done after {seconds:g} s")
            self._scope.check()
            return False  # never: a scope that broke does not mend
        self._gate.release()
        if self._good:
            self._scope.page.waited(since_s)
            return True
        raise cast("BaseException", self._scope.error()) from self._cause

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        # no deadline: as `wait`: an abort ends it
        self.wait()

    def get_future(self) -> torch.futures.Future[object]:
        """A future that completes with the tensors, reduced or not: see the class."""
        shows(self)
        with self._scope.lock:
            fresh = self._future is None
            if self._future is None:
                self._future = torch.futures.Future()
            future, done = self._future, self._done
        if fresh and done:
            future.set_result(self._value)
        return future

    def is_completed(self) -> bool:
        """Whether wait() returns or raises at once."""
        return self._done

    def is_success(self) -> bool:
        """Whether wait() returns at once."""
        return self._good

    def exception(self) -> BaseException | None:
        """Return what wait() raises, if it does at once."""
        return self._scope.error() if self._done and not self._good else None

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return cast("list[torch.Tensor]", self._value)

    def source_rank(self) -> int:
        """Return the rank that a received message came from."""
        return torch_private.source_rank(self._work)

    # What dist.recv calls.
    _source_rank = source_rank
