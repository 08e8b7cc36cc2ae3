"""Every private part of torch that recovery stands on, each behind one function, and a check of them all."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    Backend,
    FakeProcessGroup,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    Work,
)
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ckptless.pytorch_hooks.errors import TorchMismatch
from ckptless.torch_versions import NEWEST, OLDEST

# torch.distributed has these under the same names, but its types do not say so.
__all__ = ["Backend", "HashStore", "PrefixStore", "Store", "TCPStore", "Work", "check"]

_log = logging.getLogger(__name__)

_SPAN = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"

_C10D = "torch._C._distributed_c10d"
_DDP = "torch.nn.parallel:DistributedDataParallel"

# Where each thing is, and words that its signature must hold ("" asks for nothing more than that it exists).
# Compiled functions have no inspectable signature: pybind11 writes it into the first lines of the docstring.
_NEEDED: tuple[tuple[str, str], ...] = (
    (f"{_C10D}:FakeProcessGroup", ""),
    (f"{_C10D}:Work.get_future", ""),
    (f"{_C10D}:Work.wait", "timeout"),
    (f"{_C10D}:Work._source_rank", ""),
    (f"{_C10D}:Store.clone", ""),
    (f"{_C10D}:ProcessGroup.BackendType.GLOO", ""),
    (f"{_C10D}:ProcessGroup.BackendType.CUSTOM", ""),
    (f"{_C10D}:ProcessGroup._register_backend", "device backend_type backend"),
    (f"{_C10D}:ProcessGroup._set_default_backend", "backend_type"),
    (f"{_C10D}:ProcessGroup._get_backend", "device"),
    (f"{_C10D}:ProcessGroup._device_types", ""),
    (f"{_C10D}:ProcessGroupGloo.__init__", "store rank size options"),
    (f"{_C10D}:ProcessGroupGloo._Options", ""),
    (f"{_C10D}:ProcessGroupGloo._set_sequence_number_for_group", ""),
    (f"{_C10D}:ProcessGroupGloo.create_device", "hostname interface lazy_init"),
    (f"{_C10D}:ProcessGroupGloo.create_default_device", "lazy_init"),
    (f"{_C10D}:Reducer._get_zeros_like_grad_buckets", ""),
    (f"{_C10D}:Reducer._push_all_rebuilt_params", ""),
    (f"{_C10D}:Reducer._rebuild_buckets", "bool"),
    (f"{_C10D}:Reducer._remove_autograd_hooks", ""),
    (f"{_C10D}:Reducer._set_static_graph", ""),
    (f"{_C10D}:Reducer._update_process_group", "ProcessGroup"),
    (f"{_C10D}:GradBucket.parameters", ""),
    ("torch.distributed.distributed_c10d:_world.group_count", ""),
    ("torch.distributed.distributed_c10d:_world.pg_names", ""),
    ("torch.distributed.distributed_c10d:default_pg_timeout", ""),
    ("torch.distributed:_register_comm_hook", ""),
    ("torch.distributed:Backend.backend_list", ""),
    (f"{_DDP}._build_params_for_reducer", "self"),
    (f"{_DDP}._build_debug_param_to_name_mapping", "parameters"),
    (f"{_DDP}._ddp_init_helper", "parameters expect_sparse_gradient param_to_name_mapping static_graph"),
)


def _signature(thing: object) -> str:
    if inspect.isfunction(thing):
        return " ".join(inspect.signature(thing).parameters)
    return inspect.getdoc(thing) or ""


def _moved(where: str, words: str) -> str | None:
    """What is wrong with one needed thing, or None."""
    module, _, path = where.partition(":")
    name = f"{module}.{path}"
    try:
        thing: object = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError):
        return f"{name} is gone"
    signature = _signature(thing)
    missing = [word for word in words.split() if word not in signature]
    return f"{name} no longer takes or gives {', '.join(missing)}" if missing else None


def refuse_moved(needed: Iterable[tuple[str, str]]) -> None:
    """Raise `TorchMismatch` if one of these things (where, words of its signature) is not what it was."""
    refuse([text for where, words in needed if (text := _moved(where, words)) is not None])


def refuse(moved: list[str]) -> None:
    """Raise `TorchMismatch` if anything has moved."""
    if moved:
        raise TorchMismatch(
            f"torch {torch.__version__} has moved what ckptless (made for {_SPAN}) uses inside it: "
            f"{'; '.join(moved)}."
        )


def check() -> None:
    """Raise `TorchMismatch`, in one sentence, if this torch is not one that recovery can stand on."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        raise TorchMismatch(f"torch {torch.__version__} is too old for ckptless, which supports {_SPAN}.")
    refuse_moved(_NEEDED)
    if version > NEWEST:
        # What is compiled says nothing of what it does: only tests tell, and nobody has run them.
        _log.warning(
            "torch %s is newer than what ckptless was tested with (%s): all that recovery uses inside it is "
            "there, so it is used; where a recovery goes wrong, take one of those",
            torch.__version__,
            _SPAN,
        )


# ------------------------------------------------------------------------------------- process groups


def untraced(kind: type[Any]) -> None:
    """Keep torch.compile out of a class's methods and of what they call.

    C++ calls them in the middle of a compiled model (DDP's buffers do), and Dynamo would try to compile each.
    Told to the interpreter's hook itself, since `torch.compiler.disable` imports all of Dynamo.
    """
    hook = getattr(torch._C, "_dynamo", None) and torch._C._dynamo.eval_frame
    if hook is None or not hasattr(hook, "set_code_exec_strategy"):
        return  # a torch that has it elsewhere: compiled DDP may then refuse to trace, and says so
    skip = hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.SKIP)
    for member in vars(kind).values():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            hook.set_code_exec_strategy(function.__code__, skip)


class GroupBase(dist.ProcessGroup):
    """A ProcessGroup that Python overrides: C++ callers, too, come to a subclass's methods."""

    def __init__(self, rank: int, size: int) -> None:
        # Not the documented constructor with a store: pybind11 makes no overridable object with that one.
        super().__init__(rank, size)  # type: ignore[call-arg]


def fake_backend(rank: int, size: int) -> Backend:
    """A backend whose collectives do nothing and need nobody."""
    # Until 2.8 the class was constructed like any other; later it refuses that and has a factory.
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


def gloo_backend(store: Store, rank: int, size: int, *, timeout: timedelta, devices: list[Any]) -> Backend:
    """A connected Gloo backend; blocks until every other rank of the group has come, or the timeout."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = devices
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def plain_group(backend: Backend, rank: int, size: int) -> dist.ProcessGroup:
    """A stock ProcessGroup over one backend, known to nobody but its owner."""
    kinds = dist.ProcessGroup.BackendType
    kind = kinds.GLOO if isinstance(backend, dist.ProcessGroupGloo) else kinds.CUSTOM
    group = dist.ProcessGroup(HashStore(), rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """The backend that a group uses for a device."""
    return group._get_backend(device)


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """The devices that a group has a backend for."""
    return group._device_types


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
    """How many groups torch has given a number to: the next group's name."""
    return c10d._world.group_count


def set_group_count(count: int) -> None:
    """Make the next group's name the same on all ranks again.

    A group whose construction failed has used up a number on this rank, which the others may not have.
    """
    c10d._world.group_count = count


def is_default_timeout(timeout: timedelta) -> bool:
    """Whether this is what torch fills in where nobody named a timeout (30 min)."""
    return timeout == c10d.default_pg_timeout


def source_rank(work: Work) -> int:
    """The rank that a received message came from."""
    return work._source_rank()


# ------------------------------------------------------------------------------------- DDP's Reducer


def ddp_parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that the Reducer reduces, in the order of its indices."""
    parameters, _ = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return cast("list[torch.nn.Parameter]", parameters)


def ddp_reduces(ddp: DistributedDataParallel) -> bool:
    """Whether the C++ Reducer is at work (not compiled DDP, not a DDP with every reduction delayed)."""
    return getattr(ddp, "reducer", None) is not None and not getattr(ddp, "_use_python_reducer", False)


def ddp_rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether DDP lays its buckets out anew after the first backward."""
    return ddp_reduces(ddp) and bool(ddp.static_graph or not ddp.find_unused_parameters)


def ddp_has_rebuilt(ddp: DistributedDataParallel) -> bool:
    """Whether it has done so."""
    return bool(ddp._has_rebuilt_buckets)


def ddp_buckets(ddp: DistributedDataParallel) -> list[list[torch.Tensor]]:
    """The parameters in each bucket, in the order in which buckets are reduced."""
    reducer: Any = ddp.reducer
    return [list(bucket.parameters()) for bucket in reducer._get_zeros_like_grad_buckets()]


def ddp_rebuild(ddp: DistributedDataParallel) -> bool:
    """The rebuild that DDP would do in its next forward (two broadcasts from rank 0), now."""
    reducer: Any = ddp.reducer
    rebuilt = bool(reducer._rebuild_buckets())
    if rebuilt:
        ddp._has_rebuilt_buckets = True
    return rebuilt


def ddp_rebuild_under(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> bool:
    """The same before any backward, with `group` in the place of the process group for its two broadcasts."""
    reducer: Any = ddp.reducer
    reducer._push_all_rebuilt_params()  # without it the Reducer has seen no gradient and rebuilds nothing
    reducer._update_process_group(group)
    try:
        return ddp_rebuild(ddp)
    finally:
        reducer._update_process_group(ddp.process_group)


def ddp_new_reducer(ddp: DistributedDataParallel) -> None:
    """Put a Reducer as of construction into a DDP object, whatever state the old one was left in."""
    old: Any = ddp.reducer
    # At once, not in a destructor that waits for the last reference: two Reducers' hooks would both fire.
    old._remove_autograd_hooks()
    del old
    wrapped: Any = ddp
    wrapped.logger = None
    wrapped.reducer = None
    parameters, sparse = wrapped._build_params_for_reducer()
    names = wrapped._build_debug_param_to_name_mapping(parameters)
    wrapped._ddp_init_helper(parameters, sparse, names, wrapped.static_graph)
    if wrapped.static_graph:
        wrapped._static_graph_delay_allreduce_enqueued = False
        wrapped.reducer._set_static_graph()
        wrapped.logger._set_static_graph()
    for hook, state in wrapped._comm_hooks:
        wrapped.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(wrapped.reducer, state, hook)  # type: ignore[attr-defined]
    if wrapped.mixed_precision is not None:
        wrapped.reducer._set_mixed_precision_param_dtype(wrapped.mixed_precision.param_dtype)
    wrapped._has_rebuilt_buckets = False
    # An abort may have fallen between a forward under no_sync() and the next one.
    wrapped.require_backward_grad_sync = True
    wrapped.require_forward_param_sync = True
