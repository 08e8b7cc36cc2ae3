"""Which ranks hold the same tensors: read from meshes and placements, without any communication."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.state import State
from ckptless.pytorch_hooks.state.twins import twins

WORLD = 8
RANK = 5


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def placed(mesh: DeviceMesh, *placements: Any) -> DTensor:
    return DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False)


class Holding:
    """No module, and not a list either."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net


class Holder(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def test_no_dtensor_is_the_same_everywhere() -> None:
    assert twins(State(model=net()), 2, 4) == (0, 1, 2, 3)
    assert twins(State(), 0, 1) == (0,)


@pytest.mark.usefixtures("world")
def test_ddp_is_the_same_in_its_group() -> None:
    part = dist.new_group([1, 3, RANK])
    assert twins(State(model=DistributedDataParallel(net())), RANK, WORLD) == tuple(range(WORLD))
    assert twins(State(model=DistributedDataParallel(net(), process_group=part)), RANK, WORLD) == (1, 3, RANK)


@pytest.mark.usefixtures("world")
def test_fully_sharded_has_no_twin() -> None:
    model: Any = fully_shard(net(), mesh=init_device_mesh("cpu", (WORLD,)))
    assert twins(State(model=model, optimizer=torch.optim.AdamW(model.parameters())), RANK, WORLD) == (RANK,)


@pytest.mark.usefixtures("world")
def test_hybrid_sharded_has_one_in_each_copy() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "shards"))
    model: Any = fully_shard(net(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    state = State(model=model, optimizer=optimizer)
    assert twins(state, RANK, WORLD) == (1, RANK)
    # A pure function of the state: what another rank would say of the same meshes.
    assert [twins(state, rank, WORLD) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.usefixtures("world")
def test_what_is_sharded_most_decides() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "shards", "slices"))
    whole = placed(mesh, Replicate(), Replicate(), Replicate())
    sharded = placed(mesh, Replicate(), Shard(0), Replicate())
    sliced = placed(mesh, Replicate(), Replicate(), Shard(1))
    assert twins(State(model=Holder(a=whole)), RANK, WORLD) == tuple(range(WORLD))
    assert twins(State(model=Holder(a=whole, b=sharded)), RANK, WORLD) == (0, 1, 4, 5)
    assert twins(State(model=Holder(a=whole, b=sliced)), RANK, WORLD) == (1, 3, 5, 7)
    assert twins(State(model=Holder(a=sharded, b=sliced)), RANK, WORLD) == (1, 5)
    assert twins(State(model=Holder(a=placed(mesh["shards"], Shard(0)))), RANK, WORLD) == (RANK,)


@pytest.mark.usefixtures("world")
def test_optimizer_state_may_be_sharded_where_its_parameter_is_not() -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert twins(State(optimizer=optimizer), RANK, WORLD) == tuple(range(WORLD))
    optimizer.state[parameter] = {"inner": [placed(mesh, Shard(0), Replicate())]}
    assert twins(State(optimizer=optimizer), RANK, WORLD) == (4, 5, 6, 7)


@pytest.mark.usefixtures("world")
def test_a_rank_outside_of_a_mesh_is_no_twin() -> None:
    some = DeviceMesh("cpu", torch.tensor([1, RANK, 6]), _init_backend=False)
    state = State(model=Holder(a=placed(some, Replicate())))
    assert twins(state, RANK, WORLD) == (1, RANK, 6)
    # The others hold nothing of it, all alike.
    assert twins(state, 0, WORLD) == (0, 2, 3, 4, 7)


def test_ten_thousand_ranks_and_thousands_of_tensors() -> None:
    dist.init_process_group("fake", store=HashStore(), rank=1, world_size=10_000)
    try:
        mesh = DeviceMesh("cpu", torch.arange(10_000).view(1250, 8), _init_backend=False)
        few = {f"t{i}": placed(mesh, Replicate(), Shard(0)) for i in range(10)}
        many = {f"t{i}": placed(mesh, Replicate(), Shard(0)) for i in range(4_000)}
        # A mesh object of its own for each of these, all equal.
        many |= {
            f"m{i}": placed(DeviceMesh("cpu", torch.arange(10_000).view(1250, 8), _init_backend=False), *kind)
            for i, kind in enumerate([(Replicate(), Shard(0))] * 5)
        }
        small, large = State(model=Holder(**few)), State(model=Holder(**many))
        start = time.perf_counter()
        assert twins(small, 1, 10_000) == tuple(range(1, 10_000, 8))
        middle = time.perf_counter()
        assert twins(large, 1, 10_000) == tuple(range(1, 10_000, 8))
        end = time.perf_counter()
        print(f"10 tensors {1e3 * (middle - start):.1f} ms, 4005 tensors {1e3 * (end - middle):.1f} ms")
    finally:
        dist.destroy_process_group()


def test_fsdp1_is_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for plain in (True, False):
            model = FullyShardedDataParallel(net(), use_orig_params=plain, device_id=torch.device("cpu"))
            with pytest.raises(
                UsageError, match=r"^state\.model is a FullyShardedDataParallel .*fully_shard"
            ):
                twins(State(model=model), 0, 2)
            for hidden in ({"nets": {"a": [model]}}, {"held": Holding(model)}):
                with pytest.raises(UsageError, match="is a FullyShardedDataParallel"):
                    twins(State(**hidden), 0, 2)
            if not plain:
                flat = torch.optim.SGD(model.parameters(), lr=0.1)
                with pytest.raises(UsageError, match=r"is a FlatParameter of FSDP1, .*fully_shard"):
                    twins(State(optimizer=flat), 0, 2)
    finally:
        dist.destroy_process_group()


def test_sharded_tensor_is_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        whole = sharded_tensor.zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 2)
        parameter = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.state[parameter] = {"momentum": whole}
        with pytest.raises(UsageError, match=r"^o:optimizer:0\.0:momentum is a ShardedTensor, .* DTensor"):
            twins(State(optimizer=optimizer), 0, 2)
    finally:
        dist.destroy_process_group()
