"""States of many ranks in one process: each is built where collectives do nothing, and filled by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptless.pytorch_hooks.process_groups.models import Buckets
from ckptless.pytorch_hooks.state import State, TensorSet
from ckptless.pytorch_hooks.state.objects import every_tensor
from ckptless.pytorch_hooks.state.twins import twins
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp
from ckptless.pytorch_hooks.torch_private.dcp import part_of
from tests.unit.pytorch_hooks.captured import capture

WIDTH = 37


@contextlib.contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """A world whose collectives do nothing, seen by one of its ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # As ckptless's groups do it: an equal mesh would be taken for the one of the rank before.
    torch_fsdp.forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Tied(nn.Module):
    """Uneven parts, a frozen one, one of two names, bfloat16, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.last = nn.Linear(16, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(5))


def ddp(_world_size: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Tied())


def fsdp(world_size: int) -> nn.Module:
    model, mesh = Tied(), init_device_mesh("cpu", (world_size,))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hsdp(world_size: int) -> nn.Module:
    model = Tied()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def columns(world_size: int) -> nn.Module:
    """Cut in the second dimension."""
    model, mesh = nn.Linear(WIDTH, 11), init_device_mesh("cpu", (world_size,))
    for name, parameter in list(model.named_parameters()):
        cut = Shard(parameter.dim() - 1)
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [cut])))
    return model


KINDS: dict[str, Callable[[int], nn.Module]] = {"ddp": ddp, "fsdp": fsdp, "hsdp": hsdp, "columns": columns}


def whole_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a tensor of this name is in all worlds."""
    seed = sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def built(kind: str, world_size: int, *, trained: bool) -> State:
    model = KINDS[kind](world_size)
    state = State(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    if trained:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        state.optimizer.step()
        state.optimizer.zero_grad()
    return state


def expected(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    whole = whole_of(name, tuple(tensor.shape), tensor.dtype)
    if not isinstance(tensor, DTensor):
        return whole
    part, start = tensor.to_local(), part_of(tensor)
    assert start is not None
    for dimension, begin in enumerate(start):
        whole = whole.narrow(dimension, begin, part.shape[dimension])
    return whole


def each(state: State) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Of every tensor its name, what lives here, and what it is to be."""
    for name, tensor, _like in every_tensor(state):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        yield name, local.detach(), expected(name, tensor)


@dataclass
class Former:
    """What one rank of a world has committed."""

    shard: int
    record: bytes
    layout: str
    payload: torch.Tensor


def committed(kind: str, world_size: int, step: int) -> list[Former]:
    """What a whole world has."""
    found = []
    for rank in range(world_size):
        with rank_of(rank, world_size):
            state = built(kind, world_size, trained=True)
            with torch.no_grad():
                for _name, local, whole in each(state):
                    local.copy_(whole)
            tensors = TensorSet(state)
            payload = torch.zeros(tensors.layout.nbytes, dtype=torch.uint8)
            tensors.pack(payload)
            record = capture(state, step, {}, Buckets(state).layouts, tensors)
            shard = min(twins(state, rank, world_size))
            found.append(Former(shard, record, tensors.planned.digest, payload))
    return found


def smallest(tensors: Any) -> int:
    """The bytes that all of them have, without any between them."""
    return sum(entry.nbytes for entry in tensors.layout.entries)
