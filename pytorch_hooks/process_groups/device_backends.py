"""The backends of a group for a device: which one it is, and its life in one generation.

The works of such a backend go out as they are: their `wait` orders a stream behind the collective and blocks
nobody, their futures are complete as soon as the collective is queued and know the device. What ends with the
generation is the communicator, by `abort`; whoever waits for the device comes out of that then, with what is
garbage, and `Scope.check` stands before it gets anywhere.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ckptless import nccl_settings
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.devices import accelerator
from ckptless.pytorch_hooks.errors import GenerationEnded
from ckptless.pytorch_hooks.torch_private import calls as torch_private

T = TypeVar("T")

# To queue a collective takes a fraction of a millisecond.
CALL_DEADLINE_S = 1.0


class Maker(Protocol):
    """Makes a backend, which connects with its first collective or when told to."""

    def __call__(
        self, store: torch_private.Store, rank: int, size: int, *, timeout: timedelta, name: str
    ) -> torch_private.Backend:
        """Return the backend of a group of `size` ranks; `name` is what torch's recorders call the group."""


_MAKERS: dict[str, Maker] = {"nccl": torch_private.nccl_backend}


def teach(name: str, make: Maker) -> None:
    """Let groups have backends of this name: they abort, and their futures complete when work is queued."""
    _MAKERS[name] = make


@dataclass(frozen=True)
class Kind:
    """The type of this machine's accelerator, the backend that torch uses for it, and how one is made."""

    device: str
    backend: str
    make: Maker | None

    def refuse(self) -> None:
        """Raise UsageError where ckptless does not know the backend."""
        if self.make is None:
            raise UsageError(
                f"collectives on {self.device} go over {self.backend or 'no backend'}, which ckptless cannot "
                f"leave and renew: it knows {' and '.join(sorted(_MAKERS))}. Train on the CPU, or without it"
            )


def settle_environment(tell: Callable[[str], None]) -> None:
    """Have NCCL's backends leave processes alive whose collectives are aborted; `tell` of replaced values.

    Before the first backend is made: that is when torch reads it.
    """
    wanted, replaced = nccl_settings.settle(os.environ)
    for one in replaced:
        tell(f"{one.name}={os.environ[one.name]} is replaced by {one.value}: else {one.why}")
    os.environ.update(wanted)


def present() -> Kind | None:
    """Return what there is here, or None on a machine without an accelerator."""
    device = accelerator.present()
    if device is None:
        return None
    name = dist.Backend.default_device_backend_map.get(device, "")
    return Kind(device, name, _MAKERS.get(name))


# Of ncclResult_t (nccl.h), as torch words it: what NCCL says where a peer, or the way to it, is gone.
_WITHOUT_PEER = ("ncclRemoteError", "ncclSystemError", "ncclInternalError")


def lacks_peer(error: RuntimeError) -> bool:
    """Whether NCCL refuses a collective since a peer is gone: it may see that before anybody says so."""
    return isinstance(error, dist.DistBackendError) and any(word in str(error) for word in _WITHOUT_PEER)


def claim(store: torch_private.Store, device: torch.device, rank: int) -> None:
    """Tell all ranks of a generation that this one works on a device. Raises UsageError if another does, too.

    NCCL refuses that as well, by an error that looks like a fault. It does not where each rank is to seem a
    machine of its own (NCCL_HOSTID), or it is told to bear it (NCCL_MULTI_RANK_GPU_ENABLE, from 2.30 on).
    """
    identity = accelerator.identity(device)
    if identity is None or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    key = f"device/{os.environ.get('NCCL_HOSTID', '')}/{identity}"
    owner = int(store.compare_set(key, "", str(rank)))
    if owner != rank:
        raise UsageError(
            f"ranks {min(owner, rank)} and {max(owner, rank)} work on the same device, {identity} ({device} "
            f"here): set each its own before any tensor is made, as by torch.cuda.set_device(run.local_rank)"
        )


class Devices:
    """A group's backend for a device, in one generation.

    `connect(device, call)` makes a call by which that connects; it may block, and the end of the generation
    cuts it off.
    """

    def __init__(
        self,
        backend: torch_private.Backend,
        connect: Callable[[torch.device, Callable[[], None]], None],
    ) -> None:
        self.backend = backend
        self._connect = connect
        self._connected: torch.device | None = None
        # Whether a batch was begun and is not ended.
        self.in_batch = False
        # Threads that are in a call of the backend; none comes in once it is over.
        self._calls = threading.Condition(threading.Lock())
        self._inside, self._over = 0, False
        # Whether one of them was still there when its communicator was freed.
        self.torn = False

    def connect(self, device: torch.device) -> None:
        """Connect, with all ranks of the group, before the first collective. Raises UsageError.

        Torch would do so in the collective itself, where nothing could free this thread.
        """
        if self._connected == device:
            return
        if self._connected is not None:
            raise UsageError(
                f"a collective on {device}, in a group that is connected on {self._connected}: a rank works "
                "on one device. Set it before any tensor is made"
            )
        self._connect(device, lambda: self.backend.eager_connect_single_device(device))
        self._connected = device

    def queue(self, call: Callable[[], T]) -> T:
        """Return what a call of the backend does. Raises GenerationEnded where `abort` has come before it.

        NCCL's abort frees what a call in another thread works on: it waits until that is out.
        """
        with self._calls:
            if self._over:
                raise GenerationEnded("the communicator was aborted")
            self._inside += 1
        try:
            return call()
        finally:
            with self._calls:
                self._inside -= 1
                self._calls.notify_all()

    def begin_batch(self) -> None:
        """Queue what follows as one, until `end_batch`."""
        backend: Any = self.backend
        backend._start_coalescing()
        self.in_batch = True

    def end_batch(self) -> torch_private.Work | None:
        """Return the work of all that; None where there was nothing."""
        backend: Any = self.backend

        def end() -> torch_private.Work | None:
            self.in_batch = False
            ended: torch_private.Work | None = backend._end_coalescing()
            return ended

        return self.queue(end)

    def abort(self) -> None:
        """Free all that its collectives hold up on the device. May take long; idempotent."""
        with self._calls:
            self._over = True
            # A call that stays is stuck itself, in a connection that is made or behind a device that is full.
            self.torn |= not self._calls.wait_for(lambda: not self._inside, CALL_DEADLINE_S)
        self.backend.abort()
