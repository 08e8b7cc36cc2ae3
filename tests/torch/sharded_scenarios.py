"""Training with FSDP2, HSDP and DDP that is left at a chosen place, and goes on with one rank replaced."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ckptless.pytorch_hooks.errors import CollectiveFailed, GenerationEnded
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.running.training import Run
from ckptless.pytorch_hooks.state import State, TensorSet
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp

from .stub_agent import HOST, Agent
from .world import Place

VICTIM = 1
MICRO = 2
Probe = Callable[[str], None]


class Block(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.up = nn.Linear(10, 14)
        self.norm = nn.LayerNorm(14)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(14, 10)
        self.tell = job.in_block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(x)
        if not torch.compiler.is_compiling():
            self.tell()  # a recomputation stops where it has all that it needs: not at the end
        moved: torch.Tensor = self.down(self.drop(torch.relu(self.norm(out))))
        return x + moved


class Net(nn.Module):
    """Widths that no number of ranks divides, so that some shards are padded and one is empty."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.into = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(Block(job) for _ in range(3))
        # Batch norm keeps its own dtype, which mixed precision does not know.
        self.norm: nn.Module = nn.LayerNorm(10) if job.kind == "mixed" else nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 5)
        self.checkpoint = job.kind in ("checkpoint", "ddp-checkpoint")
        self.probe = job.probe_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
            if number == 1:
                self.probe(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Job:
    """One rank's training; `probe(place)` is called at each place where it can be left."""

    def __init__(self, kind: str, rank: int, ranks: int) -> None:
        self.kind, self.rank, self.ranks = kind, rank, ranks
        self.probe: Probe = lambda _place: None
        self.phase, self.blocks = "none", 0
        self.losses: dict[int, str] = {}

    # -- what the model calls

    def in_block(self) -> None:
        self.blocks += 1
        if self.blocks == 2:
            self.probe(f"{self.phase}-block")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def probe_backward(self, x: torch.Tensor) -> None:
        self.probe(f"{self.phase}-middle")
        if x.requires_grad:
            hooked: Any = x
            hooked.register_hook(lambda _grad: self.probe(f"{self.phase}-grad"))

    # -- the state

    def build(self, seed: int) -> State:
        torch.manual_seed(seed)
        model: nn.Module = Net(self)
        optimizer_of: Any = torch.optim.AdamW
        if self.kind.startswith("ddp"):
            model = DistributedDataParallel(model, bucket_cap_mb=0.001 if self.kind == "ddp" else 25)
            if self.kind not in ("ddp", "ddp-checkpoint"):
                model = torch.compile(model, backend=self.kind.partition("-")[2])  # type: ignore[assignment]
        elif self.kind != "plain":
            model = self._shard(model)
        optimizer = optimizer_of(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        torch.manual_seed(1000 * seed + self.rank)  # dropout differs from rank to rank
        return State(model=model, optimizer=optimizer, scheduler=scheduler)

    def _shard(self, model: Any) -> nn.Module:
        if self.kind.startswith("hsdp"):
            mesh = init_device_mesh("cpu", (2, self.ranks // 2), mesh_dim_names=("copies", "shards"))
        else:
            mesh = init_device_mesh("cpu", (self.ranks,))
        options: dict[str, Any] = {"mesh": mesh}
        if self.kind == "kept":
            options["reshard_after_forward"] = False
        if self.kind == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for number, block in enumerate(model.blocks):
            if self.kind == "wrapped":
                model.blocks[number] = checkpoint_wrapper(block)
            elif self.kind.startswith("inside-"):
                block.compile(backend=self.kind.partition("-")[2])
            fully_shard(model.blocks[number], **options)
        fully_shard(model, **options)
        if self.kind.startswith("outside-"):
            return torch.compile(model, backend=self.kind.partition("-")[2])  # type: ignore[return-value]
        return model  # type: ignore[no-any-return]

    # -- a step

    def step(self, state: State, number: int) -> float:
        """One optimizer step of two micro-batches."""
        model = getattr(state.model, "_orig_mod", state.model)
        self.probe("idle")
        if self.probe_pending(model):
            self.probe("pending")
        total = 0.0
        for part in range(MICRO):
            last = part + 1 == MICRO
            source = torch.Generator().manual_seed(1000 * number + 10 * self.rank + part)
            with self._sync(model, last=last):
                self.phase, self.blocks = f"forward{part}", 0
                loss = state.model(torch.randn(8, 6, generator=source)).float().pow(2).mean()
                self.phase, self.blocks = f"backward{part}", 0
                self.probe(f"between{part}")
                loss.backward()
            total += float(loss.detach())
            self.probe(f"after{part}")
        if self.kind == "plain":  # reduces by itself
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        self.probe("clipped")
        state.optimizer.step()
        self.probe("torn")
        state.scheduler.step()
        # Gradients of zero are not the same as none: some optimizers move for them.
        state.optimizer.zero_grad(set_to_none=self.kind not in ("hsdp", "kept"))
        self.losses[number] = total.hex()
        return total

    def probe_pending(self, model: nn.Module) -> bool:
        """All but the victim begin to gather a block: a work that cannot end is left pending."""
        wanted = getattr(self.probe, "place", "") == "pending"
        if wanted and self.rank != VICTIM and isinstance(model, FSDPModule):
            blocks: Any = model.blocks
            blocks[1].unshard(async_op=True)
        return wanted

    @contextlib.contextmanager
    def _sync(self, model: Any, *, last: bool) -> Any:
        if self.kind == "plain":
            yield
        elif isinstance(model, DistributedDataParallel):
            with contextlib.nullcontext() if last else model.no_sync():
                yield
        elif self.kind == "hsdp-partial":
            model.set_requires_all_reduce(last)
            yield
        else:
            # Turned on again only for the last: whoever left before it must not stay without.
            if not last:
                model.set_requires_gradient_sync(False)
                model.set_is_last_backward(False)
            yield
            if not last:
                model.set_requires_gradient_sync(True)
                model.set_is_last_backward(True)


def digest(state: State) -> str:
    sha = hashlib.sha256()
    for name, tensor in TensorSet(state).named():
        sha.update(name.encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def stock(place: Place, kind: str, steps: int) -> dict[str, Any]:
    """The same training on stock Gloo without a fault, and without ckptless."""
    ranks = place.size - 1
    dist.init_process_group("gloo", store=place.store, rank=place.index, world_size=ranks)
    # The groups of the mesh get other names than later: caches that confuse the two meshes would show.
    for _ in range(3):
        dist.new_group([0])
    job = Job(kind, place.index, ranks)
    state = job.build(seed=7)
    for number in range(1, steps + 1):
        job.step(state, number)
    result = {"losses": list(job.losses.values()), "digest": digest(state)}
    # Torch forgets the groups. They stay for the reason that Place.leave tells.
    place.kept += [job, state]
    dist.destroy_process_group()
    return result


# ------------------------------------------------------------------------------------------ with faults


class Trap:
    """Ends the generation when the training comes to a place: on all ranks there, before any goes on."""

    def __init__(self, place: str, spot: Place, ranks: int, groups: ProcessGroups, generation: int) -> None:
        self.place = place
        self._spot, self._ranks, self._groups, self._generation = spot, ranks, groups, generation
        self.sprung = False

    def __call__(self, place: str) -> None:
        if place == self.place and not self.sprung:
            self.sprung = True
            self._spot.meet(f"trap{self._generation}", self._ranks)
            self._groups.abort()


class Rank:
    """A process that is, or is not, a rank: generation by generation."""

    def __init__(self, place: Place, kind: str, ranks: int) -> None:
        self.spot, self.kind, self.ranks = place, kind, ranks
        self.agent = Agent(place, ranks)
        self.seen: list[str] = []
        self.same = True
        self.ids: tuple[int, ...] = ()
        self.built = 0
        self.run: Run | None = None

    def enter(self, generation: int, rank: int, restore_step: int | None) -> State:
        if self.run is None:
            self.job = Job(self.kind, rank, self.ranks)
            self.groups = ProcessGroups(timedelta(seconds=20), host=HOST)
            self.run = Run(self.agent.session, self.groups)
        self.job.probe = lambda _place: None
        self.run.enter(self.agent.assigned(generation, rank, restore_step))
        state = self.run.keep(self._build)
        ids = identities(state)
        self.same &= (not self.ids or ids == self.ids) and as_built(state)
        self.ids = ids
        return state

    def _build(self) -> State:
        self.built += 1
        # Another seed than the first ranks had: all that is right in a newcomer was given to it.
        return self.job.build(seed=7 if self.spot.index < self.ranks and self.built == 1 else 8)

    def attempt(self, state: State, number: int, place: str, generation: int) -> None:
        """A step that is left at that place, or steps that are left anywhere."""
        if place == "anywhere":
            self.wander(state, number, generation)
            return
        trap = Trap(place, self.spot, self.ranks, self.groups, generation)
        self.job.probe = trap
        try:
            self.job.step(state, number)
            self.commit()
            raise RuntimeError(f"nothing came to {place}")
        except (GenerationEnded, CollectiveFailed) as error:
            self.seen.append(type(error).__name__ if trap.sprung else f"early {error}")
        self.groups.abort()

    def commit(self) -> None:
        assert self.run is not None
        self.run.commit()

    def wander(self, state: State, number: int, generation: int) -> None:
        """Steps on end, and an abort from another thread: on each rank at a moment of its own."""
        delay = 0.06 * random.Random(generation).random() + 0.004 * random.random()
        timer = threading.Timer(delay, self.groups.abort)
        timer.start()
        try:
            for each in range(number, number + 10_000):
                self.job.step(state, each)
        except (GenerationEnded, CollectiveFailed) as error:
            self.seen.append(type(error).__name__)
        timer.join()
        for each in [each for each in self.job.losses if each >= number]:
            del self.job.losses[each]  # never committed

    def leave(self) -> None:
        """This process is no rank any more."""
        self.groups.close()
        self.run, self.ids = None, ()


def identities(state: State) -> tuple[int, ...]:
    """Return who is who: model, optimizer, every module and parameter."""
    things: list[Any] = [state.model, state.optimizer, *state.model.modules(), *state.model.parameters()]
    return tuple(map(id, things))


def as_built(state: State) -> bool:
    """Whether what the steps turn between micro-batches is as `fully_shard` had it."""
    all_true = True
    for fsdp_state, _module in torch_fsdp.states(state.model.modules()):
        root, groups = torch_fsdp.switches(fsdp_state)
        all_true &= root["is_last_backward"] and all(all(group.values()) for group in groups)
    return all_true


def counts() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def settled(groups: ProcessGroups, start: tuple[int, int]) -> tuple[int, int]:
    """The same when old backends are gone and idle helper threads have left, or after a while."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = counts()
        if groups.sweep() == 0 and now[0] <= start[0] and now[1] <= start[1]:
            break
        time.sleep(0.1)
    return counts()


def faults(place: Place, kind: str, places: list[str]) -> dict[str, Any]:
    """For each place one committed step, then one left there; rank 1 moves to another process each time."""
    ranks = place.size - 1
    plain = stock(place, kind, len(places) + 2) if place.index < ranks else {}
    me = Rank(place, kind, ranks)
    losses: dict[int, str] = {}
    sizes: list[tuple[int, int]] = []
    state: State | None = None
    for number in range(len(places) + 1):
        holder = VICTIM if number % 2 == 0 else ranks
        if place.index in (VICTIM, ranks) and place.index != holder:
            continue
        rank = VICTIM if place.index == holder else place.index
        if number and place.index == holder:
            me.agent.take_over(f"rank{number}")
        generation = number + 1
        state = me.enter(generation, rank, number if number else None)
        for each in range(number + 1, number + (2 if number < len(places) else 3)):
            me.job.step(state, each)
            me.commit()
        losses |= me.job.losses
        sizes.append(counts())
        if number == 0:
            # Nobody leaves, and closes what is between us, before all have counted.
            place.meet("counted", ranks)
        if number == len(places):
            break
        me.attempt(state, number + 2, places[number], generation)
        if place.index == holder:
            me.agent.hand_over(f"rank{number + 1}", number + 1)
            me.leave()
            state = None
    result = {
        "plain": plain,
        "losses": {str(step): loss for step, loss in losses.items()},
        "digest": digest(state) if state is not None else None,
        "seen": me.seen,
        "same": me.same,
        "built": me.built,
        "start": sizes[0],
        "end": settled(me.groups, sizes[0]) if state is not None else sizes[0],
    }
    place.meet("end", place.size, deadline=60)
    if state is not None:
        me.leave()
    return result


# ------------------------------------------------------------------------------------------ the caches


def meshes_twice(_place: Place) -> dict[str, bool]:
    """An equal mesh made anew in the same process, under other groups: whether what comes of it is its."""
    found: dict[str, bool] = {}
    for generation, shape in enumerate(((4,), (2, 2), (4,)), start=1):
        groups = ProcessGroups(timedelta(seconds=5), host=HOST)
        groups.open(rank=1, world_size=4, generation=generation, store=None)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 8)).sum().backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        parameter: Any = next(model.parameters())
        parameter.full_tensor()
        results = (norm, parameter.grad, parameter.detach(), parameter + parameter, parameter.sum())
        found[str((generation, shape))] = all(result.device_mesh is mesh for result in results)
        groups.close()
    return found
