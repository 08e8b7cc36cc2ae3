"""Every private part of torch that recovery stands on, each behind one function, and a check of them all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    Backend,
    DebugLevel,
    FakeProcessGroup,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    Work,
    _SymmetricMemory,
    get_debug_level,
)
from torch.distributed import distributed_c10d as c10d

from ckptless import nccl_settings
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.errors import TorchMismatch
from ckptless.pytorch_hooks.torch_private.names import DDP, DEVICES, GROUPS, NCCL, refuse_moved, span, version
from ckptless.torch_versions import NEWEST, OLDEST, OLDEST_PYTHON_BACKEND

# torch.distributed has these under the same names, but its types do not say so.
__all__ = ["Backend", "HashStore", "PrefixStore", "Store", "TCPStore", "Work", "check"]

_log = logging.getLogger(__name__)


def check() -> None:
    """Raise `TorchMismatch`, in one sentence, if this torch is not one that recovery can stand on."""
    if version() < OLDEST:
        raise TorchMismatch(f"torch {torch.__version__} is too old for ckptless, which supports {span()}.")
    refuse_moved((*GROUPS, *DDP))
    if version() > NEWEST:
        # What is compiled says nothing of what it does: only tests tell, and nobody has run them.
        _log.warning(
            "torch %s is newer than what ckptless was tested with (%s): what recovery uses inside it was "
            "looked for by name here; ckptless-run (once) and ckptless-doctor try what it does",
            torch.__version__,
            span(),
        )


# ------------------------------------------------------------------------------------- process groups


def register_backend(name: str, create: Callable[..., object], devices: list[str]) -> None:
    """Let torch make groups of backend `name` for these types of devices, once in a process.

    By `create(options, backend_options)`.
    """
    if name in dist.Backend.backend_list:
        return
    # What is below records itself; and of a group that Python overrides a recorder raises (2.15).
    recording: set[str] | None = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        recording.add(name)
    dist.Backend.register_backend(name, cast("Any", create), extended_api=True, devices=devices)


def takes_backends() -> bool:
    """Whether a stock group can have a backend that is written in Python.

    Not where TORCH_DISTRIBUTED_DEBUG is DETAIL: torch wraps every backend then, and connects one of its own.
    """
    return version() >= OLDEST_PYTHON_BACKEND and get_debug_level() != DebugLevel.DETAIL


class GroupBase(dist.ProcessGroup):
    """A ProcessGroup that Python overrides: C++ callers, too, come to a subclass's methods."""

    def __init__(self, rank: int, size: int) -> None:
        # Not the documented constructor with a store: pybind11 makes no overridable object with that one.
        super().__init__(rank, size)  # type: ignore[call-arg]


def fake_backend(rank: int, size: int) -> Backend:
    """A backend whose collectives do nothing and need nobody."""
    # Until 2.9 the class was constructed like any other; later it refuses that and has a factory.
    make: Callable[[int, int], Any] = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    return cast("Backend", make(rank, size))


def gloo_devices(host: str | None, interfaces: list[str]) -> list[Any]:
    """Gloo devices (each a listening socket and an event loop) on an address, on interfaces or as stock.

    Never lazy: every pair must be connected, so that its socket is known, when the constructor returns.
    """
    gloo = dist.ProcessGroupGloo
    if host is not None:
        return [gloo.create_device(hostname=host, lazy_init=False)]
    if interfaces:
        return [gloo.create_device(interface=name, lazy_init=False) for name in interfaces]
    return [gloo.create_default_device(lazy_init=False)]


def gloo_backend(
    store: Store, rank: int, size: int, *, timeout: timedelta, devices: list[Any], name: str = ""
) -> Backend:
    """A connected Gloo backend; blocks until every other rank of the group has come, or the timeout.

    `name` is what torch's flight recorder calls its group.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = devices
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    if version() < (2, 14):  # since then it does nothing but warn
        backend._set_sequence_number_for_group()
    call_it: Callable[[str], None] | None = getattr(backend, "_set_group_uid", None)
    if call_it is not None:
        call_it(name)
    return backend


def nccl_backend(store: Store, rank: int, size: int, *, timeout: timedelta, name: str) -> Backend:
    """Return a backend over NCCL, which connects when it is told to; `name` as of `gloo_backend`.

    Of the class that torch before 2.15 makes by default, and later as "nccl-legacy".
    """
    version_of_nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call,unused-ignore]
    if (trouble := nccl_settings.why_not(version_of_nccl)) is not None:
        raise UsageError(trouble)
    refuse_moved((*DEVICES, *NCCL))
    nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
    options = nccl.Options()
    options._timeout = timeout
    options.group_name = name
    backend = cast("Backend", nccl(store, rank, size, options))
    if version() < (2, 14):
        backend._set_sequence_number_for_group()
    return backend


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """The backend that a group uses for a device."""
    return group._get_backend(device)


class RefusingStore(Store):
    """A store in which nothing can be done: whatever torch or a script asks of it is a call of `refuse`.

    Torch keeps no reference to the object in Python: its owner does.
    """

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        super().__init__()
        for name in dir(Store):
            if not name.startswith("_") and name not in ("has_extended_api", "timeout"):
                setattr(self, name, refuse)


def store_clone(store: Store) -> Store:
    """The same store over a connection of its own."""
    return cast("Store", store.clone())  # type: ignore[attr-defined]


def store_get(store: Store, key: str) -> bytes:
    """The value of a key, for which it waits: for good, where the connection is not cut."""
    while True:
        try:
            return store.get(key)
        except dist.DistStoreError:  # nobody has set it within the store's own timeout
            continue


def store_port(store: Store) -> int:
    """The port that a store's server listens on; 0 where it has none (then nothing is ever matched by it)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else 0


def group_named(name: str) -> dist.ProcessGroup | None:
    """The living group that torch knows by this name."""
    return next((group for group, known in c10d._world.pg_names.items() if known == name), None)


def group_count() -> int:
    """Return how many groups torch has given a number to: the next group's name."""
    return c10d._world.group_count


def set_group_count(count: int) -> None:
    """Make the next group's name the same on all ranks again.

    A group whose construction failed has used up a number on this rank, which the others may not have.
    """
    c10d._world.group_count = count


def forget_batches() -> None:
    """Forget which groups stand in a batch of collectives (`_coalescing_manager`).

    One that an error has left stands there for good: torch would go on noting down what it is asked for.
    """
    c10d._world.pg_coalesce_state.clear()


def refuse_symmetric_memory(refuse: Callable[..., NoReturn]) -> None:
    """Have `refuse` called where a script asks for memory that other ranks read and write themselves."""
    refuse_moved(DEVICES)
    for name in ("empty_strided_p2p", "rendezvous", "set_group_info"):
        setattr(_SymmetricMemory, name, staticmethod(refuse))


def is_default_timeout(timeout: timedelta) -> bool:
    """Whether this is what torch fills in where nobody named a timeout (30 min)."""
    return timeout == c10d.default_pg_timeout


def source_rank(work: Work) -> int:
    """The rank that a received message came from."""
    return work._source_rank()
