"""Finds the ranks that hold exactly the same tensors, as a State itself tells."""

import sys
from typing import Any

import torch
import torch.distributed as dist

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.state import private
from ckptless.pytorch_hooks.state.objects import State, every_tensor, tree_of
from ckptless.pytorch_hooks.torch_private import ddp as torch_ddp

# Of torch's communication hooks those that go on from what they have kept of the steps before.
_KEEPING = ("PowerSGDState", "PostLocalSGDState")


def twins(state: State, rank: int, world_size: int) -> tuple[int, ...]:
    """Give the ranks, ascending, that hold the same tensors as `rank`, itself among them.

    For each DTensor those are the ranks with the same coordinate in every dimension of the mesh that is not
    replicated; for DDP the ranks of its group; for a state with neither, all ranks. Twins of a rank are twins
    of all of them. What is sharded by hand does not show. UsageError where it cannot be told.
    """
    refuse(state)
    known = set(range(world_size))
    for mesh, sharded in _kinds(state):
        known &= _sharers(mesh.mesh, sharded, rank, world_size)
    for _prefix, module in tree_of(state).modules():
        ddp = torch_ddp.of(module)
        if ddp is not None:
            known &= set(dist.get_process_group_ranks(ddp.process_group))
    return tuple(sorted(known))


def refuse(state: State) -> None:
    """Raise UsageError for what is sharded in a way that cannot be told, nor recovered."""
    for prefix, module in tree_of(state).modules():
        if _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            name = prefix.rstrip(".:").replace(":", ".")
            raise UsageError(
                f"state.{name} is a FullyShardedDataParallel (FSDP1), which ckptless cannot recover: "
                "use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        ddp = torch_ddp.of(module)
        if ddp is not None and any(map(_is_sparse, module.modules())):
            raise UsageError(
                f"state.{prefix.rstrip('.:').replace(':', '.')} is a DistributedDataParallel with sparse "
                "gradients, whose buckets torch does not tell: take sparse=False in its embeddings"
            )
        for kept in [] if ddp is None else private.comm_hook_states(ddp):
            if type(kept).__name__ in _KEEPING:
                raise UsageError(
                    f"the communication hook of state.{prefix.rstrip('.:').replace(':', '.')} keeps a "
                    f"{type(kept).__name__} for each rank, which ckptless cannot save: take a hook without "
                    "state, such as bf16_compress_hook"
                )
    for name, tensor, _like in every_tensor(state):
        if getattr(tensor, "_is_flat_param", False):
            raise UsageError(
                f"{name} is a FlatParameter of FSDP1, which ckptless cannot recover: "
                "use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if _is(tensor, "torch.distributed._shard.sharded_tensor", "ShardedTensor"):
            raise UsageError(
                f"{name} is a ShardedTensor, which ckptless cannot recover: "
                "use a DTensor (torch.distributed.tensor.distribute_tensor)"
            )


def _is_sparse(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse


def _is(thing: object, module: str, name: str) -> bool:
    """Whether it is an instance of a class that is only looked up where its module has been imported."""
    kind: Any = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)


def _kinds(state: State) -> list[tuple[Any, tuple[int, ...]]]:
    """The distinct (mesh, its dimensions that are not replicated) of all DTensors."""
    found: dict[tuple[Any, tuple[int, ...]], None] = {}
    # A mesh is hashed and compared rank by rank: at most once for each object, of which there are few.
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for _name, tensor, _like in every_tensor(state):
        where = private.placed(tensor)
        if where is None:
            continue
        mesh, sharded = where
        if (id(mesh), sharded) not in seen:
            seen.add((id(mesh), sharded))
            found[mesh, sharded] = None
    return list(found)


def _sharers(mesh: torch.Tensor, sharded: tuple[int, ...], rank: int, world_size: int) -> set[int]:
    """The ranks with the same part as `rank`; of one that is not in the mesh, all others that are not."""
    place = (mesh == rank).nonzero()
    if not len(place):
        return set(range(world_size)) - set(mesh.flatten().tolist())
    coordinate = place[0].tolist()
    index = tuple(coordinate[i] if i in sharded else slice(None) for i in range(mesh.dim()))
    return set(mesh[index].flatten().tolist())
