"""The private names of torch that process groups, DDP and FSDP2 are renewed by, each with its reason.

Only `calls` and `fsdp` use them. All are looked for before they are used, and `self_test` does
what they are used for: a torch that does something else by the same name is found there. (What torches
before 2.15 need besides is in `older_fsdp` and `process_groups/older`; what saving state needs, in `dcp` and
`state/private`.)
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ckptless.pytorch_hooks.errors import TorchMismatch
from ckptless.torch_versions import NEWEST, OLDEST, Version, parse, shown

_C10D = "torch._C._distributed_c10d"
_WORLD = "torch.distributed.distributed_c10d:_world"
_SYMMETRIC = f"{_C10D}:_SymmetricMemory"
_NCCL = "torch.distributed:ProcessGroupNCCL"
_DDP = "torch.nn.parallel:DistributedDataParallel"
_COMPOSED = "torch.distributed._composable.replicate:_ReplicateState"
_FSDP = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_FSDP}._fsdp_state:FSDPState"
_GROUP = f"{_FSDP}._fsdp_param_group:FSDPParamGroup"
_PARAM = f"{_FSDP}._fsdp_param:FSDPParam"


@dataclass(frozen=True)
class Name:
    """A name of torch ("module:path"), what it is for, and words that its signature must hold.

    `held`: only objects of that class have it. `since`: before, something else is used, if anything.
    """

    where: str
    why: str
    takes: str = ""
    held: bool = False
    since: Version = OLDEST

    @property
    def last(self) -> str:
        """The name itself."""
        return self.where.rpartition(":")[2].rpartition(".")[2]

    @property
    def holder(self) -> str:
        """The class or object that has it."""
        return self.where.rpartition(".")[0] if "." in self.where.rpartition(":")[2] else ""


GROUPS = (
    Name(f"{_C10D}:Backend", "what stands in a stock group for a backend of each generation is one"),
    Name(f"{_C10D}:FakeProcessGroup", "a newcomer builds its model before it has anybody to talk to"),
    Name(f"{_C10D}:FakeProcessGroup._create_internal", "how one is made", since=(2, 10)),
    Name(f"{_C10D}:Store.clone", "a wait in a connection of our own can be cut off"),
    Name(f"{_C10D}:Work.get_future", "nobody waits inside Gloo, which nothing wakes"),
    Name(f"{_C10D}:Work.wait", "the same, for those without a future", "timeout"),
    Name(f"{_C10D}:Work._source_rank", "from whom a message of anyone's came"),
    Name(f"{_C10D}:ProcessGroup._get_backend", "whether a group that torch knows is one of ours", "device"),
    Name(f"{_C10D}:ProcessGroupGloo.__init__", "a generation's backend", "store rank size options"),
    Name(f"{_C10D}:ProcessGroupGloo._Options", "the only way to say where it listens"),
    Name(f"{_C10D}:ProcessGroupGloo._Options._devices", "where it listens"),
    Name(f"{_C10D}:ProcessGroupGloo._Options._timeout", "how long it waits for the others"),
    Name(
        f"{_C10D}:ProcessGroupGloo.create_device",
        "never lazy, so that its sockets are known",
        "hostname interface lazy_init",
    ),
    Name(
        f"{_C10D}:ProcessGroupGloo.create_default_device", "the same where no address is given", "lazy_init"
    ),
    Name(
        "torch.distributed.distributed_c10d:_new_group_with_tag",
        "groups over named backends are ours",
        "backend",
    ),
    Name(f"{_WORLD}.group_count", "a newcomer must name its next group as the others do"),
    Name(f"{_WORLD}.pg_names", "whether a group has been destroyed"),
    Name(f"{_WORLD}.pg_coalesce_state", "a batch that was cut off would swallow what follows"),
)

# Where there is an accelerator.
DEVICES = (
    Name(f"{_C10D}:Backend.abort", "what a collective holds up on a device is freed by nothing else"),
    Name(f"{_C10D}:Backend.eager_connect_single_device", "who waits for the others in it can be freed"),
    Name(f"{_C10D}:ProcessGroup._start_coalescing", "a batch of messages is queued as one", "device_type"),
    Name(f"{_C10D}:ProcessGroup._end_coalescing", "the same", "device_type"),
    Name(f"{_C10D}:Backend._start_coalescing", "the same, of a backend in a stock group", since=(2, 14)),
    Name(f"{_C10D}:Backend._end_coalescing", "the same", since=(2, 14)),
    Name(f"{_SYMMETRIC}.empty_strided_p2p", "symmetric memory outlives no generation, and is refused"),
    Name(f"{_SYMMETRIC}.rendezvous", "the same"),
    Name(f"{_SYMMETRIC}.set_group_info", "the same"),
)

# Where that is NCCL. From 2.15 on torch makes another class of groups by default, with other switches.
NCCL = (
    Name(f"{_NCCL}.__init__", "a generation's backend", "store rank size options"),
    Name(f"{_NCCL}.Options._timeout", "how long it waits for the others"),
    Name(f"{_NCCL}.Options.group_name", "what torch's recorders call its group"),
)

# Not needed: where a torch has them no longer, its flight recorder costs more and tells less.
RECORDERS = (
    Name(
        "torch.distributed.distributed_c10d:_FR_SELF_RECORDING_BACKENDS",
        "Gloo records its works itself; one more recorder for each group takes 9 ms to make",
        since=(2, 15),
    ),
    Name(f"{_C10D}:Backend._set_group_uid", "Gloo's records name the group by it", since=(2, 14)),
)

DDP = (
    Name(f"{_DDP}.reducer", "what is replaced", held=True),
    Name(f"{_DDP}.logger", "it holds the Reducer", held=True),
    Name(f"{_DDP}._build_params_for_reducer", "what a Reducer is made for, in its order", "self"),
    Name(f"{_DDP}._build_debug_param_to_name_mapping", "what a Reducer is made with", "parameters"),
    Name(
        f"{_DDP}._ddp_init_helper",
        "makes a Reducer",
        "parameters expect_sparse_gradient param_to_name_mapping static_graph",
    ),
    Name(f"{_DDP}._set_static_graph", "a new Reducer must know of it, too", "self"),
    Name(f"{_DDP}._comm_hooks", "a new Reducer has none", held=True),
    Name(f"{_DDP}._has_rebuilt_buckets", "whether the buckets are the final ones", held=True),
    Name(f"{_DDP}.require_backward_grad_sync", "the generation may have ended under no_sync()", held=True),
    Name(f"{_DDP}.require_forward_param_sync", "the same", held=True),
    Name(f"{_COMPOSED}.lazy_init", "makes the DDP of a module that `replicate` was called for", "self"),
    Name(f"{_COMPOSED}._ddp", "that DDP", held=True),
    Name(f"{_C10D}:GradBucket.parameters", "which parameters are in a bucket"),
    Name(f"{_C10D}:Reducer._get_zeros_like_grad_buckets", "which buckets there are"),
    Name(f"{_C10D}:Reducer._push_all_rebuilt_params", "a rebuild before any backward"),
    Name(f"{_C10D}:Reducer._rebuild_buckets", "the final buckets at a chosen moment", "bool"),
    Name(f"{_C10D}:Reducer._remove_autograd_hooks", "two Reducers would both reduce"),
    Name(f"{_C10D}:Reducer._update_process_group", "dictates the buckets that others have", "ProcessGroup"),
)

FSDP = (
    Name("torch.distributed._composable_state:_get_module_state", "finds what has happened", "module"),
    Name(_STATE, "tells FSDP2 from others that are found so"),
    Name(f"{_STATE}._is_root", "only roots are reset", held=True),
    Name(f"{_STATE}._pre_backward", "gradients that are carried over are seen there", "grad"),
    Name(f"{_PARAM}.sharded_param", "which parameters these are", held=True),
    Name(f"{_STATE}._state_ctx", "holds the switches of a root", held=True),
    Name(f"{_STATE}._fsdp_param_groups", "all else is in these", held=True, since=(2, 13)),
    Name(f"{_FSDP}._fsdp_state:FSDPStateContext.is_last_backward", "a switch of a root", held=True),
    Name(
        f"{_FSDP}._fsdp_state:FSDPStateContext.manual_backward_finalization",
        "a switch of a root",
        held=True,
        since=(2, 15),
    ),
    Name(f"{_GROUP}._all_gather_result", "it may wait for a generation that is over", held=True),
    Name(
        f"{_FSDP}._fsdp_collectives:AllGatherResult.all_gather_work",
        "what a reset would wait for",
        since=(2, 15),
    ),
    Name(f"{_GROUP}.fsdp_params", "their gradients", held=True),
    Name(f"{_GROUP}.reduce_grads", "a switch between micro-batches", held=True),
    Name(f"{_GROUP}.all_reduce_grads", "the same", held=True),
    Name(f"{_GROUP}.reshard_after_backward", "the same", held=True),
    Name(f"{_GROUP}.post_forward_mesh_info", "a switch within a step", held=True),
    Name(f"{_GROUP}._partial_reduce_output", "gradients that are reduced over some ranks only", held=True),
    Name(f"{_PARAM}._unsharded_param", "gradients that are not reduced at all", held=True),
)

MESHES = (
    Name(
        "torch._C:_clear_DTensor_sharding_propagator_cache",
        "results would be of an equal mesh whose groups are gone",
        since=(2, 13),
    ),
)


def _signature(thing: object) -> str:
    # Compiled functions have no inspectable one: pybind11 writes it into the first lines of the docstring.
    if inspect.isfunction(thing):
        return " ".join(inspect.signature(thing).parameters)
    return inspect.getdoc(thing) or ""


def _moved(name: Name) -> str | None:
    """Return what is wrong with it, or None."""
    if name.held or version() < name.since:
        return None
    module, _, path = name.where.partition(":")
    shown_as = f"{module}.{path}"
    try:
        thing: object = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError):
        return f"{shown_as} is gone"
    signature = _signature(thing)
    missing = [word for word in name.takes.split() if word not in signature]
    return f"{shown_as} no longer takes or gives {', '.join(missing)}" if missing else None


def refuse_moved(names: Iterable[Name]) -> None:
    """Raise `TorchMismatch` if one of these that a class or module has is not what it was."""
    refuse([text for name in names if (text := _moved(name)) is not None])


def refuse_missing(thing: object, names: Iterable[Name]) -> None:
    """Raise `TorchMismatch` if an object does not hold what those of its class have held."""
    kind = type(thing).__name__
    refuse(
        [
            f"{kind}.{name.last} is gone"
            for name in names
            if name.held
            and name.holder.endswith((f":{kind}", f".{kind}"))
            and version() >= name.since
            and not (hasattr(thing, name.last) or name.last in type(thing).__annotations__)
        ]
    )


def refuse(moved: list[str]) -> None:
    """Raise `TorchMismatch` if anything has moved."""
    if moved:
        raise TorchMismatch(
            f"torch {torch.__version__} has moved what ckptless (made for {span()}) uses inside it: "
            f"{'; '.join(moved)}."
        )


def version() -> Version:
    """Return the version of this torch, two numbers."""
    return parse(torch.__version__)[:2]


def span() -> str:
    """The releases that were tested."""
    return f"{shown(OLDEST)} to {shown(NEWEST)}"
