"""Try whether recovery works with this torch: `python -m ckptless.pytorch_hooks.self_test`.

What torch has inside can change without changing its name, so a look for the names (`names.py`) shows too
little of a torch that nobody has tested. Here two processes make groups, leave them in the middle of a
collective whose peer does not come, and renew them; one of them comes back as a newcomer. DDP and FSDP2 train
before and after, each left where an iteration is hardest to give up, and must come to the bits that one
process comes to. Prints one sentence where that fails; exit code 0 where all works. Torch is loaded once for
both.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptless.pytorch_hooks.errors import GenerationEnded, TorchMismatch
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.process_groups.models import Sharded
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private import ddp as torch_ddp
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp

HOST = "127.0.0.1"
SIZE = 2
# What hangs is what is looked for.
DEADLINE_S = 60.0
# A survivor is out of a collective in milliseconds, and the other rank there in a second.
LEFT_S = 10.0
SENTENCE_NBYTES = 4096


class Wrong(Exception):
    """The failure of this torch, as the end of a sentence."""


def main() -> int:
    """Try it; the exit code."""
    wrong = tried()
    if wrong:
        print(wrong)
    return 1 if wrong else 0


def tried() -> str:
    """Return what does not work with this torch, or "". Forks, and leaves no process."""
    try:
        torch_private.check()
        torch_fsdp.check()
        load()
    except Exception as error:  # noqa: BLE001 - as in a rank
        return (
            str(error) if isinstance(error, TorchMismatch) else f"torch {torch.__version__} {_raised(error)}"
        )
    wrong = _processes()
    return f"torch {torch.__version__} was tried, and {wrong}" if wrong else ""


def load() -> None:
    """Load what DDP would load in each process."""
    torch.compiler.disable(_sum)  # type: ignore[no-untyped-call]


def _raised(error: BaseException) -> str:
    # The first of its sentences: torch's errors may fill a page.
    text = " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0]
    return f"this was raised: {text}"


def _processes() -> str:
    """Return what the two processes say is wrong, "" for nothing."""
    ports, tell = os.pipe()
    said, say = os.pipe()
    children = [_fork(rank, ports, say) for rank in range(SIZE)]
    os.close(say)
    # A server has threads: it is made after the forks.
    server: Any = torch_private.TCPStore(HOST, 0, None, True, wait_for_workers=False)
    os.write(tell, f"{server.port:>8}".encode() * SIZE)
    with os.fdopen(said, "rb", buffering=0) as file:
        # One that says what is wrong, or the end of both.
        over = select.select([file], [], [], DEADLINE_S)[0]
        text = file.read(SENTENCE_NBYTES) if over else b""
    ends = [_end(pid, now=bool(text) or not over) for pid in children]
    if not over:
        return f"groups were not made, left and renewed within {DEADLINE_S:g} s"
    if text:
        return text.decode(errors="replace").splitlines()[0]
    return "" if not any(ends) else "a process that tried it ended without a word"


def _end(pid: int, *, now: bool) -> int:
    """The status with which it has ended, or is made to."""
    if now:
        os.kill(pid, signal.SIGKILL)
    # no deadline: it is killed, or has closed the pipe with its last act
    return os.waitpid(pid, 0)[1]


def _fork(rank: int, ports: int, say: int) -> int:
    """A process for a rank; its number."""
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
        _child(rank, ports, say)
    return pid


def _child(rank: int, ports: int, say: int) -> NoReturn:
    code = 1
    try:
        torch.set_num_threads(1)
        store = torch_private.TCPStore(
            HOST, int(os.read(ports, 8)), None, False, timedelta(seconds=DEADLINE_S)
        )
        _try(rank, store)
        code = 0
    except Wrong as wrong:
        os.write(say, f"{wrong}\n".encode()[:SENTENCE_NBYTES])
    except BaseException as error:  # noqa: BLE001 - whatever it is, this torch does not do what it should
        os.write(say, f"{_raised(error)}\n".encode()[:SENTENCE_NBYTES])
    os._exit(code)


# ------------------------------------------------------------------------------------------ models


def _models(groups: ProcessGroups) -> list[_Kept]:
    """All that are tried, newly built."""
    flat, hybrid = (
        init_device_mesh("cpu", (SIZE,)),
        init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("r", "s")),
    )
    return [
        _Ddp(groups),
        _ComposedDdp(groups),
        _StaticDdp(groups),
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


class _Cut(Exception):
    """The end of a half-done iteration."""


class _Kept:
    """A model over a group. Rank 0 has no gradients and rank 1 twice its share: their mean is exact."""

    name = "a model"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._first = [parameter.detach().clone() for parameter in model.parameters()]

    def loss(self, rank: int) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.ones(2, 4)).sum() * 2.0 * rank
        return found

    def train(self, rank: int) -> None:
        """Train once, from the first parameters. Raises Wrong if they do not become what they should."""
        torch.autograd.backward(self.loss(rank))
        self.settle()
        _update(self.model)
        alone = _net()
        torch.autograd.backward(alone(torch.ones(2, 4)).sum())
        _update(alone)
        if _bits(self.whole()) != _bits(alone.parameters()):
            raise Wrong(f"{self.name} did not come to the bits that one process comes to")

    def settle(self) -> None:
        """Do what is done after a backward."""

    def whole(self) -> Iterator[torch.Tensor]:
        """Give the parameters as all ranks have them together."""
        return self.model.parameters()

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), self._first, strict=True):
                parameter.copy_(first)

    def begin(self, rank: int) -> None:
        """Begin an iteration that will not be ended, with the other rank."""

    def begin_alone(self) -> None:
        """Do what of it the other rank does not come to."""

    def give_up(self) -> None:
        """Give the iteration up, before the groups are renewed."""

    def layout(self) -> torch_ddp.Layout | None:
        """Give what a newcomer is to have the same."""
        return None

    def renew(self, layout: torch_ddp.Layout | None) -> None:
        """Go on, once the groups are renewed."""


class _Ddp(_Kept):
    """Cut off between forward and backward, with the old Reducer still alive."""

    name = "DDP"

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        model = self._made(_net())
        self._ddp: Any = torch_ddp.of(model)
        self._old: object = None
        super().__init__(model)

    def _made(self, net: nn.Sequential) -> nn.Module:
        # Several buckets, so that there is an order of them.
        return DistributedDataParallel(net, bucket_cap_mb=1e-4)

    def train(self, rank: int) -> None:
        before = self._groups.calls
        super().train(rank)
        if self._old is not None and self._groups.calls - before != len(torch_ddp.bucket_layout(self._ddp)):
            raise Wrong(f"{self.name} did not reduce each bucket once")

    def settle(self) -> None:
        torch_ddp.settle_buckets(self._ddp)

    def begin(self, rank: int) -> None:
        self.loss(rank)

    def give_up(self) -> None:
        """Something holds the old Reducer."""
        self._old = self._ddp.reducer

    def layout(self) -> torch_ddp.Layout | None:
        layout = torch_ddp.settled_layout(self._ddp)
        if layout is None or len(layout) < 2:
            raise Wrong(f"{self.name} did not lay its buckets out")
        return layout

    def renew(self, layout: torch_ddp.Layout | None) -> None:
        torch_ddp.renew(self._ddp, layout)


class _ComposedDdp(_Ddp):
    """One that torch makes in the first forward pass, if nobody does before."""

    name = "replicate's DDP"

    def _made(self, net: nn.Sequential) -> nn.Module:
        return replicate(net, bucket_cap_mb=1e-4)


class _StaticDdp(_Ddp):
    """A static graph, a parameter that nobody uses, a hook for reductions; cut off under no_sync()."""

    name = "DDP with a static graph"

    def _made(self, net: nn.Sequential) -> nn.Module:
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
        _Kept.train(self, rank)
        self.restore()
        _Kept.train(self, rank)
        if not self._reduced:
            raise Wrong(f"{self.name} reduced nothing by its hook")

    def whole(self) -> Iterator[torch.Tensor]:
        return (parameter for name, parameter in self._ddp.module.named_parameters() if name != "unused")

    def begin(self, rank: int) -> None:
        """Under no_sync(), which is not left."""
        self._unsynced = self._ddp.no_sync()
        self._unsynced.__enter__()
        self.loss(rank)

    def layout(self) -> torch_ddp.Layout | None:
        return torch_ddp.settled_layout(self._ddp)

    def renew(self, layout: torch_ddp.Layout | None) -> None:
        """Renew as any, while the memory of the old buckets is free."""
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


class _Fsdp(_Kept):
    """`begins` leaves an iteration half done on both ranks; then one of them gathers alone."""

    name = "FSDP2"

    def __init__(self, mesh: Any, begins: Callable[[Any], None]) -> None:
        model = _net()
        self._mesh = mesh
        self._begins = begins
        for part in (model[0], model[2], model):
            # Gloo of torch 2.8 takes a mean that is scattered for a sum.
            fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(True)
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
        """Train as any; and check that what comes of parameters is of the mesh that they are on."""
        del self._seen[:]
        handle = self.model.register_forward_hook(self._forward_over)
        super().train(rank)
        handle.remove()
        if not self._seen:
            raise Wrong("FSDP2 does not show when a backward begins")
        for parameter in self.model.parameters():
            for result in (parameter + parameter, parameter.detach(), parameter.sum()):
                if getattr(result, "device_mesh", None) is not self._mesh:
                    raise Wrong("results of DTensors are of a mesh that is gone")

    def _forward_over(self, *_words: object) -> None:
        inner: Any = self.model
        # Those of the root stay gathered for the backward pass, as torch has it.
        if any(not isinstance(parameter, DTensor) for parameter in inner[0].parameters()):
            raise Wrong("FSDP2 does not shard again behind a forward pass, as it did when it was built")

    def whole(self) -> Iterator[torch.Tensor]:
        return (parameter.full_tensor() for parameter in self.model.parameters())  # type: ignore[attr-defined]

    def begin(self, rank: int) -> None:
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
        if self._trained:
            super().train(rank)
        self._trained = True

    def begin(self, rank: int) -> None:
        """Nothing."""

    def renew(self, layout: torch_ddp.Layout | None) -> None:
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
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model.set_is_last_backward(False)
    torch.autograd.backward(kept.loss(1))


# ---------------------------------------------------------------------------------------- one rank


def _try(rank: int, store: torch_private.Store) -> None:
    _default_device()
    groups = ProcessGroups(timedelta(seconds=LEFT_S), host=HOST)
    groups.open(rank=rank, world_size=SIZE, generation=1, store=store)
    _sum("made")
    _from_anyone(rank)
    models = _models(groups)
    groups.mark()
    dist.new_group()  # it is not of the next generation
    for model in models:
        model.train(rank)
    for model in models:
        model.begin(rank)
    if rank:
        models = _come_anew(rank, groups, store)
    else:
        _survive(models, groups, store)
    _sum("renewed")
    _another()
    for model in models:
        model.restore()
        model.train(rank)
    # Nothing may hold up the end: the process ends without taking anything down.


def _survive(models: list[_Kept], groups: ProcessGroups, store: torch_private.Store) -> None:
    for model in models:
        model.begin_alone()
    _leave(groups)
    store.set("left", "1")
    for model in models:
        model.give_up()  # parameters must be shards again before anything else
    groups.configure(2, store)
    layouts = [model.layout() for model in models]
    store.set("layouts", json.dumps(layouts))
    for model, layout in zip(models, layouts, strict=True):
        model.renew(layout)


def _come_anew(rank: int, groups: ProcessGroups, store: torch_private.Store) -> list[_Kept]:
    """Come as a process that is started for another one: it builds before it has anybody."""
    groups.in_store(lambda store: torch_private.store_get(store, "left"))
    groups.reset()
    groups.open(rank=rank, world_size=SIZE, generation=2, store=None)
    models = _models(groups)
    groups.mark()
    groups.configure(2, store)
    layouts = json.loads(groups.in_store(lambda store: torch_private.store_get(store, "layouts")))
    for model, layout in zip(models, layouts, strict=True):
        model.renew(layout)
    return models


def _leave(groups: ProcessGroups) -> None:
    """Be in a collective to which nobody comes, until another thread says that it is over.

    Then leave a batch of collectives by an error.
    """
    timer = threading.Timer(0.05, groups.abort)
    began = time.monotonic()
    timer.start()
    try:
        dist.all_reduce(torch.ones(300_000))
    except GenerationEnded:
        pass
    else:
        raise Wrong("a collective ended well to which the other rank did not come")
    if time.monotonic() - began > LEFT_S / 2:
        raise Wrong(f"a collective was not left within {LEFT_S / 2:g} s")
    with contextlib.suppress(_Cut), dist._coalescing_manager():  # type: ignore[attr-defined]
        raise _Cut


def _sum(done: str) -> None:
    tensor = torch.full((1000,), dist.get_rank() + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    # no deadline: the group's own
    if work is None or not work.wait() or not bool((tensor == sum(range(1, SIZE + 1))).all()):
        raise Wrong(f"a group that was just {done} gave a wrong sum")
    if not work.is_completed():
        raise Wrong("a collective that is done does not say so")


def _from_anyone(rank: int) -> None:
    tensor = torch.zeros(1)
    if rank:
        dist.send(tensor + 7.0, 0)
        return
    # no deadline: the group's own
    if dist.recv(tensor) != 1 or tensor.item() != 7.0:
        raise Wrong("a message of anyone did not come, or of nobody knows whom")


def _another() -> None:
    """A later group, which a survivor and a newcomer make by the same name."""
    counts = torch.tensor([torch_private.group_count(), -torch_private.group_count()])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    if counts.sum().item():
        raise Wrong("a survivor and a newcomer number their groups otherwise")
    dist.all_reduce(torch.ones(1), group=dist.new_group())


def _default_device() -> None:
    """A backend where no address is given, whose peer does not come in time."""
    over = threading.Event()

    def connect() -> None:
        devices = torch_private.gloo_devices(None, [])
        try:
            torch_private.gloo_backend(
                torch_private.HashStore(), 0, SIZE, timeout=timedelta(seconds=0.1), devices=devices
            )
        except RuntimeError:
            over.set()

    threading.Thread(target=connect, daemon=True).start()
    if not over.wait(LEFT_S):
        raise Wrong("Gloo waits longer for others than it is told to")


if __name__ == "__main__":
    sys.exit(main())
