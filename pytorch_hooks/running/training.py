"""`Run`: what a training function is given, under an agent."""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckptless.daemon.protocol import log
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import ProtocolError, RecoveryError, StateUnavailableError, UsageError
from ckptless.daemon.protocol.page import COMMIT, COMPUTE, DATA, OPTIMIZER
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.agent_session import job_key
from ckptless.pytorch_hooks.agent_session.session import Session
from ckptless.pytorch_hooks.commit.cadence import Cadence
from ckptless.pytorch_hooks.commit.copying import Copying, Wanted
from ckptless.pytorch_hooks.commit.versions import Late, Versions, record_digest
from ckptless.pytorch_hooks.cursor import KNOWS_ALL
from ckptless.pytorch_hooks.cursor.own_loops import OwnLoops
from ckptless.pytorch_hooks.devices import accelerator
from ckptless.pytorch_hooks.devices.arrival import DeviceNumber
from ckptless.pytorch_hooks.devices.memory import MemoryWatch
from ckptless.pytorch_hooks.elastic import batches
from ckptless.pytorch_hooks.elastic import cut as cutting
from ckptless.pytorch_hooks.elastic.exact import Exact, ExactSteps, begin, check_saved
from ckptless.pytorch_hooks.elastic.memory import FormerStep
from ckptless.pytorch_hooks.elastic.policy import of_size
from ckptless.pytorch_hooks.elastic.recut import Recut, Room, new_memory, recut
from ckptless.pytorch_hooks.elastic.sums import Share
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.process_groups.models import Buckets, Sharded
from ckptless.pytorch_hooks.running import rehearsing, twin_comparison
from ckptless.pytorch_hooks.running.entry import Entry
from ckptless.pytorch_hooks.running.loaders import Loaders
from ckptless.pytorch_hooks.running.rehearsing import Rehearsing, Seen
from ckptless.pytorch_hooks.running.standalone import checked_state, exact_steps
from ckptless.pytorch_hooks.running.user_hooks import NO_HOOKS, UserHooks
from ckptless.pytorch_hooks.running.warming import Warmed, warm
from ckptless.pytorch_hooks.saving.load import load
from ckptless.pytorch_hooks.saving.recut import load_recut, world_size_of
from ckptless.pytorch_hooks.state import (
    Draft,
    RecordView,
    State,
    TensorSet,
    branch,
    codec,
    draft,
    gradients,
    private,
    read,
    readback,
    restore,
    rng,
)
from ckptless.pytorch_hooks.state.attributes import MANY
from ckptless.pytorch_hooks.state.objects import parts_of, tree_of, watch_of
from ckptless.pytorch_hooks.state.reach import Outside
from ckptless.pytorch_hooks.state.second_look import SecondLook, is_due
from ckptless.pytorch_hooks.state.twins import refuse, twins
from ckptless.pytorch_hooks.state.walk import shown
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private import compiling

logger = logging.getLogger(__name__)

# How long one collective may take before Gloo itself gives up; the agent notices a hang long before.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
STORE_TIMEOUT = timedelta(seconds=60)
WAIT_WORTH_A_NOTE_S = 1.0
# Of steps that are not committed the agent is told so often.
TELL_INTERVAL_S = 0.2


@dataclass
class _Kept:
    """The things that this process keeps of a State that was built in it, for as long as it lives."""

    state: State
    tensors: TensorSet
    look: SecondLook
    buckets: Buckets
    fsdp: Sharded
    # The ranks that have the same tensors, this one among them.
    twins: tuple[int, ...]
    # The digest of the layout that is known to be one that can be cut anew.
    cuts: str = ""

    @classmethod
    def of(cls, state: State, rank: int, world_size: int) -> "_Kept":
        tensors = TensorSet(state)
        look = SecondLook(state, tensors.names)
        gradients.watch_steps(state)
        modules = (module for _prefix, module in tree_of(state).modules())
        return cls(state, tensors, look, Buckets(state), Sharded(modules), twins(state, rank, world_size))


class Run:
    """One rank's part of a job, for as long as its process lives. Main thread only."""

    def __init__(
        self,
        session: Session,
        groups: ProcessGroups,
        cadence: Cadence | None = None,
        overlap: Wanted = "off",
        train: Callable[["Run"], object] | None = None,
        hooks: UserHooks = NO_HOOKS,
    ) -> None:
        self._session, self._groups, self._hooks, self._page = session, groups, hooks, session.page
        self._cadence = cadence or Cadence(groups)
        self._told_at = 0.0
        # A loss that a device computes, to be told once it is there.
        self._telling: DeviceNumber | None = None
        self._told_many = False
        # Generators as at a commit, until the next batch; whether it was told that they were moved between.
        self._random_at: list[Any] | None = None
        self._told_draws = False
        # The thread that called `keep`.
        self._thread = threading.get_ident()
        self._versions = Versions(session, lasts=groups.lasts)
        self._copying = Copying(self._versions, overlap, partial(self._warn, "overlap-off"))
        self._part: m.Assigned | None = None
        self._built: _Kept | None = None
        # The cut that the assignment is of, and what was built is for (see m.Assigned).
        self._cut = 0
        self._device_memory = MemoryWatch()
        # In a process that was made ready as a spare.
        self._warmed: Warmed | None = None
        # Tells where what `train` has beside its State changes, once.
        tell_outside = partial(self._tell_first, "outside-state")
        self._outside = Outside(train, tell_outside)
        self._own_loops = OwnLoops(tell_outside, partial(self._tell_first, "late-break"))
        # Whether what this process writes has been read back.
        self._read_back = False
        # Of `ckptless-run --rehearse`; and what the newest record has.
        self._rehearsing = rehearsing.begun()
        self._rehearsed: dict[str, bytes] = {}
        self.loaders = Loaders(session, lambda: groups.calls, self._shared, self._enter_loop)
        # Until the first step in a generation.
        self._entry: Entry | None = None
        # What `ckptless.run` was told of it, and the steps of the present generation.
        self.exactly: Exact | None = None
        self._exact: ExactSteps | None = None
        # Whether `keep` was called in this generation.
        self._has_state = False
        # Of the twins on this node one writes the tensors.
        self._writes = False
        self._compared = self._commits = 0
        # The newest step that is done, the newest that is committed, and the one that the process began with.
        self._step = self._saved = self._built_at = 0
        self._on_recovery: list[Callable[[Run], None]] = []
        self._on_resize: list[Callable[[Run, int, int], None]] = []
        # See `building` and `repeat`; for what calls the training function.
        self.sets_up_once = False
        # Whether who calls `batches` knows which epoch it is in, as a framework's loop does.
        self.counts_epochs = False
        self.on_repeat: Callable[[m.Assigned, Callable[[], object]], None] | None = None
        self._was_spare = False
        self._aftermath = False
        self.waited_s = 0.0
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)

    def _before_update(
        self, _optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> gradients.StepArguments | None:
        self._page.enter(OPTIMIZER)
        if self._entry is not None:
            self._end_entry()
        # No update with gradients of a generation that is over.
        self._groups.check()
        began = time.monotonic()
        self._copying.before_update()
        self._cadence.meter.held_up(time.monotonic() - began)
        return gradients.with_checked_closure(args, kwargs, self._groups.check)

    def _after_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        gradients.mark_used(optimizer, args, kwargs)
        self._page.enter(COMPUTE)

    def _warn(self, kind: str, text: str) -> None:
        self._session.send(m.Note(level="warning", kind=kind, text=text))

    def _tell_first(self, kind: str, text: str) -> None:
        """Tell it in the first rank, whose script all others have, too."""
        if self.rank == 0:
            logger.warning("%s", text)
            self._warn(kind, text)

    def _tell_many(self, look: SecondLook, took_s: float, made: Draft) -> None:
        """Tell, once, of plain data that makes each commit slow, and how slow this one was."""
        name = look.many() if look.is_whole and self.rank == 0 and not self._told_many else None
        if name is not None:
            self._told_many = True
            text = (
                f"state.{name} has more than {MANY} numbers or other items in lists and dicts, which each "
                f"commit writes out one by one: this record took {took_s * 1000:.0f} ms and has "
                f"{made.nbytes} bytes. In a tensor or an array they would take no time"
            )
            logger.warning("%s", text)
            self._warn("state-slow", text)

    def _shared(self) -> Container[int]:
        """Return by id what the State has as plain data, and its generators."""
        if self._built is None:
            return ()
        parts = parts_of(self._built.state)
        return {*parts.own, *map(id, parts.generators.values())}

    # ------------------------------------------------------------------------------------- words

    @property
    def _assigned(self) -> m.Assigned:
        if self._part is None:
            raise UsageError("this belongs inside the function that is given to ckptless.run")
        return self._part

    @property
    def rank(self) -> int:
        """The number of this process among all; it keeps it for as long as `world_size` is the same."""
        return self._assigned.rank

    @property
    def local_rank(self) -> int:
        """The index of this process on its node."""
        return self._session.welcome.slot

    @property
    def _kept(self) -> _Kept:
        assert self._built is not None
        return self._built

    @property
    def _shard(self) -> int:
        """The shard that this rank has tensors of: the lowest of its twins, itself among them."""
        return min(self._kept.twins)

    @property
    def world_size(self) -> int:
        """Number of ranks; of an elastic job it may be another one each time that `train` is called."""
        return self._assigned.world_size

    @property
    def generation(self) -> int:
        """Number of the present assignment of ranks to slots; every recovery makes a new one."""
        return self._assigned.generation

    @property
    def step(self) -> int:
        """The newest step that is done; 0 right after `keep` built the state."""
        self._own_loops.knows_step = self._own_loops.asked = True
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch of the data that `batches` is in, of the loader that is not named."""
        self._own_loops.knows_epochs = True
        return self.loaders.epoch

    @property
    def spare(self) -> bool:
        """Whether this process began as a spare."""
        return self._was_spare

    @property
    def joins(self) -> bool:
        """Whether this process is new in a job that goes on: what it builds is overwritten by `keep`."""
        return self._built is None and self._assigned.restore_step is not None

    @property
    def begins(self) -> bool:
        """Whether the job has made no step yet, so that nothing is lost where it ends."""
        return not self._assigned.restore_step and (not self._has_state or self._step == self._built_at)

    @property
    def has_state(self) -> bool:
        """Whether `keep` has given the state in this generation."""
        return self._has_state

    @property
    def redone(self) -> bool:
        """Whether the step that comes next had been done before a fault, though not by all: for logs."""
        return self._step < self._assigned.done_step

    @property
    def policy(self) -> Mapping[str, Any]:
        """Return what --elastic-policy has for the present number of nodes, to be read; else nothing."""
        part = self._assigned
        return of_size(env.read().policy, part.world_size // part.local_world_size)

    @property
    def exact(self) -> ExactSteps:
        """Steps with the same bits for any number of ranks. UsageError where they were not asked for."""
        return exact_steps(self._exact)

    def on_recovery(self, function: Callable[["Run"], None]) -> None:
        """Call `function(run)` when the state is back after a fault; not as a job begins.

        It is called by `keep`, on every rank. To be said each time that the training function is called,
        before `keep`.
        """
        self._on_recovery.append(function)

    def on_resize(self, function: Callable[["Run", int, int], None]) -> None:
        """Call `function(run, old_world_size, new_world_size)` where the state is another number of ranks'.

        Once it is back, after what `on_recovery` was given, and before it is committed by the new number, so
        that what the function changes in the State is committed with it. To be said as `on_recovery` is.
        """
        self._on_resize.append(function)

    def building(self) -> None:
        """Say that what comes from here on, until `keep`, belongs to what builds the state.

        So that groups may be made, and collectives be used, as in the function given to `keep`. In a process
        that `joins` they do nothing, and what they were to fill stays as it was. To be followed by `repeat`:
        where a fault comes before that, the process is replaced.
        """
        self.sets_up_once = True
        self._groups.end_early()

    def repeat(self, body: Callable[[], object]) -> None:
        """Call `body`, and after each fault that again, not the whole training function.

        `body` is to call `keep`. Returns when it has returned on all ranks: what follows is done once, and is
        not protected. A process that would have to build anew is replaced. Raises UsageError.
        """
        assert self.on_repeat is not None
        self.on_repeat(self._assigned, body)

    # ------------------------------------------------------------------------------------- enter

    def enter(self, part: m.Assigned) -> None:
        """Begin a generation: what `ckptless.run` does before it calls the training function."""
        if self._part is None:
            self._was_spare = env.read().rank < 0
        self._has_state, self._compared, self._commits = False, 0, 0
        self._exact = None
        self._take(part)
        if self.exactly is not None:
            self.exactly.check_ranks(self._most_ranks)
        self._on_recovery.clear()
        self._on_resize.clear()
        compiling.tell(*self._page.compile_hooks)
        if self._warmed is not None:
            # What was set just now is read for each group.
            self._warmed.look()
        self._ready_device()
        if part.cut != self._cut:
            self._cut = part.cut
            self._forget()
        if part.restore_step is None:
            self._built = None
            self._step = self._saved = 0
            self._join()
            self._open(self._store())
        elif self._built is None:
            self._open(None)
        self._groups.begin_early(anew=part.restore_step is None)

    def _take(self, part: m.Assigned) -> None:
        """Have this part from here on."""
        self._part, self._entry = part, None
        log.always(rank=part.rank, generation=part.generation, faults=part.faults)
        if part.faults:
            going_on = (
                f"goes on after step {part.restore_step}" if part.restore_step is not None else "begins"
            )
            text = "generation %d%s: rank %d %s"
            logger.info(text, part.generation, log.after(part.faults), part.rank, going_on)
        job_key.learn(part.cache_key)
        self.loaders.enter(part)
        self._own_loops.enter()
        env.become(part.rank, part.world_size, part.group_rank, part.store, part.ranks_per_root)

    def _wait_needed(self) -> None:
        """Where this part was told ahead: it is built for, and the others train until it is needed."""
        if self._assigned.ahead:
            self._session.send(m.Prepared(generation=self.generation))
            self._take(self._session.wait_needed())

    def _forget(self) -> None:
        """Let go of what was built for another number of ranks: there is no room for two states."""
        self._versions.forget(self._built.tensors if self._built is not None else None)
        self.loaders.forget()
        self._outside.forget()
        if self._built is None:
            return
        self._built, self._read_back = None, False
        if "torch._dynamo" in sys.modules:
            # Compiled code, and its graphs, are of modules that will not come back.
            torch.compiler.reset()
        # Modules and their hooks hold each other.
        gc.collect()
        accelerator.give_back()
        # Another part of the state, and other groups: nothing that it knew is to be compared with.
        self._device_memory = MemoryWatch()

    def warm(self) -> None:
        """Make the device of a spare ready, and whatever the script wants. Raises DeviceLost."""
        self._settle_environment()
        self._warmed = warm(self.local_rank, self._hooks.warmup, lambda text: self._tell("warm-up", text))

    def _settle_environment(self) -> None:
        self._groups.settle_environment(lambda text: self._warn("environment", text))

    def _ready_device(self) -> None:
        """Have the accelerator, if there is one, at rest and known to be sound, before any tensor is touched.

        Then the script says whether this process is fit, too. Raises DeviceLost.
        """
        if self._groups.generation is None:
            self._settle_environment()
        else:
            self._groups.wait_idle()
            accelerator.prove_sound()
            if (grown := self._device_memory.look()) is not None:
                self._warn("device-memory", grown)
            self._hooks.call(self._tell)

    def _tell(self, kind: str, text: str) -> None:
        self._session.send(m.Note(level="info", kind=kind, text=text))

    def _open(self, store: torch_private.Store | None) -> None:
        if self._groups.generation is not None:
            self._groups.reset()
        part = self._assigned
        self._groups.open(rank=part.rank, world_size=part.world_size, generation=part.generation, store=store)

    def _join(self) -> None:
        """Tell that this rank is ready, and wait until every rank is."""
        self._session.send(m.Joined(generation=self.generation))
        self._session.wait_go(self.generation)

    def _store(self) -> torch_private.Store:
        host, port = self._assigned.store
        return torch_private.TCPStore(host, port, None, False, STORE_TIMEOUT, wait_for_workers=False)

    # -------------------------------------------------------------------------------------- keep

    def keep(self, build: Callable[[], State] | State) -> State:
        """The job's state: built once in a process, and after a fault brought back to the agreed step.

        `build` makes model, optimizer and everything else that the next step depends on. In a process that
        lives through a fault it is not called again: the same objects come back, their process groups
        renewed. In a new process it is called, and the state is then restored into what it built; so it is
        in every process where `world_size` is another than before: what it gives then are new objects, and
        those from before are let go of first. Call it once, before any collective but a barrier. Where
        `ckptless.protect` has given this run, the State itself may be given. Raises
        UsageError, also where one came before; GenerationEnded.
        """
        if isinstance(build, State):
            made = build
            if not self.sets_up_once:
                raise UsageError(
                    "run.keep was given a State: give it the function that builds one, which is not called "
                    "again in a process that has one"
                )
            return self.keep(lambda: made)
        if self._has_state:
            raise UsageError("run.keep was called twice: put everything into one State")
        self._thread = threading.get_ident()
        self._groups.end_early()
        with self._groups.ours():
            return self._keep(build)

    def _keep(self, build: Callable[[], State]) -> State:
        if self._built is None:
            state = checked_state(build())
            if self._warmed is not None:
                self._warmed.check()
            refuse(state)
            self._groups.mark()
            self._built = _Kept.of(state, self.rank, self.world_size)
            if self.generation == 1 and self._built.fsdp.sums():
                self._tell_first(
                    "gloo-sums",
                    f"Gloo of torch {torch.__version__} sums float32 and bfloat16 gradients of FSDP2 where "
                    "they are to be averaged (pytorch issue 162338): they grow with the number of ranks. "
                    "Call set_force_sum_reduction_for_comms(True) of the sharded modules, or take torch 2.9",
                )
        self._wait_needed()
        part = self._assigned
        if self.exactly is not None:
            share = Share(self.rank, self.world_size, self.exactly.virtual_ranks)
            self._exact = ExactSteps(self.exactly, self._kept.state, share, lambda: self._step)
        alike = self._kept.twins
        # None named: all ranks.
        ranks = () if len(alike) == self.world_size else alike
        self._session.send(m.Twins(generation=part.generation, ranks=ranks))
        if part.restore_step is None:
            if self.exactly is not None:
                begin(self.exactly)
            if resume := env.read().resume:
                self._resume(Path(resume))
            self._compare_all("before the first step")
            self._session.send(m.Restored(generation=part.generation))
            self._writes = self._session.wait_writes(part.generation)
            self._has_state = True
            self._built_at = self._step
            self._check()
            self._put(self._step)
            self._begin(self._step)
        else:
            self._recover(part)
            self._has_state = True
        # Where no step was done, the script is to do again what it does before the first one.
        self._entry = Entry(self._kept.state, self._kept.tensors, goes_on=bool(part.restore_step))
        return self._kept.state

    def _enter_loop(self) -> None:
        """The loop that the fault was in goes on: what the script has done before it is not to be seen."""
        entry, self._entry = self._entry, None
        if entry is None or self.counts_epochs:
            return
        changed = entry.put_back()
        if changed:
            self._tell_first(
                "put-back",
                f"{' and '.join(changed)}: changed between run.keep and the loop that goes on, as when the "
                "job began. The values of the last step are put back: change them in the function given to "
                "run.keep, in run.on_recovery, or where run.step is 0",
            )

    def _end_entry(self) -> None:
        """A step begins, or an update: tell whether the script has written to parameters before it.

        Without run.batches this is found out at the first update, which what the loop itself writes precedes.
        """
        entry, self._entry = self._entry, None
        if entry is None or self.counts_epochs:
            return
        name = entry.written()
        first = self.generation == 1 and not self._own_loops.knows_step
        if name is not None and (first or entry.goes_on):
            self._tell_first(
                "written-early",
                f"the script writes to {name} between run.keep and its first step: after a fault it does so "
                "again, to what was trained. Write to it in the function given to run.keep, or only where "
                "run.step is 0",
            )

    def compare(self, where: str = "") -> None:
        """Compare parameters, buffers and optimizer state with those of the rank's twins, bit by bit.

        To find where a script makes ranks differ: at several places of a step, on every rank alike; not for
        each step of a long run, since all is read. UsageError where they differ, with `where` and the first
        tensor. Also raises GenerationEnded, CollectiveFailed.
        """
        with self._groups.ours():
            self._compare_all(where)

    def _compare_all(self, where: str) -> None:
        self._compared += 1
        when = where or f"at step {self._step}, comparison {self._compared}"
        self._compare(self._kept.twins, when, str(self._compared))

    def _compare(self, ranks: tuple[int, ...], when: str, which: str) -> None:
        twin_comparison.compare(self._groups, self.rank, ranks, self._kept.tensors, when, which)

    def _resume(self, folder: Path) -> None:
        """Memory has nothing: go on from a step on the disk, into what was built just now."""
        saved_by = world_size_of(folder)
        if saved_by != self.world_size:
            found_recut = load_recut(folder, self.rank, self._shard, self._kept.tensors)
            self._restore_recut(found_recut)
            self._go_on_from(found_recut.step, saved_by)
            return
        found = load(folder, self.rank, self.world_size)
        if found.shard != self._shard:
            raise RecoveryError(
                f"rank {self.rank} is built as a twin of rank {self._shard}; in {folder} it was one of "
                f"rank {found.shard}"
            )
        view = read(found.record)
        self._restore(found.record, view, found.payload)
        self._go_on_from(found.step)

    def _restore_recut(self, found: Recut) -> None:
        """Do as `_restore`, with a step of another number of ranks."""
        view = read(found.record)
        if view.step != found.step:
            raise RecoveryError(f"the record of step {found.step} says it is of step {view.step}")
        self._restore(found.record, structs.replace(view, layout=found.layout), found.payload, recut=True)
        # In an exact job what is drawn outside of virtual ranks is the same everywhere.
        if found.of_rank != self.rank and self.exactly is None:
            branch(found.record, found.other, self._kept.state, self.rank)

    def _go_on_from(self, step: int, former_size: int | None = None) -> None:
        """The state is back, of so many ranks, or of as many as now: tell the script."""
        self._step = step
        for function in self._on_recovery:
            function(self)
        if former_size is not None and former_size != self.world_size:
            for resized in self._on_resize:
                resized(self, former_size, self.world_size)

    def _restore(
        self, record: bytes, view: RecordView, payload: torch.Tensor, *, recut: bool = False
    ) -> None:
        """Put a step back into what lives here: its tensors, then all the rest.

        `recut`: it is one of another number of ranks, its tensors cut for this one.
        """
        check_saved(view.exact, self.exactly)
        self._kept.tensors.unpack(payload, view.layout)
        self._kept.buckets.renew(view.ddp_layouts)
        restore(record, self._kept.state)
        self.loaders.restore(view.cursor, recut=recut)

    def _recover(self, part: m.Assigned) -> None:
        """Renew the groups, then copy the restored step's state back into whatever lives here.

        Nobody can tell what has been written to since: an update by hand is like any other operation.
        """
        kept, step = self._kept, part.restore_step
        assert step is not None
        # Before anybody looks at the tensors: parameters must be shards again.
        kept.fsdp.renew()
        # What came in the step that was cut off a new process does not have.
        kept.tensors.check_built()
        kept.look.at_modules()
        self._join()
        self._groups.configure(self.generation, self._store())
        self._writes = self._session.wait_writes(self.generation)
        if part.former_shards:
            self._recover_recut(step, part.former_shards)
            return
        found = self._versions.fetch(self.generation, step, self._shard, kept.tensors)
        record, at, view = found.record, found.at, read(found.record)
        if view.step != step:
            raise RecoveryError(f"the record of step {step} says it is of step {view.step}")
        if view.layout.digest != found.header.layout:
            raise StateUnavailableError(f"record and tensors of step {step} are not of one layout")
        self._restore(record, view, found.payload)
        self._step, self._aftermath = step, True
        self._built_at = step
        self._begin(step)
        self._session.send(m.Restored(generation=self.generation))
        # Its copies on other nodes may have gone with them: commit it again.
        self._versions.send(self._commit_of(step, record, at if self._writes else None, None))
        self._go_on_from(step)

    def _recover_recut(self, step: int, former_shards: tuple[int, ...]) -> None:
        """Take this rank's part of what another number of ranks has committed, and commit that.

        The script's functions come before: a rank that restores what is committed here would not call them.
        """
        former = FormerStep(self._session, self.generation, step, former_shards)
        try:
            found = recut(former, self.rank, self._shard, self._kept.tensors, self._room())
        except ProtocolError as error:
            raise RecoveryError(
                f"step {step}, which {len(former_shards)} ranks have committed, cannot be gone on from by "
                f"{self.world_size} ({error})"
            ) from error
        self._tell("recut", f"rank {self.rank} took {former.nbytes} bytes of {found.shards} shards")
        self._restore_recut(found)
        # Its bytes are in the State, and about to be written again.
        del found
        self._built_at, self._aftermath = step, True
        self._go_on_from(step, len(former_shards))
        self._session.send(m.Restored(generation=self.generation))
        self._check()
        self._begin(step)
        self._put(step)

    def _room(self) -> Room:
        """Return what gives memory to put a step together in: a slot's, where this rank has slots."""
        if not self._writes:
            return new_memory
        return partial(self._versions.scratch, self._kept.tensors, self.generation)

    # ----------------------------------------------------------------------------------- batches

    def batches(self, loader: Iterable[Any], epochs: int = 1, *, name: str = "") -> Iterator[Any]:
        """Batches of `loader` from the committed position on, to the end of `epochs` epochs.

        The position is committed with the step. Of one epoch it is the rest of the present one: a loop over
        epochs goes `for epoch in range(run.epoch, n)`. Several are counted from the begin of the job: after a
        fault it is what is left of them.
        A loader with state_dict and load_state_dict is continued by them; any other is begun again in a new
        process, and the batches already trained on are passed over. Of several loaders each has a `name`;
        after a fault, loops that were over by then give no batches until the one that it was in is asked for.
        UsageError where the job is elastic and the loader no MappedLoader, or its batches are too small.
        """
        self._need_state("batches")
        has_own = self.counts_epochs or any("epoch" in key for key in parts_of(self._kept.state).data)
        if epochs == 1 and not name and not has_own:
            self._own_loops.next_epoch(self.loaders.epoch)
        knows = KNOWS_ALL if has_own else self._own_loops.knows
        return self._guarded(self.loaders.batches(loader, epochs, name, knows))

    def local_batch(self, batch_size: int) -> int:
        """Return how many samples of a global batch of so many this rank has, as MappedLoader deals them.

        UsageError where a rank had none with as many ranks as the job may ever have.
        """
        batches.check(batch_size, self._most_ranks)
        return batches.local_batch(batch_size, self.rank, self.world_size)

    def batch_weight(self, batch_size: int) -> float:
        """Return by what to multiply the mean loss over this rank's part of a global batch of so many.

        DDP and FSDP average gradients over ranks: then it is the mean over the global batch, also where parts
        are not alike. 1 where they are. Raises as `local_batch`.
        """
        batches.check(batch_size, self._most_ranks)
        return batches.batch_weight(batch_size, self.rank, self.world_size)

    def accumulate(self, batch_size: int, micro_batch: int) -> int:
        """Return how many micro-batches, of `micro_batch` samples at most, a rank's part of a batch makes.

        The same on all ranks: `x.tensor_split(n)` gives them. They are not alike, so add up sums, and divide
        by `batch_size`. Raises as `local_batch`.
        """
        batches.check(batch_size, self._most_ranks, micro_batch)
        return batches.micro_batches(batch_size, micro_batch, self.world_size)

    @property
    def _most_ranks(self) -> int:
        return max(*self._assigned.sizes, self.world_size, 1)

    def _guarded(self, found: Iterator[Any]) -> Iterator[Any]:
        if self._entry is not None and not self._entry.goes_on:
            self._end_entry()
        self._random_at = None
        while True:
            # A script may have caught what ended the step, and come here as from one that was done.
            self._groups.check()
            self._check_thread()
            self._look_for_draws()
            self._page.enter(DATA)
            began = time.monotonic()
            with self._groups.ours(), self._own_loops.known():
                batch = next(found, _END)
            self._page.enter(COMPUTE)
            self._page.waited_for_data(time.monotonic() - began)
            if batch is _END:
                self._own_loops.asked = False
                return
            self._own_loops.gave()
            yield batch

    def _check_thread(self) -> None:
        """Raise UsageError in a thread that takes batches ahead: the next commit would count them as done."""
        if threading.get_ident() != self._thread:
            raise UsageError(
                "run.batches was asked for a batch by another thread than run.keep, and what is taken ahead "
                "of the training would be lost with a fault: take batches where you train, and let the "
                "workers of a DataLoader make them ahead"
            )

    def _drawn(self) -> list[Any]:
        """Return what torch's generator of the CPU, and those of the State, are like; at some steps, all."""
        own = parts_of(self._kept.state).generators.values()
        drawn: list[Any] = [one.get_state() for one in (torch.default_generator, *own)]
        # To read and compare all takes ten times as long (140 us); who draws here does so at each step.
        return [*drawn, rng.capture()] if is_due(self._step) else drawn

    def _look_for_draws(self) -> None:
        """Tell, once, where random numbers were drawn between a commit and the next batch of its loop."""
        at, self._random_at = self._random_at, None
        if at is not None and not rng.equal(at, self._drawn()):
            self._told_draws = True
            self._tell_first(
                "outside-state",
                f"random numbers were drawn between the commit of step {self._step} and the next "
                "batch, maybe by an evaluation, whose loader draws a seed: after a fault they are not drawn "
                "again, and the training goes on with others. Do it before run.commit",
            )

    @contextmanager
    def phase(self, name: str, up_to: float) -> Iterator[None]:
        """Say that what follows is no part of a step, as an evaluation, and may take `up_to` seconds.

        `with run.phase("evaluation", up_to=600): evaluate()`.
        Until then a rank in it is not taken for one that hangs, nor is the job, however long its steps take.
        UsageError unless that is a day at most.
        """
        with self._page.phase(name, up_to):
            yield

    def end_epoch(self, name: str = "") -> None:
        """Have `batches` begin the next epoch of a loader, though this one may have more batches.

        Behind a loop that has ended by itself, and at the begin of an epoch, it does nothing.
        An iterator that `batches` has given before is not to be used any more.
        """
        self._need_state("end_epoch")
        self.loaders.end_epoch(name)

    # ------------------------------------------------------------------------------------ commit

    def commit(self, loss: float | torch.Tensor | None = None) -> int:
        """The step is done: from here on it can be restored. Return its number, 1 for the first.

        Call it after optimizer, scheduler and scaler have stepped; it is refused where there are gradients
        that no optimizer has used, or what was not there in `keep`. It waits only when the copies of the one
        before are not yet held elsewhere. What only optimizers change is copied while the training goes on; a
        rank that ends before that goes back to the step before. With `commit_every` of `ckptless.run` only
        some of the calls make their step restorable. `loss` is shown by `ckptctl status`. Raises
        UsageError, GenerationEnded, StateMoved.
        """
        self._need_state("commit")
        with self._groups.ours():
            return self._commit(loss)

    def _commit(self, loss: float | torch.Tensor | None) -> int:
        step = self._step + 1
        if self._rehearsing is not None:
            self._rehearsing.before(step, self.rank)
        self._page.enter(COMMIT)
        if self.generation == 1 and not self.counts_epochs:
            # Later ones have nothing new to tell.
            kept = self._kept
            has = partial(kept.look.has, kept.tensors)
            self._own_loops.look_at_code(self._outside.train, parts_of(kept.state).data, has)
            self._own_loops.stepped()
        due = self._cadence.is_due(step)
        self._cadence.meter.held_up(self._versions.held_s())
        began = time.monotonic()
        self._cadence.meter.enter(began)
        if due:
            self._save(step, loss)
        else:
            self._pass(step, loss)
        ended = time.monotonic()
        self._cadence.meter.leave(ended, committed=due)
        self._page.stepped(step, ended, ended - began, again=step <= self._assigned.done_step)
        if due:
            self._cadence.committed(step)
            if not (self._told_draws or self.counts_epochs):
                self._random_at = self._drawn()
        if self._aftermath and step > (self._assigned.restore_step or 0):
            if step == self._built_at + 1:
                faults = log.after(self._assigned.faults)
                logger.info("generation %d%s: step %d is its first", self.generation, faults, step)
            # Off the critical path of the recovery: take down what the old generation left.
            self._aftermath = self._groups.sweep() > 0
        if self._rehearsing is not None:
            self._rehearse(self._rehearsing, step, loss)
        return step

    def _rehearse(self, part: Rehearsing, step: int, loss: float | torch.Tensor | None) -> None:
        """Write down what there is; after the last step of a rehearsal every process ends."""
        kept = self._kept
        tensors = {shown(name): tensor for name, tensor in kept.tensors.named()}
        drawn = {f"random numbers ({name})": codec.pack(one) for name, one in rng.capture().items()}
        known = {**kept.look.known(), id(self): self, id(part): part}
        seen = Seen(tensors, {**self._rehearsed, **drawn}, known)
        part.note((step, self.generation, self.rank), loss, seen)
        if part.is_over(step):
            self.finish()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _begin(self, step: int) -> None:
        """All ranks are at this step, which is committed."""
        self._saved = step
        self._page.begin(step)
        self._cadence.begin(step, self.rank, self.world_size)
        self._told_at = 0.0
        # One of a generation that was cut off is garbage.
        self._telling = None

    def _pass(self, step: int, loss: float | torch.Tensor | None) -> None:
        """A step that is not committed; of the first one it is told at once, of others now and then."""
        self._groups.check()
        self._kept.buckets.settle()
        self.loaders.passed()
        self._step = step
        now = time.monotonic()
        if now - self._told_at >= TELL_INTERVAL_S:
            self._told_at = now
            every, share = self._cadence.every, self._cadence.meter.share
            told = m.Stepped(
                generation=self.generation, step=step, loss=self._told_loss(loss), every=every, share=share
            )
            self._session.send(told)

    def _told_loss(self, loss: float | torch.Tensor | None) -> float | None:
        """Return the loss; of a device the one that was to be told the last time, without waiting for it."""
        before, self._telling = self._telling, None
        found = _number(loss)
        if not isinstance(found, DeviceNumber):
            return found
        if before is not None and before.arrival.is_there:
            self._telling = found
            return before.read()
        self._telling = before or found
        return None

    def _save(self, step: int, loss: float | torch.Tensor | None = None) -> None:
        self._groups.check()
        # Before the buckets: gradients may lie in them.
        self._check()
        self._kept.buckets.settle()
        self._compare_here()
        self._wait_for_copies()
        self._put(step, loss)

    def _check(self) -> None:
        """Raise UsageError where a new process would not get all that the next step depends on."""
        kept = self._kept
        kept.tensors.check_built()
        kept.tensors.check_shared()
        gradients.check_used(kept.state, pending=kept.fsdp.holds_gradients())
        if not self.sets_up_once and _has_rpc():
            raise UsageError(
                "this process is a worker of torch.distributed.rpc, which cannot meet again with a new one "
                "after a fault: leave init_rpc out, or take ckptless.protect(), whose processes are all new"
            )
        if self._assigned.sizes and kept.cuts != kept.tensors.planned.digest:
            cutting.check(kept.tensors)
            kept.cuts = kept.tensors.planned.digest

    def _compare_here(self) -> None:
        """Compare twins on this node now and then with the one of them that writes."""
        self._commits += 1
        here = tuple(rank for rank in self._kept.twins if rank in self._assigned.local_ranks)
        if len(here) >= 2 and is_due(self._commits):
            self._compare(here, f"after step {self._step + 1}", f"commit-{self._commits}")

    def _put(self, step: int, loss: float | torch.Tensor | None = None) -> None:
        """Commit a step, of which nothing is to be waited for."""
        kept = self._kept
        kept.look.look(kept.tensors)
        self._outside.look(kept.look, self.loaders.objects)
        self._own_loops.look()
        written = None
        if self._writes:
            written = self._copying.write(kept.tensors, step, self.generation, self._shard, self.rank)
        began = time.monotonic()
        exact = None if self.exactly is None else self.exactly.words
        made = draft(kept.state, step, self.loaders.committed(), kept.buckets.layouts, kept.tensors, exact)
        if self._rehearsing is not None:
            self._rehearsed = made.parts()
        record = made.finish() if made.is_whole else b""
        self._tell_many(kept.look, time.monotonic() - began, made)
        own = kept.tensors.spans(watch_of(kept.state).recorded) if self._writes else ()
        number = _number(loss)
        there, coming = (None, number) if isinstance(number, DeviceNumber) else (number, None)
        late = Late(None if made.is_whole else made, coming)
        self._versions.send(self._commit_of(step, record, None, there), written, own, late)
        self._step = self._saved = step
        # The first step that was trained: what is made lazily is there.
        if self._writes and not self._read_back and step > self._built_at:
            self._read_back = True
            self._check_written(step)

    def _check_written(self, step: int) -> None:
        """Read the version back, as a recovery would, and compare. Raises UsageError."""
        # no deadline: copies of memory, and the agent's answers; the control plane ends what hangs
        self._copying.wait()
        found = self._versions.fetch(self.generation, step, self._shard, self._kept.tensors)
        readback.check_written(self._kept.state, found.record, found.payload)

    def _commit_of(self, step: int, record: bytes, at: m.TensorsAt | None, loss: float | None) -> m.Commit:
        return m.Commit(
            generation=self.generation,
            step=step,
            record=record,
            digest=record_digest(record),
            tensors=at,
            loss=loss,
            every=self._cadence.every,
            share=self._cadence.meter.share,
        )

    def _wait_for_copies(self) -> None:
        """The rule that makes every step restorable: see docs/design/restoring.md."""
        # no deadline: copies of memory, and the agent's answers; the control plane ends what hangs
        self._copying.wait()
        waited_s = self._session.wait_acked(self.generation, self._saved)
        self.waited_s += waited_s
        if waited_s > WAIT_WORTH_A_NOTE_S:
            text = f"rank {self.rank} waited {waited_s:.2f} s for the copies of step {self._saved}"
            self._warn("commit-waited", text)

    def _need_state(self, what: str) -> None:
        if not self._has_state:
            raise UsageError(f"run.{what} needs the state: call run.keep(build) first")

    # ----------------------------------------------------------------------------------- the end

    def finish(self, *, waits: bool = True) -> None:
        """The training function has returned: wait for the others (if this one `waits`), who may need it."""
        self._wait_needed()
        # no deadline: copies of memory, and the agent's answers; the control plane ends what hangs
        self._copying.wait()
        if self._has_state:
            # The last step, too, is compared with the twins' before training counts as over.
            self._session.wait_acked(self.generation, self._saved)
        self._session.send(m.Finished(generation=self.generation))
        if waits:
            self._session.wait_released(self.generation)

    def leave(self) -> None:
        """The training function has raised: nothing of this generation is sent any more after this."""
        self._copying.leave()

    def close(self) -> None:
        """The job is done: end the threads that send commits, and what makes batches."""
        self.loaders.close()
        self._versions.close()


_END = object()


def _has_rpc() -> bool:
    rpc = sys.modules.get("torch.distributed.rpc")
    try:
        return rpc is not None and rpc.get_worker_info() is not None
    except RuntimeError:  # There is none: torch has no other word for it.
        return False


def _number(loss: float | torch.Tensor | None) -> float | DeviceNumber | None:
    if isinstance(loss, torch.Tensor):
        on_cpu = loss.device.type == "cpu" or loss.numel() != 1
        return float(loss.detach()) if on_cpu else DeviceNumber(private.local(loss))
    return None if loss is None else float(loss)
