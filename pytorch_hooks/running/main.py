"""`ckptless.run`: calls a training function, again after every fault; without an agent, once.

`ckptless.protect`: does that for the rest of a script, which new processes run from its begin after a fault.
"""

import atexit
import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch

from ckptless.daemon.protocol import log
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import NoRoomError, RecoveryError, StateUnavailableError, UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.agent_session.session import Session
from ckptless.pytorch_hooks.commit.cadence import Cadence, checked
from ckptless.pytorch_hooks.commit.copying import Wanted, checked_overlap
from ckptless.pytorch_hooks.devices import accelerator
from ckptless.pytorch_hooks.elastic.exact import Exact
from ckptless.pytorch_hooks.errors import (
    CarriedError,
    CollectiveFailed,
    DeviceLost,
    GenerationEnded,
    TorchMismatch,
)
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.running import rehearsing, standalone
from ckptless.pytorch_hooks.running.training import COLLECTIVE_TIMEOUT, Run
from ckptless.pytorch_hooks.running.user_hooks import NO_HOOKS, Hook, UserHooks
from ckptless.pytorch_hooks.state import rng

logger = logging.getLogger(__name__)

CAUSE_LIMIT = 500
# What somebody has to mend: before the first step, where nothing is lost yet, it is not tried again.
REFUSALS = (UsageError, RecoveryError, TorchMismatch)
# How long a process that died may hold its device's memory.
MEMORY_DEADLINE_S = 10.0
# The exit code of a rank whose device is lost: sysexits(3) EX_OSERR.
EXIT_DEVICE_LOST = 71


def run(  # noqa: PLR0913  # what a user may say, by keywords
    train: Callable[[Any], object],
    *,
    commit_every: int | Literal["auto"] = 1,
    commit_budget: float = 0.01,
    overlap: Wanted = "off",
    exact: Exact | None = None,
    abort: Hook | None = None,
    finalize: Hook | None = None,
    health_check: Hook | None = None,
    warmup: Hook | None = None,
) -> None:
    """Call `train(run)`; under an agent, call it again in every living process after each fault.

    Returns when `train` has returned on every rank. Process groups are made before the first call and renewed
    after a fault: an init_process_group of the script's own is taken for the groups that are there. Without
    an agent around it (plain Python, torchrun) `train` is called once, and nothing is protected.

    `commit_every`: of so many calls of `run.commit` one makes the step restorable, and a fault takes all
    ranks back to the newest such step. With "auto" as often as commits take no more than `commit_budget` of
    the time, and at least once in 100 steps. Both must be the same on all ranks.

    `overlap`: whether a commit's tensors are copied while the next step runs ("on"), or before `run.commit`
    returns ("off"). With "on" a rank to whose parameters anything but `optimizer.step` writes in between
    loses that step, and copies in order from then on.

    `exact`: have `run.exact.step` give the same bits for any number of ranks from 1 to `exact.virtual_ranks`.
    It must be the same for the job's life.

    After a fault, in each process that lives: `abort()` is called in a thread at once, `finalize()` and then
    `health_check()` when its device is idle. Where one of them raises, or takes too long (`abort` 10 s, the
    others 30 s), the process is replaced. In a spare `warmup()` is called while it waits, once its device is
    ready: for what a rank does only once (compile, load kernels). Raises UsageError.
    """
    hooks = UserHooks(abort, finalize, health_check, warmup).checked()
    checked(commit_every, commit_budget)
    checked_overlap(overlap)
    if exact is not None:
        exact.checked()
    socket_name = env.read().agent_socket
    if socket_name is None:
        standalone.run(train, exact)
        return
    worker = _Worker(socket_name, train, (commit_every, commit_budget), overlap, hooks)
    worker.be_exact(exact)
    worker.run()


def protect(
    *, commit_every: int | Literal["auto"] = 1, commit_budget: float = 0.01, overlap: Wanted = "off"
) -> Any:
    """Protect the rest of a script that is no function: return the `run` that `ckptless.run` would give one.

    To be called once, in the main thread, before the script makes process groups (its init_process_group is
    taken for those that are there); then `run.keep(State(...))` where all is built, and `run.commit()` after
    each step. After a fault all processes are new, run the script from its begin, and get the step in `keep`,
    from memory. Options as of `ckptless.run`. Without an agent around it nothing is protected. Raises
    UsageError.
    """
    checked(commit_every, commit_budget)
    checked_overlap(overlap)
    socket_name = env.read().agent_socket
    if socket_name is None:
        return standalone.protect()
    worker = _Worker(socket_name, None, (commit_every, commit_budget), overlap, NO_HOOKS)
    return worker.begin()


class _Worker:
    """A rank's life: generation after generation, until all ranks have finished."""

    def __init__(
        self,
        socket_name: str,
        train: Callable[[Any], object] | None,
        commits: tuple[int | str, float],
        overlap: Wanted,
        hooks: UserHooks,
    ) -> None:
        self._train = train
        # What the training function has given to `Run.repeat`, and whether all ranks are through with it.
        self._body: Callable[[], object] | None = None
        self._over = False
        self._random = rng.capture()
        self._session = Session(socket_name)
        if env.read().log_format == "json":
            log.configure_package("rank")
            log.always(job=self._session.welcome.job, slot=self._session.welcome.slot)
        page = self._session.page
        self._groups = ProcessGroups(COLLECTIVE_TIMEOUT, self._session.welcome.host, self._broken, page)
        self._session.on_stop = self._groups.abort
        faulthandler.register(m.STACKS_SIGNAL, file=page.stacks_fd(), all_threads=True)
        if hooks.abort is not None:
            self._groups.aborts.append(hooks.abort)
        if rehearsing.begun() is not None:
            # All that there is is written down with a commit.
            commits = (1, commits[1])
        cadence = Cadence(self._groups, *commits)
        self._run = Run(self._session, self._groups, cadence, overlap, train, hooks)
        self._run.on_repeat = self._repeat
        self._session.on_stop = self._stop

    def be_exact(self, exact: Exact | None) -> None:
        """Give the script's steps the same bits for any number of ranks; before `run`."""
        self._run.exactly = self._run.loaders.exact = exact

    def _stop(self, generation: int) -> None:
        """Free the main thread from whatever it waits for, in the listener's."""
        self._groups.abort(generation)
        self._run.loaders.stop(generation)

    def _broken(self, text: str) -> None:
        """A collective failed: say so at once, from whichever thread saw it."""
        generation = self._groups.generation
        if generation is not None and not self._session.ended(generation):
            self._session.send(m.Broken(generation=generation, text=_shorten(text)))

    def run(self) -> None:
        try:
            if env.read().rank < 0:
                self._warm()
            self._generations(0)
            self._run.close()
        except BaseException:
            # The script ends itself (sys.exit, Ctrl-C): no thread is left waiting for it.
            if self._groups.on_device:
                # Nor does what it has committed wait for others, whom it leaves.
                self._groups.abort()
            self._run.leave()
            self._run.loaders.abandon()
            raise

    def begin(self) -> Run:
        """Take the part that is given next, for a script that goes on with it by itself; see `protect`."""
        if env.read().rank < 0:
            self._warm()
        part = self._session.wait_assigned(after=0)
        if part is None:
            # A spare that nobody has needed.
            self._run.close()
            sys.exit()
        before = sys.excepthook

        def uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if isinstance(error, (Exception, GenerationEnded, DeviceLost)):
                self._give_up(part, error)
            else:
                self._over = True
                before(kind, error, trace)

        sys.excepthook = uncaught
        self._run.enter(part)
        self._run.building()
        # Before that of the process groups.
        atexit.register(self._end, part)
        return self._run

    def _give_up(self, part: m.Assigned, error: BaseException) -> None:
        """The script has ended by an error: another process takes this one's place, and its agent ends it."""
        self._over = True
        try:
            cause = self._left(part, error)
        except DeviceLost as lost:
            self._end_with_device(lost)
        self._leave(part.generation, cause)
        # no deadline: the agent ends this process where the job goes on, and answers where it is over
        self._session.wait_assigned(after=part.generation)

    def _end(self, part: m.Assigned) -> None:
        """The script has ended; its exit code says how."""
        if self._over:
            return
        try:
            self._run.finish(waits=False)
        except GenerationEnded as end:
            self._give_up(part, end)
            return
        self._run.close()

    def _warm(self) -> None:
        """A spare makes ready what it may need."""
        try:
            self._run.warm()
        except DeviceLost as lost:
            self._end_with_device(lost)

    def _generations(self, generation: int) -> None:
        """Take part in all generations that come after this one, until the job is done."""
        while (part := self._session.wait_assigned(after=generation)) is not None:
            generation = part.generation
            cause = self._generation(part)
            if cause is None:
                break
            self._leave(generation, cause)

    def _leave(self, generation: int, cause: m.Cause) -> None:
        """Tell that the main thread is out, and what this process is still good for."""
        reuse: m.Reuse = "any"
        if self._body is not None:
            reuse = "going-on"
        elif self._run.sets_up_once:
            reuse = "none"
        self._session.send(m.Left(generation=generation, cause=cause, reuse=reuse))

    def _repeat(self, part: m.Assigned, body: Callable[[], object]) -> None:
        """See Run.repeat: the rest of this generation, and all that follow. Raises UsageError."""
        if self._body is not None:
            raise UsageError("run.repeat was called twice: what it is given is called again after each fault")
        self._body = body
        cause = self._generation(part, entered=True)
        if cause is not None:
            self._leave(part.generation, cause)
            self._generations(part.generation)
        self._over = True

    def _generation(self, part: m.Assigned, *, entered: bool = False) -> m.Cause | None:
        """One call of the training function; None when the job is done, or why it was left."""
        try:
            return self._call(part, entered=entered)
        except DeviceLost as lost:
            self._end_with_device(lost)

    def _call(self, part: m.Assigned, *, entered: bool) -> m.Cause | None:
        """See `_generation`. Raises DeviceLost."""
        try:
            if not entered:
                if part.restore_step is None:
                    rng.restore(self._random)
                self._run.enter(part)
            if self._body is not None:
                self._body()
            elif self._train is not None:
                self._train(self._run)
            if not self._over:
                self._run.finish()
        except (Exception, GenerationEnded) as error:
            if self._over:
                raise
            # Whatever the user's code raises is a fault to report.
            return self._left(part, error)
        return None

    def _cause_of(self, part: m.Assigned, error: BaseException) -> m.Cause:
        """Return why the training was left. Raises DeviceLost, also where that is what it is given."""
        match error:
            case GenerationEnded():
                return m.Cause(kind="stop", text=str(error))
            case CollectiveFailed():
                return m.Cause(kind="broken", text=_shorten(str(error)))
            case NoRoomError():
                return m.Cause(kind="no-room", text=_shorten(str(error)))
            case Exception():
                return self._blame(part, error)
        raise error

    def _end_with_device(self, lost: DeviceLost) -> NoReturn:
        """End this process: another one is needed, and threads that are stuck in the device are left so."""
        self._session.send(m.Note(level="error", kind="device-lost", text=_shorten(str(lost))))
        sys.stderr.write(f"ckptless: this process ends: {lost}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_DEVICE_LOST)

    def _blame(self, part: m.Assigned, error: Exception) -> m.Cause:
        """An error that is only a consequence of the end of the generation is nobody's fault.

        Raises DeviceLost where the device is not sound: after an error that sticks no call works here.
        """
        # Before `keep` the groups of a survivor still stand, aborted, in the generation before.
        entered = self._groups.generation == part.generation
        if self._session.ended(part.generation) or (entered and self._groups.aborted):
            return m.Cause(kind="stop", text=_shorten(repr(error)))
        if entered and self._groups.broken is not None:
            return m.Cause(kind="broken", text=_shorten(self._groups.broken))
        traceback.print_exception(error)
        # MemoryError and others say nothing more.
        text = _shorten(": ".join(filter(None, (type(error).__name__, str(error)))))
        self._groups.abort()
        self._groups.wait_idle()
        kind = self._kind_of(part, error)
        accelerator.prove_sound()
        return m.Cause(kind=kind, text=text)

    def _kind_of(self, part: m.Assigned, error: Exception) -> str:
        """Return the word for what a script has raised; of memory that a device lacks, once there is more."""
        if isinstance(error, StateUnavailableError):
            return "no-state"
        if isinstance(error, CarriedError) or (isinstance(error, REFUSALS) and self._run.begins):
            return "refused"
        built = part.restore_step is None or self._run.has_state
        if not isinstance(error, torch.OutOfMemoryError) or built:
            return "raised"
        # In a new process, of a state that has fitted before: who died there may still have the memory.
        error.__traceback__ = None
        accelerator.wait_for_memory(MEMORY_DEADLINE_S)
        return "no-memory"

    def _left(self, part: m.Assigned, error: BaseException) -> m.Cause:
        """Out of the training function: let go of its frames, which hold activations and graphs.

        Return why. Raises DeviceLost.
        """
        cause = self._cause_of(part, error)
        self._groups.abort()
        # Before the commit is waited for, of which the device may not have done its part.
        self._groups.wait_idle()
        self._run.leave()
        link: BaseException | None = error
        while link is not None:
            link.__traceback__ = None
            link = link.__context__
        sys.stdout.flush()
        faults = self._session.faults
        log.always(faults=faults)
        text = "generation %d is left: %s%s"
        logger.info(text, part.generation, cause.text or cause.kind, log.after(faults))
        return cause


def _shorten(text: str) -> str:
    return text if len(text) <= CAUSE_LIMIT else text[: CAUSE_LIMIT - 3] + "..."
