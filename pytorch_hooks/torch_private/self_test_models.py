"""What the self-test trains: DDP and FSDP2, each left where an iteration is hardest to give up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptless.pytorch_hooks.process_groups import ddp as ddps
from ckptless.pytorch_hooks.process_groups.fabric import Fabric
from ckptless.pytorch_hooks.process_groups.fsdp import Sharded
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp

SIZE = 2
Layout = list[list[int]] | None


class Wrong(Exception):
    """What does not work with this torch, as the end of a sentence."""


class _Cut(Exception):
    """The end of a half-done iteration."""


def kept_models(fabric: Fabric) -> list[Kept]:
    """All that are tried, newly built."""
    flat, hybrid = (
        init_device_mesh("cpu", (SIZE,)),
        init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("r", "s")),
    )
    return [
        _Ddp(fabric),
        _StaticDdp(fabric),
        _Fsdp(flat, _in_forward),
        _Fsdp(flat, _between_micro_batches),
        _Fsdp(hybrid, _between_reductions),
        _NewFsdp(flat, lambda _model: None),
    ]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.5 * parameter.grad)
                parameter.grad = None


def _bits(tensors: Iterator[torch.Tensor]) -> list[object]:
    return [tensor.tolist() for tensor in tensors]


class Kept:
    """A model over a group. Rank 0 has no gradients and rank 1 twice its share: their mean is exact."""

    name = "a model"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._first = [parameter.detach().clone() for parameter in model.parameters()]

    def loss(self, rank: int) -> torch.Tensor:
        """What is made less."""
        found: torch.Tensor = self.model(torch.ones(2, 4)).sum() * 2.0 * rank
        return found

    def train(self, rank: int) -> None:
        """Once, from the parameters as they are at first; Wrong if they do not become what they should."""
        torch.autograd.backward(self.loss(rank))
        self.settle()
        _update(self.model)
        alone = _net()
        torch.autograd.backward(alone(torch.ones(2, 4)).sum())
        _update(alone)
        if _bits(self.whole()) != _bits(alone.parameters()):
            raise Wrong(f"{self.name} did not come to the bits that one process comes to")

    def settle(self) -> None:
        """What is done after a backward."""

    def whole(self) -> Iterator[torch.Tensor]:
        """The parameters as all ranks have them together."""
        return self.model.parameters()

    def restore(self) -> None:
        """The parameters as they were at first."""
        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), self._first, strict=True):
                parameter.copy_(first)

    def begin(self, rank: int) -> None:
        """An iteration that will not be ended, with the other rank."""

    def begin_alone(self) -> None:
        """What of it the other rank does not come to."""

    def give_up(self) -> None:
        """Before the groups are renewed."""

    def layout(self) -> Layout:
        """What a newcomer is to have the same."""
        return None

    def renew(self, layout: Layout) -> None:
        """After that."""


class _Ddp(Kept):
    """Cut off between forward and backward, with the old Reducer still alive."""

    name = "DDP"

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._ddp = self._made(_net())
        self._old: object = None
        super().__init__(self._ddp)

    def _made(self, net: nn.Sequential) -> DistributedDataParallel:
        # Several buckets, so that there is an order of them.
        return DistributedDataParallel(net, bucket_cap_mb=1e-4)

    def train(self, rank: int) -> None:
        """As of any; and each bucket is reduced once."""
        before = self._fabric.calls
        super().train(rank)
        if self._old is not None and self._fabric.calls - before != len(ddps.bucket_layout(self._ddp)):
            raise Wrong(f"{self.name} did not reduce each bucket once")

    def settle(self) -> None:
        """Fix the buckets."""
        ddps.settle_buckets(self._ddp)

    def begin(self, rank: int) -> None:
        """Forward only."""
        self.loss(rank)

    def give_up(self) -> None:
        """Something holds the old Reducer."""
        self._old = self._ddp.reducer

    def layout(self) -> Layout:
        """That of the buckets."""
        layout = ddps.settled_layout(self._ddp)
        if layout is None or len(layout) < 2:
            raise Wrong(f"{self.name} did not lay its buckets out")
        return layout

    def renew(self, layout: Layout) -> None:
        """The same buckets on the new group."""
        ddps.renew(self._ddp, layout)


class _StaticDdp(_Ddp):
    """A static graph, a parameter that nobody uses, a hook for reductions; cut off under no_sync()."""

    name = "DDP with a static graph"

    def _made(self, net: nn.Sequential) -> DistributedDataParallel:
        self._reduced: list[int] = []
        net.register_buffer("shown", torch.ones(2))  # rank 0 shows it to the others in each forward
        net.register_parameter("unused", nn.Parameter(torch.ones(3)))
        made = DistributedDataParallel(net, static_graph=True)
        # As a lambda: torch looks at annotations, and not as they are spelled here.
        made.register_comm_hook(self._reduced, lambda state, bucket: _mean(state, bucket))
        return made

    def train(self, rank: int) -> None:
        """Twice, since the first backward of a static graph is another one; by the hook."""
        del self._reduced[:]
        Kept.train(self, rank)
        self.restore()
        Kept.train(self, rank)
        if not self._reduced:
            raise Wrong(f"{self.name} reduced nothing by its hook")

    def whole(self) -> Iterator[torch.Tensor]:
        """Those that are used."""
        return (parameter for name, parameter in self._ddp.module.named_parameters() if name != "unused")

    def begin(self, rank: int) -> None:
        """Under no_sync(), which is not left."""
        self._unsynced = self._ddp.no_sync()
        self._unsynced.__enter__()
        self.loss(rank)

    def layout(self) -> Layout:
        """That of one bucket, or two."""
        return ddps.settled_layout(self._ddp)

    def renew(self, layout: Layout) -> None:
        """As of any, while the memory of the old buckets is free."""
        model: Any = self._ddp
        make = model._ddp_init_helper

        def watched(*words: Any) -> None:
            if model.reducer is not None or model.logger is not None:
                raise Wrong(f"{self.name} keeps its old Reducer while a new one is made")
            make(*words)

        model._ddp_init_helper = watched
        super().renew(layout)
        del model._ddp_init_helper


def _mean(reduced: list[int], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    reduced.append(bucket.index())
    future = dist.all_reduce(bucket.buffer().div_(SIZE), async_op=True).get_future()
    mean: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return mean


class _Fsdp(Kept):
    """`begins` leaves an iteration half done on both ranks; then one of them gathers alone."""

    name = "FSDP2"

    def __init__(self, mesh: Any, begins: Callable[[Any], None]) -> None:
        model = _net()
        self._mesh = mesh
        self._begins = begins
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
        super().__init__(model)
        self._sharded = Sharded(model.modules())
        if len(self._sharded) != 3:
            raise Wrong("FSDP2 shows nothing of what it has sharded")
        self._seen: list[None] = []
        states = [state for state, _module in torch_fsdp.states(model.modules())]
        for state in states:
            torch_fsdp.before_backward(state, lambda: self._seen.append(None))
        shown = {id(parameter) for state in states for parameter in torch_fsdp.parameters(state)}
        if shown != {id(parameter) for parameter in model.parameters()}:
            raise Wrong("FSDP2 does not show the parameters that it has sharded")

    def train(self, rank: int) -> None:
        """As of any; and what comes of parameters is of the mesh that they are on."""
        del self._seen[:]
        super().train(rank)
        if not self._seen:
            raise Wrong("FSDP2 does not show when a backward begins")
        for parameter in self.model.parameters():
            for result in (parameter + parameter, parameter.detach(), parameter.sum()):
                if getattr(result, "device_mesh", None) is not self._mesh:
                    raise Wrong("results of DTensors are of a mesh that is gone")

    def whole(self) -> Iterator[torch.Tensor]:
        """Gathered."""
        return (parameter.full_tensor() for parameter in self.model.parameters())  # type: ignore[attr-defined]

    def begin(self, rank: int) -> None:
        """As it was told."""
        self._begins(self)
        if self._sharded.holds_gradients() is (self._begins is _in_forward):
            raise Wrong("FSDP2 does not show which gradients are not reduced yet")

    def begin_alone(self) -> None:
        """Gathered in the background."""
        part: Any = self.model
        part[0].unshard(async_op=True)

    def give_up(self) -> None:
        """Shards again, wherever the iteration was."""
        self._sharded.renew()
        if self._sharded.holds_gradients() or any(p.grad is not None for p in self.model.parameters()):
            raise Wrong("FSDP2 keeps gradients of an iteration that was given up")


class _NewFsdp(_Fsdp):
    """Never trained on before the end of the generation."""

    def __init__(self, mesh: Any, begins: Callable[[Any], None]) -> None:
        super().__init__(mesh, begins)
        self._trained = False

    def train(self, rank: int) -> None:
        """Not the first time."""
        if self._trained:
            super().train(rank)
        self._trained = True

    def begin(self, rank: int) -> None:
        """Nothing."""

    def renew(self, layout: Layout) -> None:
        """A newcomer's is trained, too."""
        self._trained = True


def _in_forward(kept: _Fsdp) -> None:
    def cut(_module: object, _arguments: object) -> None:
        raise _Cut

    part: Any = kept.model
    handle = part[1].register_forward_pre_hook(cut)
    with contextlib.suppress(_Cut):
        kept.loss(1)
    handle.remove()


def _between_micro_batches(kept: _Fsdp) -> None:
    model: Any = kept.model
    model.set_requires_gradient_sync(False)
    torch.autograd.backward(kept.loss(1))


def _between_reductions(kept: _Fsdp) -> None:
    model: Any = kept.model
    model.set_requires_all_reduce(False)
    model.set_reshard_after_backward(False)
    model.set_is_last_backward(False)
    torch.autograd.backward(kept.loss(1))
