"""The guard over torch's private parts passes here, and speaks plainly when something has moved."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor import _utils as dtensor_utils
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.errors import TorchMismatch
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.process_groups.models import Sharded
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private import dcp as torch_dcp
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp
from ckptless.pytorch_hooks.torch_private import older_fsdp
from ckptless.pytorch_hooks.torch_private.names import DEVICES, NCCL, RECORDERS, refuse_moved
from ckptless.pytorch_hooks.torch_private.names import version as torch_version


def test_this_torch_has_all_that_is_used() -> None:
    torch_private.check()


def test_a_missing_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DistributedDataParallel, "_ddp_init_helper")
    with pytest.raises(TorchMismatch, match=r"torch 2\..* has moved .*_ddp_init_helper is gone\.$") as caught:
        torch_private.check()
    assert torch.__version__ in str(caught.value)


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(self: object, parameters: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(DistributedDataParallel, "_ddp_init_helper", helper)
    with pytest.raises(TorchMismatch, match="no longer takes or gives expect_sparse_gradient"):
        torch_private.check()


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    with pytest.raises(TorchMismatch, match=r"torch 2\.7\.1 is too old for ckptless, which supports 2\.8"):
        torch_private.check()


@pytest.mark.skipif(torch_version() < (2, 10), reason="it has not all names that a newer one has to have")
def test_a_newer_torch_is_tried_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    torch_private.check()
    assert "2.99.0 is newer" in caplog.text


def test_a_group_of_ours_is_made_whatever_torch_hangs_on_groups() -> None:
    """Its own Gloo records what it does (2.15), under the group's name; nobody else does."""
    refuse_moved(RECORDERS)
    groups = ProcessGroups(timedelta(seconds=20), host="127.0.0.1")
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    groups.open(rank=0, world_size=1, generation=1, store=store)
    try:
        assert not getattr(distributed_c10d._world, "pg_flight_recorder_hooks", {})
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
        if torch_version() >= RECORDERS[1].since:
            assert recorded() == ("0", "all_reduce")
        stock = type(dist.group.WORLD) is dist.ProcessGroup
        assert stock is torch_private.takes_backends()
        if stock:
            with pytest.raises(RuntimeError, match=r"not safe to split|not support splitting") as caught:
                dist.split_group(dist.group.WORLD, [[0]])
            assert caught.type is RuntimeError  # and no RecursionError
    finally:
        groups.close()


def recorded() -> tuple[str, str]:
    """Group and kind of the last collective in the trace of Gloo's flight recorder."""
    dump: Any = torch._C._distributed_c10d
    last = json.loads(dump._dump_fr_trace_json())["entries"][-1]
    return last["process_group"][0], last["profiling_name"].removeprefix("gloo:")


def test_a_part_of_fsdp_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        ((state, _module),) = torch_fsdp.states(model.modules())
        monkeypatch.delattr(torch_fsdp._groups(state)[0], "_all_gather_result")
        with pytest.raises(TorchMismatch, match=r"FSDPParamGroup\._all_gather_result is gone\.$"):
            torch_fsdp.states(model.modules())
    finally:
        dist.destroy_process_group()


def test_gradients_that_are_not_reduced_yet_are_known_and_dropped() -> None:
    """Where they are has changed in 2.15: in the whole parameter alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        ((state, _module),) = torch_fsdp.states(model.modules())
        sharded = Sharded(model.modules())
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 4)).sum().backward()
        assert sharded.holds_gradients()
        sharded.renew()
        assert not sharded.holds_gradients()
        assert model.weight.grad is None
        assert torch_fsdp.switches(state)[1][0]["reduce_grads"] is True
        model(torch.ones(2, 4)).sum().backward()
        assert not sharded.holds_gradients()
        assert model.weight.grad is not None
    finally:
        dist.destroy_process_group()
        torch_fsdp.forget_meshes()


def test_a_gathered_module_that_has_run_nothing_is_sharded_again() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        sharded = Sharded(model.modules())
        assert len(sharded) == 1
        assert len(Sharded([nn.Linear(2, 2)])) == 0
        sharded.renew()
        before = model.weight
        model.unshard()
        assert model.weight is not before
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        sharded.renew()
        sharded.renew()
        assert model.weight is before
        ((state, _module),) = torch_fsdp.states(model.modules())
        assert torch_fsdp.switches(state) == Sharded(model.modules())._built[0]
        assert torch_fsdp.switches(state)[0]["is_last_backward"] is True
    finally:
        dist.destroy_process_group()


def test_when_modules_are_cut_up_is_as_it_was_built() -> None:
    """torchtitan's loss sets it in the first step, and a new process has not had that one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        states = [state for state, _module in torch_fsdp.states(model.modules())]
        sharded = Sharded(model.modules())
        model(torch.ones(2, 4)).sum().backward()
        first = [torch_fsdp.reshards(state) for state in states]
        # A root is never cut up between its passes.
        assert first == [[None], [None]]
        model[0].set_reshard_after_forward(True)
        assert torch_fsdp.reshards(states[1]) != [None]
        sharded.renew()
        assert [torch_fsdp.reshards(state) for state in states] == first
    finally:
        dist.destroy_process_group()
        torch_fsdp.forget_meshes()


def test_gradients_that_are_summed_by_mistake_are_noticed() -> None:
    """Torch 2.8 sums those of shards on the CPU, where nobody has asked for it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
        for mesh, sums in ((init_device_mesh("cpu", (2,)), torch_version() < (2, 9)), (hybrid, False)):
            model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
            assert Sharded(model.modules()).sums() is sums
            ((state, _module),) = torch_fsdp.states(model.modules())
            assert older_fsdp.sums(torch_fsdp._groups(state)) is (mesh is not hybrid)
            model.set_force_sum_reduction_for_comms(True)
            assert not Sharded(model.modules()).sums()
    finally:
        dist.destroy_process_group()
        torch_fsdp.forget_meshes()


def test_a_part_of_dcp_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_dcp.storage("__0_0.distcp", 3, 4) == filesystem._StorageInfo("__0_0.distcp", 3, 4)
    monkeypatch.delattr(filesystem, "_StorageInfo")
    with pytest.raises(TorchMismatch, match=r"_StorageInfo.__init__ is gone"):
        torch_dcp.storage("__0_0.distcp", 3, 4)


def test_where_a_part_of_a_dtensor_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DCP itself is told; uneven, so that the last rank has nothing."""
    for rank, start in ((0, (0, 0)), (1, (2, 0)), (3, (0, 0))):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (4,))
            part: Any = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
            assert torch_dcp.part_of(part) == start
            if part.to_local().numel():
                assert tuple(part.__create_chunk_list__()[0].offsets) == start
            assert torch_dcp.part_of(torch.zeros(3)) is None
            if not rank:
                monkeypatch.delattr(dtensor_utils, "compute_local_shape_and_global_offset")
                with pytest.raises(TorchMismatch, match="compute_local_shape_and_global_offset is gone"):
                    torch_dcp.part_of(part)
                monkeypatch.undo()
        finally:
            dist.destroy_process_group()
            torch_fsdp.forget_meshes()


def test_what_wraps_a_module_is_known() -> None:
    inner = nn.Linear(2, 2)
    both: list[Any] = [torch.compile(inner), checkpoint_wrapper(inner)]
    for wrapped in both:
        name = torch_dcp.wrapped_under(wrapped)
        assert name is not None
        assert getattr(wrapped, name) is inner
    assert torch_dcp.wrapped_under(inner) is None


class Nccl:
    """In the place of ProcessGroupNCCL, which a torch for the CPU does not have."""

    class Options:
        """The options that one is made with."""

        _timeout = timedelta(0)
        group_name = ""

    def __init__(self, store: Any, rank: int, size: int, options: Nccl.Options) -> None:
        self.made = (store, rank, size, options._timeout, options.group_name)
        self.numbered = False

    def _set_sequence_number_for_group(self) -> None:
        self.numbered = True


@pytest.mark.parametrize("version", [(2, 27, 7), (2, 28, 9)])
def test_a_backend_over_nccl(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    store = torch_private.HashStore()
    made: Any = torch_private.nccl_backend(store, 1, 4, timeout=timedelta(seconds=9), name="7")
    assert made.made == (store, 1, 4, timedelta(seconds=9), "7")
    assert made.numbered is (torch_version() < (2, 14))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a torch for the CPU has no NCCL")
def test_the_class_of_nccl_groups_is_what_it_was() -> None:
    """In 2.15, too, where another one is the default."""
    refuse_moved((*DEVICES, *NCCL))
    with pytest.raises(ValueError, match="no GPUs found") if not torch.cuda.is_available() else nullcontext():
        torch_private.nccl_backend(torch_private.HashStore(), 0, 1, timeout=timedelta(seconds=9), name="7")


def test_an_nccl_that_has_lost_its_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(TorchMismatch, match=r"ProcessGroupNCCL\.__init__ is gone"):
        torch_private.nccl_backend(torch_private.HashStore(), 0, 1, timeout=timedelta(seconds=9), name="7")


def test_an_nccl_that_crashes_in_an_abort_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 5))
    with pytest.raises(UsageError, match=r"NCCL 2\.28\.5 crashes where communicators are aborted"):
        torch_private.nccl_backend(torch_private.HashStore(), 0, 1, timeout=timedelta(seconds=9), name="7")
