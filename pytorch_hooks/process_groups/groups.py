"""All process groups of a rank: opened once, left at any moment, renewed for each generation."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.agent_session.page import Page
from ckptless.pytorch_hooks.devices import accelerator
from ckptless.pytorch_hooks.errors import DeviceLost, GenerationEnded
from ckptless.pytorch_hooks.process_groups import device_backends
from ckptless.pytorch_hooks.process_groups.device_backends import Devices
from ckptless.pytorch_hooks.process_groups.exchange import NAME, Exchange
from ckptless.pytorch_hooks.process_groups.older.group import Group
from ckptless.pytorch_hooks.process_groups.sockets import Opened
from ckptless.pytorch_hooks.process_groups.stock import Within
from ckptless.pytorch_hooks.process_groups.work import Early, Scope, elsewhere
from ckptless.pytorch_hooks.torch_private import asked, graphs, reads
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp

T = TypeVar("T")

# A worker of an aborted backend is out in a millisecond or two, or else stuck without touching a tensor
# until its timeout. New state is written into the same tensors after configure(): give it that long.
_SETTLE_S = 0.05
_CLOSE_S = 0.5
# What runs on a device, and the communicators on it, end within this once they are aborted.
IDLE_DEADLINE_S = 10.0
# A Gloo worker needs the GIL once more, for a moment, after the last thing that we see of it.
_GRACE_S = 1.0
_LAST_S = 0.05  # the same at the end of the process, when nobody else wants the GIL


@dataclass
class _Left:
    since: float
    scope: Scope
    backend: Any
    on_device: bool


class DeferredTeardown:
    """Keeps the backends of ended generations until taking them down cannot freeze the process.

    Gloo's destructor joins its workers while it holds the GIL: a stuck one would stop everything. NCCL's
    joins a watchdog, which may be asleep for a minute, without the GIL: it is called in a thread of its own.

    At the end of the process these threads, and those that abort, are waited for: one that came back from C++
    to an interpreter that is on its way out (before Python 3.14) would end the process by SIGABRT.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[_Left] = []
        # Threads that call destructors.
        self._taking_down = 0

    def add(self, scope: Scope, backend: Any, *, on_device: bool) -> None:
        """Keep this backend, or the group that it is in, for now."""
        with self._lock:
            self._left.append(_Left(time.monotonic(), scope, backend, on_device))

    def sweep(self) -> int:
        """Take down those with no operation left in them; how many stay."""
        with self._lock:
            now = time.monotonic()
            done = [one for one in self._left if now - one.since >= _GRACE_S and not one.scope.busy]
            self._left = [one for one in self._left if one not in done]
            stay = len(self._left)
        slow, done = [one for one in done if one.on_device], [one for one in done if not one.on_device]
        if slow:
            with self._lock:
                self._taking_down += 1
            elsewhere(functools.partial(self._take_down, slow))
        del done  # the destructors run here, outside the lock: milliseconds each
        return stay

    def _take_down(self, slow: list[_Left]) -> None:
        try:
            slow.clear()
        finally:
            with self._lock:
                self._taking_down -= 1

    def seal(self, stuck_s: float, threads_s: float) -> None:
        """The process ends: wait for stuck operations and for threads; what is left then outlives Python."""
        with self._lock:
            left, self._left = self._left, []
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < threads_s:
            threads = self._taking_down or any(one.scope.aborting for one in left)
            stuck = waited_s < stuck_s and any(one.scope.unsettled for one in left)
            if not (threads or stuck):
                break
            time.sleep(0.005)
        if left:
            time.sleep(_LAST_S)
        for one in left:
            if one.scope.busy:
                # One reference too many, on purpose: Python's own clean-up must not join a stuck thread.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one.backend))


@dataclass(frozen=True)
class _Link:
    """Our own connection to a store."""

    source: torch_private.Store
    own: torch_private.Store
    opened: Opened


@dataclass
class _Member:
    """A group that this rank belongs to."""

    name: str
    rank: int
    size: int
    timeout: timedelta
    exchange: Exchange
    # Of the world.
    ranks: tuple[int, ...]


class ProcessGroups:
    """The process groups of this process, and their life over generations.

    `on_broken(text)` is called once in a generation, from whichever thread saw it, when a collective fails
    before anybody said that the generation is over.
    """

    _current: ProcessGroups | None = None

    def __init__(
        self,
        timeout: timedelta,
        host: str | None = None,
        on_broken: Callable[[str], None] | None = None,
        page: Page | None = None,
    ) -> None:
        self.on_broken = on_broken
        self.page = page or Page()
        # What else is to be called, in a thread, when a generation ends.
        self.aborts: list[Callable[[], object]] = []
        # What torch gets where it asks for a new group's backend.
        self._exchange: type[Within | Group] = Within if torch_private.takes_backends() else Group
        self._exchange.prepare()
        self._timeout = timeout
        self._host = host
        self._rank = -1
        self._kind = device_backends.present()
        # The thread that runs the script, from whose reads garbage of an ended generation is kept; None while
        # it runs what is ours, or there is no script to go on.
        self._reader: int | None = None
        # Reentrant, since abort() may come in a signal handler of the thread that holds it.
        self._lock = threading.RLock()
        self._scope: Scope | None = None
        self._link: _Link | None = None
        self._fake = True
        self._ended = -1  # the newest generation that is known to be over
        self._members: dict[str, _Member] = {}
        self._marked: tuple[frozenset[str], int] | None = None
        # What a script asks torch of the groups is answered by it.
        self.standing: asked.Standing | None = None
        self._teardown = DeferredTeardown()

    # -- opening

    @property
    def on_device(self) -> bool:
        """Whether there are collectives that a device may be stuck in."""
        return bool(self._accelerators)

    def settle_environment(self, tell: Callable[[str], None]) -> None:
        """Set what the backends of devices read from the environment; `tell` of values that are replaced."""
        if self._kind is not None and self._kind.backend == "nccl":
            device_backends.settle_environment(tell)

    def open(self, *, rank: int, world_size: int, generation: int, store: torch_private.Store | None) -> None:
        """Make the default group, through which every later group goes, too.

        Without a store this is a newcomer: all groups are fakes, whose collectives do nothing, until
        `configure`.
        """
        torch_private.check()
        if dist.is_initialized():
            raise UsageError("ckptless.run makes the process groups: leave out init_process_group before it")
        self._rank = rank
        torch_fsdp.forget_meshes()
        scope = self._enter(generation)
        self._fake = store is None
        if store is not None:
            self._connect_store(scope, store)
        ProcessGroups._current = self
        kind = (
            [] if self._kind is None or self._kind.make is None else [(self._kind.device, self._kind.backend)]
        )
        self.standing = asked.Standing(rank, world_size, NAME, {"cpu": "gloo", **dict(kind)})
        asked.answer(_standing)
        if self._accelerators:
            reads.guard(_check_read)
            graphs.guard(_check_graph)
            torch_private.refuse_symmetric_memory(_refuse_symmetric_memory)
        torch_private.register_backend(NAME, _create, ["cpu", *self._accelerators])
        atexit.register(self.close)
        # torch asks for a store. Not ours: it would be that of the first generation for good.
        dist.init_process_group(
            NAME, store=_no_store, rank=rank, world_size=world_size, timeout=self._timeout
        )

    @property
    def _accelerators(self) -> tuple[str, ...]:
        """The types of devices besides the CPU that groups work on."""
        return () if self._kind is None or self._kind.make is None else (self._kind.device,)

    def _enter(self, generation: int) -> Scope:
        with self._lock:
            if generation <= self._ended:
                raise GenerationEnded(f"generation {generation} was over before it was entered")
            self._scope = Scope(generation, self._on_scope_broken, self.page)
            self.page.renew_groups()
            self._scope.aborts += self.aborts
            if self._accelerators:
                self._scope.aborts.append(graphs.release)
            return self._scope

    def create(self, options: Any) -> Exchange:
        """Return what serves a group, as torch asks for it (`dist.Backend.register_backend`, extended)."""
        scope = self._scope
        if scope is None:
            raise RuntimeError("the process groups are not open")
        if scope.early is not None:
            scope.early.leaves_out("new_group")
        default = torch_private.is_default_timeout(options.timeout)
        member = _Member(
            name=str(options.group_id),
            rank=options.group_rank,
            size=options.group_size,
            # torch fills in 30 minutes where the user said nothing, for DeviceMesh's groups always.
            timeout=self._timeout if default else options.timeout,
            exchange=self._exchange(options.group_rank, options.group_size),
            ranks=tuple(options.global_ranks_in_group or range(options.group_size)),
        )
        if self._fake:
            fake = torch_private.fake_backend(member.rank, member.size)
            fakes = dict.fromkeys(("cpu", *self._accelerators), fake)
            inner = self._exchange.wrap(fakes, member.rank, member.size)
            member.exchange.attach(inner, scope, fake=True)
        else:
            link = self._link
            if link is None:
                scope.check()
                raise RuntimeError("the process groups have no store")
            self._connect(scope, [member], link)
        self._members[member.name] = member
        return member.exchange

    # -- connecting

    def _connect_store(self, scope: Scope, store: torch_private.Store) -> _Link:
        """A connection of our own: a wait in it can be cut off, and holds up nobody else's requests."""

        def clone() -> _Link:
            opened = Opened(port=torch_private.store_port(store))
            own = torch_private.store_clone(store)
            opened.freeze()
            return _Link(store, own, opened)

        link = self._link
        if link is None or link.source is not store:
            link = self._link = scope.run(clone)
        return link

    def _connect(self, scope: Scope, members: list[_Member], link: _Link) -> None:
        """Put a connected backend under each group; anything that goes wrong leaves them without."""
        with self._waiting_in(scope, link):
            scope.run(lambda: self._build(scope, members, link.own))

    @contextmanager
    def _waiting_in(self, scope: Scope, link: _Link) -> Iterator[None]:
        with scope.lock:
            scope.opened.append(link.opened)
        try:
            yield
        finally:
            # At other times nobody waits in the store, and its connection outlives the generation.
            with scope.lock:
                scope.opened.remove(link.opened)
            if scope.error() is not None and self._link is link:
                self._link = None  # it may have been cut, and the thread that was left may still be in it

    def in_store(self, call: Callable[[torch_private.Store], T]) -> T:
        """Return what `call` gets from the generation's store, where it may wait as long as that lasts.

        In a helper thread. Raises GenerationEnded and CollectiveFailed.
        """
        scope, link = self._scope, self._link
        if scope is None or link is None:
            raise RuntimeError("the process groups have no store")
        try:
            with self._waiting_in(scope, link):
                return scope.run(lambda: call(link.own))
        except RuntimeError as error:
            scope.breaks(f"its key-value store failed: {error}")
            scope.check()
            raise

    def _build(self, scope: Scope, members: list[_Member], store: torch_private.Store) -> None:
        """Build it in a helper thread. Left alone when the scope ends, it must leave nothing connected."""
        try:
            for member in members:
                scope.check()
                backends = {"cpu": self._gloo(scope, store, member)}
                devices = self._devices(scope, store, member)
                if devices is not None:
                    backends[self._accelerators[0]] = devices.backend
                inner = self._exchange.wrap(backends, member.rank, member.size)
                if scope.ended:
                    self._teardown.add(scope, inner, on_device=self.on_device)
                else:
                    member.exchange.attach(inner, scope, devices, fake=False)
                    member.exchange.count(self.page.add_group(member.name, member.size), member.ranks)
        except GenerationEnded:
            return  # whoever waits for this thread raises it
        except RuntimeError as error:
            scope.breaks(f"groups of generation {scope.generation} did not come together: {error}")
            raise
        finally:
            if scope.ended:
                scope.end()  # once more, for what has been connected since

    def _devices(self, scope: Scope, store: torch_private.Store, member: _Member) -> Devices | None:
        """Return what serves the accelerator in this group, not yet connected; None where there is none."""
        if self._kind is None or self._kind.make is None:
            return None
        prefix = f"ckptless/{scope.generation}/{member.name}/{self._kind.device}/"
        backend = self._kind.make(
            torch_private.PrefixStore(prefix, store),
            member.rank,
            member.size,
            timeout=member.timeout,
            name=member.name,
        )
        devices = Devices(backend, functools.partial(self._connect_device, scope))
        with scope.lock:
            scope.aborts.append(devices.abort)
        return devices

    def _connect_device(self, scope: Scope, device: torch.device, connect: Callable[[], None]) -> None:
        """Connect a group's backend for a device, which asks the store for the others. Raises UsageError."""
        link = self._link
        if link is None:
            scope.check()
            raise RuntimeError("the process groups have no store")

        def claim_and_connect() -> None:
            claims = torch_private.PrefixStore(f"ckptless/{scope.generation}/", link.own)
            device_backends.claim(claims, device, self._rank)
            connect()

        try:
            with self._waiting_in(scope, link):
                scope.run(claim_and_connect)
        except RuntimeError as error:
            scope.breaks(f"a group did not come together on its device: {error}")
            scope.check()
            raise

    def _gloo(self, scope: Scope, store: torch_private.Store, member: _Member) -> torch_private.Backend:
        with scope.lock:
            scope.check()
            opened = Opened()
            scope.opened.append(opened)
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        backend = torch_private.gloo_backend(
            torch_private.PrefixStore(f"ckptless/{scope.generation}/{member.name}/", store),
            member.rank,
            member.size,
            timeout=member.timeout,
            devices=torch_private.gloo_devices(self._host, interfaces),
            name=member.name,
        )
        opened.freeze()
        return backend

    def configure(self, generation: int, store: torch_private.Store) -> None:
        """Put a new backend under every group; every rank of the world does this, in its main thread.

        Raises `GenerationEnded` as soon as `abort` says so, `CollectiveFailed` when the others do not come,
        `DeviceLost` where what came before does not end on the device.
        """
        old = self._scope
        if old is None:
            raise RuntimeError("the process groups are not open")
        if not old.ended and generation <= old.generation and not self._fake:
            raise RuntimeError(f"generation {generation} does not come after {old.generation}")
        scope = self._enter(generation)
        self._leave(old)
        _wait_aborted(old, IDLE_DEADLINE_S)
        self._refuse_unsound()
        self._retire(old, self._members.values())
        self._forget_unmarked()
        self.sweep()
        torch_private.forget_batches()
        link = self._connect_store(scope, store)
        self._fake = False
        self._connect(scope, list(self._members.values()), link)
        old.settle(_SETTLE_S)

    def begin_early(self, *, anew: bool) -> None:
        """The script is about to be called: until `end_early` it has not called run.keep.

        `anew`: everybody starts, and groups connect; else survivors and new processes come together later.
        """
        if self._scope is not None:
            self._scope.early = Early(anew=anew)

    def end_early(self) -> None:
        """It has. Raises UsageError where it did before what it cannot do again after a fault."""
        if self._scope is not None and self._scope.early is not None:
            early, self._scope.early = self._scope.early, None
            early.refuse()

    def mark(self) -> None:
        """The groups made so far are those of every rank: later ones are dropped by the next `configure`.

        For groups that are made again on each entry into the training function: a newcomer has none of
        them, and the numbers that torch names groups by must agree.
        """
        self._marked = frozenset(self._members), torch_private.group_count()

    def _forget_unmarked(self) -> None:
        for name, member in list(self._members.items()):
            group = torch_private.group_named(name)
            if group is None or not member.exchange.serves(group):
                del self._members[name]  # the user has destroyed it, or its making failed
            elif self._marked is not None and name not in self._marked[0]:
                dist.destroy_process_group(group)
                del self._members[name]
        if self._marked is not None:
            torch_private.set_group_count(self._marked[1])

    # -- leaving

    def abort(self, generation: int | None = None) -> None:
        """End this generation: free whoever waits, cut the connections. Any thread, idempotent, in ms.

        With a number: only if the groups have not gone beyond that generation; and if they have not come to
        it, then they never will.
        """
        with self._lock:
            scope = self._scope
            if generation is not None:
                self._ended = max(self._ended, generation)
            elif scope is not None:
                self._ended = max(self._ended, scope.generation)
            if scope is None or scope.generation > self._ended:
                return
        scope.end()

    def check(self) -> None:
        """Raise if this generation is over or broken: before parameters change, before a commit."""
        if self._scope is not None:
            self._scope.check()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Read what there is, also garbage: what we keep is not to be left half-way. Raises at its end.

        After it the script's reads are guarded.
        """
        self._reader = None
        try:
            yield
        finally:
            if self._accelerators:
                self._reader = threading.get_ident()
        if self._accelerators:
            self.check()

    def lasts(self, generation: int) -> bool:
        """Return whether the groups stand in this generation, which is neither over nor broken.

        Where they do, nothing that a device has done so far was cut off: a generation ends before its
        collectives are aborted.
        """
        scope = self._scope
        return scope is not None and scope.generation == generation and scope.error() is None

    def wait_idle(self, deadline_s: float = IDLE_DEADLINE_S) -> None:
        """Wait until nothing of the ended generation works on the device. Raises DeviceLost.

        Until then a collective may still write to parameters, gradients, and what was freed meanwhile.
        """
        self._reader = None
        scope = self._scope
        if scope is None:
            return
        began = time.monotonic()
        _wait_aborted(scope, deadline_s)
        accelerator.wait_idle(max(0.0, began + deadline_s - time.monotonic()))

    def check_read(self) -> None:
        """Raise in the script's thread where its generation is over or broken: what it read is garbage."""
        if self._reader == threading.get_ident():
            self.check()

    def check_graph(self, generation: int) -> None:
        """Raise where a CUDA graph with collectives of this generation is not to be replayed any more.

        UsageError where it is of one before; GenerationEnded, CollectiveFailed as `check`.
        """
        self.check()
        if self.generation != generation:
            raise UsageError(
                f"a CUDA graph has collectives of generation {generation}, and this is {self.generation}: "
                "capture it anew after a recovery, in the training function or in run.on_recovery "
                "(of torch.compile: torch.compiler.reset())"
            )

    @property
    def aborted(self) -> bool:
        """Whether the generation that the groups stand in is over."""
        return self._scope is not None and self._scope.ended

    @property
    def broken(self) -> str | None:
        """The error of the first collective that failed by itself."""
        return None if self._scope is None else self._scope.broken

    @property
    def calls(self) -> int:
        """The number of collectives that this process has begun in this generation."""
        return 0 if self._scope is None else self._scope.calls

    @property
    def generation(self) -> int | None:
        """The generation that the groups stand in."""
        return None if self._scope is None else self._scope.generation

    def _on_scope_broken(self, scope: Scope, text: str) -> None:
        if scope is self._scope and self.on_broken is not None:
            self.on_broken(text)

    def _leave(self, scope: Scope) -> None:
        """End a scope, unless it is at rest: then its connections close in order, when it is taken down.

        What a thread that was left in it opens from now on is never cut: it could be the next scope's.
        """
        with scope.lock:
            # The user's are for faults.
            scope.aborts = [abort for abort in scope.aborts if abort not in self.aborts]
        if scope.unsettled or scope.broken is not None or scope.aborts:
            scope.end()
        with scope.lock:
            scope.ended = True
            for opened in scope.opened:
                opened.freeze()

    def _refuse_unsound(self) -> None:
        """Raise DeviceLost where NCCL's state in this process may be broken.

        An open batch it keeps in the thread (ncclGroupStart), holds back whatever that thread queues from
        then on, in any group, and cannot close it once the communicators of what it has are gone. A call that
        is stuck works on with memory that the abort has freed.
        """
        for name, member in self._members.items():
            if why := member.exchange.unsound:
                raise DeviceLost(f"in group {name} {why}")

    def _retire(self, scope: Scope, members: Any) -> None:
        for member in members:
            inner = member.exchange.detach()
            if inner is not None:
                self._teardown.add(scope, inner, on_device=self.on_device)

    def sweep(self) -> int:
        """Take down old backends that nothing is stuck in (a few ms each); how many stay."""
        return self._teardown.sweep()

    def reset(self) -> None:
        """Destroy all groups, so that `open` can be called again in this process, also after an abort."""
        with self._lock:
            scope, self._scope = self._scope, None
            if scope is None or self._ended <= scope.generation:
                self._ended = -1  # what was over is gone; an end announced for a later generation still holds
        if scope is not None:
            self._leave(scope)
            self._retire(scope, self._members.values())
        self._members.clear()
        self._marked = None
        if ProcessGroups._current is self:
            ProcessGroups._current = None
            if dist.is_initialized():
                dist.destroy_process_group()
            # destroy_process_group does this, but cannot be called when the default group's making failed.
            torch_private.set_group_count(0)
        self.sweep()

    def close(self) -> None:
        """The end of the process: nothing may hold it up, nothing stuck is taken down."""
        atexit.unregister(self.close)
        self.reset()
        self._link = None
        self._teardown.seal(_CLOSE_S, IDLE_DEADLINE_S)


def _wait_aborted(scope: Scope, deadline_s: float) -> None:
    if not scope.wait_aborted(deadline_s):
        raise DeviceLost(f"the collectives of generation {scope.generation} do not end in {deadline_s:g} s")


def _standing() -> asked.Standing | None:
    return None if ProcessGroups._current is None else ProcessGroups._current.standing


def _check_read() -> None:
    if ProcessGroups._current is not None:
        ProcessGroups._current.check_read()


def _check_graph(generation: int) -> None:
    if ProcessGroups._current is not None:
        ProcessGroups._current.check_graph(generation)


def _refuse_store(*_given: Any, **_named: Any) -> NoReturn:
    raise UsageError(
        "this asks for the store of torch's default group, and no store lasts longer than a generation: make "
        "groups without a backend of their own (dist.new_group(ranks)), which have one for every device"
    )


_no_store = torch_private.RefusingStore(_refuse_store)


def _refuse_symmetric_memory(*_given: Any, **_named: Any) -> NoReturn:
    raise UsageError(
        "symmetric memory cannot be renewed after a fault: train without torch.distributed._symmetric_memory"
    )


def _create(options: Any, _backend_options: Any = None) -> Exchange:
    """Make the backend of a new group "ckptless", as torch calls for it."""
    groups = ProcessGroups._current
    if groups is None:
        raise RuntimeError("no ckptless process groups are open in this process")
    return groups.create(options)
