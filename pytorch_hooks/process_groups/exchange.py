"""Stands between the groups of models and the backend of a generation, whichever way torch takes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.page import BEGUN, POINT_TO_POINT, QUEUED
from ckptless.pytorch_hooks.agent_session.page import MESSAGES, NOWHERE, operation
from ckptless.pytorch_hooks.errors import CollectiveFailed
from ckptless.pytorch_hooks.process_groups import device_backends
from ckptless.pytorch_hooks.process_groups.device_backends import Devices
from ckptless.pytorch_hooks.process_groups.work import AbortableWork, Scope
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private import graphs
from ckptless.pytorch_hooks.torch_private.works import FinishedWork

NAME = "ckptless"
MESSAGE, MESSAGE_OF_ANYBODY = operation("send"), operation("recv_anysource")


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that a collective writes: its first argument, a list of them or a list of lists."""
    if not arguments:
        return []
    first = arguments[0]
    if isinstance(first, torch.Tensor):
        return [first]
    if not isinstance(first, (list, tuple)):
        return []
    flat: list[torch.Tensor] = []
    for item in first:
        flat.extend([item] if isinstance(item, torch.Tensor) else _tensors((item,)))
    return flat


def device_of(arguments: tuple[Any, ...], written: list[torch.Tensor] | None = None) -> torch.device | None:
    """Return the accelerator's device that a collective is for, or None: it is the CPU's.

    `written` are the tensors that it writes, where they are known; who only sends writes none. A barrier has
    no tensors, and its options may name a device.
    """
    tensors = (_tensors(arguments) if written is None else written) or _tensors(arguments[1:])
    device = tensors[0].device if tensors else getattr(arguments[0], "device", None) if arguments else None
    return device if isinstance(device, torch.device) and device.type != "cpu" else None


class Exchange:
    """Lives as long as the process; `attach` puts each generation's backend into it.

    To be mixed into what torch calls collectives on, whichever way it takes a backend that is written in
    Python: `stock.py`, `older/group.py`. `_inner` has the collectives by the same names.
    """

    _inner: Any = None
    _scope: Scope | None = None
    _devices: Devices | None = None
    _fake = False
    # Where this generation's collectives are counted, and the ranks of the group.
    _counted = NOWHERE
    _ranks: Sequence[int] = ()

    @classmethod
    def prepare(cls) -> None:
        """Make torch ready for exchanges of this class. Raises TorchMismatch."""

    @staticmethod
    def wrap(backends: dict[str, torch_private.Backend], rank: int, size: int) -> Any:
        """Give the backends of each type of device, the CPU's among them, as `attach` takes them."""
        raise NotImplementedError

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Whether this group, which torch knows, works through this exchange."""
        raise NotImplementedError

    def attach(self, inner: Any, scope: Scope, devices: Devices | None = None, *, fake: bool) -> None:
        """Work through `inner`, in `scope`, from now on; `devices` is what `inner` has for an accelerator."""
        self._inner, self._scope, self._devices, self._fake = inner, scope, devices, fake
        self._counted = NOWHERE

    def count(self, counted: int, ranks: Sequence[int]) -> None:
        """Count collectives there on the page of this rank; `ranks` are those of the group in the world."""
        self._counted, self._ranks = counted, ranks

    def detach(self) -> Any:
        """Give the backend up; the scope stays, to say why nothing works any more."""
        before, self._inner, self._devices = self._inner, None, None
        return before

    @property
    def unsound(self) -> str:
        """Return what makes this process unfit for another generation on its device, if anything does."""
        if self._devices is not None and self._devices.in_batch:
            return "a batch of collectives was begun and never ended"
        if self._devices is not None and self._devices.torn:
            return "a collective was stuck while it was queued, and its communicator had to be freed under it"
        return ""

    def _connect(self, device: torch.device) -> None:
        """Connect what serves a device, if it is not. Raises UsageError where nothing does."""
        if self._devices is not None:
            self._devices.connect(device)
            return
        kind = device_backends.present()
        if kind is not None and kind.device == device.type:
            kind.refuse()
        raise UsageError(f"this process group serves no tensors on {device}")

    def _end_batch(self) -> torch_private.Work | None:
        """Have the device begin what was queued for it as one; None where there was nothing."""
        _, scope = self._ready()
        try:
            return None if self._devices is None else self._devices.end_batch()
        except RuntimeError as error:
            _refused(scope, error)
            raise

    def _hand_out(self, work: Any, device: torch.device | None) -> Any:
        """Return what torch is given for a work of a collective on `device` (None: on the CPU, ours)."""
        return work

    def _ready(self) -> tuple[Any, Scope]:
        scope = self._scope
        if scope is None:
            raise CollectiveFailed("this process group was never opened")
        scope.check()
        if self._inner is None:
            raise CollectiveFailed("this process group has been closed")
        return self._inner, scope

    def _left_out(self, what: str) -> bool:
        """Whether a call before run.keep is not to be made. Raises UsageError where it cannot be."""
        scope = self._scope
        return scope is not None and scope.early is not None and scope.early.leaves_out(what)

    def _blocking(self, call: Callable[[Any], None]) -> None:
        """Call what blocks in Gloo in another thread, so that it can be left."""
        if self._left_out("barrier"):
            return
        inner, scope = self._ready()
        scope.calls += 1
        if not self._fake:
            at = self._begins(scope, operation("barrier"), ())
            scope.run(lambda: call(inner))
            scope.over(at)

    def _begins(self, scope: Scope, number: int, given: Sequence[Any], counter: int = BEGUN) -> int:
        """Have the agent see that a collective begins; return where it is counted."""
        at, elements = self._counted, 0
        if number >= MESSAGE:
            # The second argument is a rank of the group; of one from anybody it is a tag.
            anybody = number == MESSAGE_OF_ANYBODY or at == NOWHERE
            # A rank that the group does not have is for the backend to refuse.
            known = not anybody and 0 <= given[1] < len(self._ranks)
            elements = self._ranks[given[1]] + 1 if known else 0
            at = at if at == NOWHERE else MESSAGES
        elif given:
            first = given[0]
            while isinstance(first, (list, tuple)) and first:
                first = first[0]
            elements = first.numel() if isinstance(first, torch.Tensor) else 0
        with scope.lock:
            scope.page.call(at, number, elements, counter)
        return at

    def getBackendName(self) -> str:
        """Asked for by C++."""
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        """Done for each backend when it is made."""

    def abort(self) -> None:
        """End the generation: Gloo cannot leave one group alone."""
        if self._scope is not None:
            self._scope.end()

    def shutdown(self) -> None:
        """Nothing: `ProcessGroups` takes backends down, when it is safe to."""


def _refused(scope: Scope, error: BaseException, *, by_peer: bool = False) -> None:
    """A backend has not begun what it was asked for. Raises where that is no error of the script's."""
    if isinstance(error, RuntimeError):
        scope.check()  # the verdict may have come in the middle
        if by_peer or device_backends.lacks_peer(error):
            scope.breaks(str(error))
            scope.check()


_POINT_TO_POINT = frozenset(POINT_TO_POINT)

# Those that a torch does not have (the *_single names are new in 2.13) are left out below.
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    *POINT_TO_POINT,
)


def _forward(name: str) -> Callable[..., Any]:
    number = operation(name)

    def call(self: Exchange, *args: Any, **kwargs: Any) -> Any:
        if self._left_out(name):
            return FinishedWork(_tensors((*args, *kwargs.values())))
        inner, scope = self._ready()
        scope.calls += 1
        given = (*args, *kwargs.values())
        written = _tensors(given)
        device = device_of(given, written)
        if self._fake:
            # Checked by the fake as by any other.
            getattr(inner, name)(*args, **kwargs)
            return FinishedWork(written)
        if device is not None:
            self._connect(device)
            graphs.note(scope)
        if device is not None:
            # Of what a device is at nobody asks: the numbers tell who has not come.
            self._begins(scope, number, given, QUEUED)
            at = NOWHERE
        else:
            at = self._begins(scope, number, given)
        collective = getattr(inner, name)
        try:
            if device is None or self._devices is None:
                work = collective(*args, **kwargs)
            else:
                work = self._devices.queue(functools.partial(collective, *args, **kwargs))
        except BaseException as error:
            scope.over(at)
            # On the CPU messages talk to the socket at once; the others only check their arguments here.
            _refused(scope, error, by_peer=name in _POINT_TO_POINT and device is None)
            raise
        return self._hand_out(work if device is not None else AbortableWork(scope, work, written, at), device)

    call.__name__ = name
    call.__doc__ = f"`{name}` through this generation's backend, abortable."
    return call


def forward(kind: type[Exchange], base: type) -> None:
    """Give `kind` the collectives that `base`, which is torch's, has."""
    for name in _COLLECTIVES:
        if hasattr(base, name):
            setattr(kind, name, _forward(name))
