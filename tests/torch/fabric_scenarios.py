"""What the ranks do in the tests of process groups."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckptless.pytorch_hooks.errors import CollectiveFailed, GenerationEnded
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.process_groups.older.group import Group
from ckptless.pytorch_hooks.process_groups.stock import Within
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private.ddp import renew, settle_buckets, settled_layout

from .world import Place

HOST = "127.0.0.1"


def guard_optimizers(groups: ProcessGroups) -> RemovableHandle:
    """Have every optimizer's step ask first, as `Run` does."""

    def check(*_given: object) -> None:
        groups.check()

    return register_optimizer_step_pre_hook(check)


def new_groups(timeout: float = 20.0, on_broken: Callable[[str], None] | None = None) -> ProcessGroups:
    return ProcessGroups(timedelta(seconds=timeout), host=HOST, on_broken=on_broken)


def later(seconds: float, call: Callable[[], None]) -> list[float]:
    """Call it in another thread after that time; the list gets the moment at which it was called."""
    moment: list[float] = []

    def go() -> None:
        time.sleep(seconds)
        moment.append(time.monotonic())
        call()

    threading.Thread(target=go, daemon=True).start()
    return moment


def outcome(call: Callable[[], object]) -> str:
    """The name of what it raised, or "ok"."""
    try:
        call()
    except (Exception, GenerationEnded) as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__
    return "ok"


# ------------------------------------------------------------------------------------------- one abort


def stopped_peer(place: Place) -> dict[str, Any]:
    """The last rank is stopped; the others are blocked by it in an all_reduce, and leave."""
    broken: list[str] = []
    groups = new_groups(on_broken=broken.append)
    groups.open(rank=place.index, world_size=place.size, generation=1, store=place.store)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    first = float(tensor[0])
    place.meet("ready", place.size)
    if place.index == place.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)
    flying = dist.all_reduce(torch.ones(10), async_op=True)
    moment = later(0.2, groups.abort)
    blocked = outcome(lambda: dist.all_reduce(torch.ones(300_000)))
    waited = time.monotonic() - moment[0]
    start = time.monotonic()
    groups.abort()
    again = time.monotonic() - start
    ones = torch.ones(place.size)
    start = time.monotonic()
    after = {
        "all_reduce": outcome(lambda: dist.all_reduce(ones)),
        "barrier": outcome(dist.barrier),
        "send": outcome(lambda: dist.send(ones, 1 - place.index)),
        "gather": outcome(lambda: dist.all_gather([torch.ones(1)] * place.size, torch.ones(1))),
        "object": outcome(lambda: dist.broadcast_object_list([1])),
        "check": outcome(groups.check),
        "flying": outcome(flying.wait) if flying is not None else "none",
    }
    late = time.monotonic() - start
    start = time.monotonic()
    groups.close()
    return {
        "first": first,
        "blocked": blocked,
        "waited": waited,
        "again": again,
        "after": after,
        "late": late,
        "broken": broken,
        "close": time.monotonic() - start,
    }


def killed_peer(place: Place) -> dict[str, Any]:
    """The last rank dies; the others see it before anybody says so."""
    broken: list[str] = []
    groups = new_groups(on_broken=broken.append)
    groups.open(rank=place.index, world_size=place.size, generation=1, store=place.store)
    dist.barrier()
    if place.index == place.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = outcome(lambda: [dist.all_reduce(torch.ones(1000)) for _ in range(10_000)])
    before = [outcome(groups.check), outcome(dist.barrier), groups.broken is not None, groups.aborted]
    groups.abort()
    after = [outcome(groups.check), outcome(dist.barrier), groups.aborted]
    calls = len(broken)
    # The same process and objects, in a smaller world: everything is destroyed and opened again.
    groups.reset()
    groups.open(rank=place.index, world_size=place.size - 1, generation=2, store=place.store)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    groups.close()
    return {"seen": seen, "before": before, "after": after, "calls": calls, "again": float(tensor)}


def nobody_comes(place: Place) -> dict[str, Any]:
    """A configure whose peer never comes: left by an abort, and by the timeout."""
    groups = new_groups(timeout=1.5)
    groups.abort()  # nothing is open yet
    groups.open(rank=0, world_size=2, generation=0, store=None)
    moment = later(0.3, groups.abort)
    aborted = outcome(lambda: groups.configure(1, place.store))
    waited = time.monotonic() - moment[0]
    start = time.monotonic()
    place.store.set("still", "usable")
    stuck = time.monotonic() - start
    groups.abort(3)
    early = [outcome(lambda: groups.configure(3, place.store))]
    groups.abort(2)  # a late one, which changes nothing
    start = time.monotonic()
    failed = outcome(lambda: groups.configure(4, place.store))
    timed = time.monotonic() - start
    text = groups.broken
    time.sleep(0.2)
    threads = counts()[1]
    groups.close()
    return {
        "aborted": aborted,
        "waited": waited,
        "stuck": stuck,
        "early": early,
        "failed": failed,
        "timed": timed,
        "text": text,
        "threads": threads,
    }


def late_builder(place: Place) -> dict[str, Any]:
    """A thread that was left while it connected comes out of it when the next generation is connected."""
    groups = new_groups()
    groups.open(rank=place.index, world_size=2, generation=0, store=None)
    stock, leaving, left = torch_private.gloo_backend, threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        leaving.wait(20.0)
        left.set()
        return made

    torch_private.gloo_backend = slow
    later(0.5, groups.abort)
    entered = outcome(lambda: groups.configure(1, place.store))
    torch_private.gloo_backend = stock
    groups.configure(2, place.store)
    leaving.set()
    left.wait(20.0)
    old = [one.scope for one in groups._teardown._left]
    place.meet("left", 2)
    sums = []
    for _ in range(20):  # it has still to come from there to its end
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sums.append(float(tensor))
        time.sleep(0.01)
    groups.close()
    return {"entered": entered, "sums": sums, "old": len(old)}


def guarded(_place: Place) -> dict[str, Any]:
    """No optimizer moves a parameter of an ended generation."""
    groups = new_groups()
    groups.open(rank=0, world_size=2, generation=0, store=None)
    handle = guard_optimizers(groups)
    parameter = nn.Parameter(torch.ones(3))
    optimizers = [kind([parameter], lr=0.5) for kind in (torch.optim.SGD, torch.optim.AdamW)]
    parameter.grad = torch.ones(3)
    fine = [outcome(optimizer.step) for optimizer in optimizers]
    values = parameter.tolist()
    groups.abort()
    refused = [outcome(optimizer.step) for optimizer in optimizers]
    kept = parameter.tolist() == values
    handle.remove()
    free = outcome(optimizers[0].step)
    groups.close()
    return {"fine": fine, "refused": refused, "kept": kept, "free": free}


# ------------------------------------------------------------------------------------------ more groups


def many_groups(place: Place) -> dict[str, Any]:
    """Groups of all kinds go through `ProcessGroups`, and come along into the next generation."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    groups = new_groups()
    groups.open(rank=place.index, world_size=place.size, generation=1, store=place.store)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups.mark()
    losses: list[str] = []

    def step(number: int) -> None:
        torch.manual_seed(100 * number + place.index)
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())

    step(0)
    again: list[float] = []
    for generation in (2, 3):
        extra = dist.new_group([0, 1])  # made on every entry, as a training function would
        if place.index < 2:
            dist.all_reduce(torch.ones(1), group=extra)
            received = torch.zeros(1)
            if place.index == 0:
                dist.send(torch.tensor([7.0]), 1, group=extra)
            else:
                dist.recv(received, 0, group=extra)
        world: Any = dist.group.WORLD
        world.monitored_barrier()
        place.meet(f"leave{generation}", place.size)
        groups.abort()
        place.meet(f"left{generation}", place.size)
        groups.configure(generation, place.store)
        step(generation)
        gathered: list[Any] = [None] * place.size
        dist.all_gather_object(gathered, place.index)
        again.append(float(sum(gathered)))
    names = sorted(member.name for member in groups._members.values())
    timeouts = {member.timeout.total_seconds() for member in groups._members.values()}
    place.meet("end", place.size)
    groups.close()
    return {"losses": losses, "again": again, "names": len(names), "timeouts": list(timeouts)}


# ------------------------------------------------------------------------------------- bitwise recovery


class Net(nn.Module):
    """Small, with several buckets' worth of layers; what is odd about it is chosen by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(24, 48)
        self.norm: nn.Module = nn.BatchNorm1d(48) if kind == "batchnorm" else nn.Identity()
        self.middle = nn.Linear(48, 48)
        self.last = nn.Linear(48, 8)
        self.spare = nn.Linear(4, 4) if kind == "unused" else nn.Identity()
        if kind == "frozen":
            for parameter in self.middle.parameters():
                parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The last layer is used first, so that the final bucket layout is not the one that DDP begins with.
        bias = self.last.bias.sum()
        out: torch.Tensor = self.last(torch.relu(self.middle(torch.relu(self.norm(self.first(x))))) + bias)
        return out


class Job:
    """A training job of one rank that can be rolled back to its last committed step."""

    def __init__(self, rank: int, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rank, self.kind, self.step = rank, kind, 0
        self.ddp = DistributedDataParallel(
            Net(kind),
            bucket_cap_mb=0.005,
            gradient_as_bucket_view=kind == "view",
            static_graph=kind == "static",
            find_unused_parameters=kind == "unused",
        )
        moving = [parameter for parameter in self.ddp.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(moving, lr=0.01)
        self.losses: dict[int, str] = {}

    def train(self) -> None:
        parts = 2 if self.kind == "no_sync" else 1
        total = 0.0
        for part in range(parts):
            source = torch.Generator().manual_seed(1000 * self.step + 10 * self.rank + part)
            quiet = self.ddp.no_sync() if part + 1 < parts else contextlib.nullcontext()
            with quiet:
                loss = self.ddp(torch.randn(16, 24, generator=source)).pow(2).mean()
                loss.backward()
            total += float(loss.detach())
        settle_buckets(self.ddp)
        nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[self.step] = total.hex()
        self.step += 1

    def record(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": copy.deepcopy(self.ddp.module.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "layout": settled_layout(self.ddp),
        }

    def restore(self, record: dict[str, Any]) -> None:
        self.step = record["step"]
        self.ddp.module.load_state_dict(record["model"])
        self.optimizer.load_state_dict(copy.deepcopy(record["optimizer"]))
        renew(self.ddp, record["layout"])

    def digest(self) -> str:
        sha = hashlib.sha256()
        for value in self.ddp.module.state_dict().values():
            sha.update(value.numpy().tobytes())
        return sha.hexdigest()


def undisturbed(place: Place, kind: str, generation: int, steps: int) -> dict[str, Any]:
    groups = new_groups()
    groups.open(rank=place.index, world_size=3, generation=generation, store=place.store)
    # Stock behaviour is the measure: no settle_buckets in it other than DDP's own.
    job = Job(place.index, kind)
    for _ in range(steps):
        job.train()
    groups.reset()
    return {"losses": list(job.losses.values()), "digest": job.digest()}


def disturbed(place: Place, kind: str, generation: int, steps: int, at: int) -> dict[str, Any]:
    """Rank 1 goes at a step; process 3 takes its place, having built everything among fakes."""
    groups = new_groups()
    newcomer = place.index == 3
    rank = 1 if newcomer else place.index
    store = None if newcomer else place.store
    groups.open(rank=rank, world_size=3, generation=generation, store=store)
    guard = guard_optimizers(groups)
    job = Job(rank, kind, seed=place.index)
    seen = ""
    if newcomer:
        job.train()  # a warm-up with nobody else there
        job.losses.clear()
        record: dict[str, Any] = {}
    else:
        record = job.record()
        while job.step < at:
            job.train()
            record = job.record()
        if place.index == 1:
            groups.abort()
            groups.reset()
            guard.remove()
            return {}
        seen = outcome(job.train)
        groups.abort()
    place.meet(f"out{generation}", 3)
    groups.configure(generation + 1, place.store)
    box = [record]
    dist.broadcast_object_list(box, src=0)
    job.restore(box[0])
    while job.step < steps:
        job.train()
    groups.reset()
    guard.remove()
    return {"losses": [job.losses.get(i) for i in range(steps)], "digest": job.digest(), "seen": seen}


def bitwise(place: Place, kinds: list[str], steps: int, at: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for number, kind in enumerate(kinds):
        base = 10 * number + 1
        plain = undisturbed(place, kind, base, steps) if place.index < 3 else {}
        place.meet(f"plain{number}", 4)
        results[kind] = [plain, disturbed(place, kind, base + 3, steps, at)]
        place.meet(f"kind{number}", 4)
    return results


def stock(place: Place, kinds: list[str], steps: int) -> dict[str, Any]:
    """The same training on stock Gloo, with DDP's own rebuild."""
    dist.init_process_group("gloo", store=place.store, rank=place.index, world_size=place.size)
    results: dict[str, Any] = {}
    for kind in kinds:
        job = Job(place.index, kind)
        for _ in range(steps):
            job.train()
        results[kind] = {"losses": list(job.losses.values()), "digest": job.digest()}
    place.leave(job)
    return results


# -------------------------------------------------------------------------------------------- contract


def _polled(group: dist.ProcessGroup) -> list[Any]:
    """Return what a work says of itself, as soon as it says that it is done."""
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    until = time.monotonic() + 10.0
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.001)
    return [work.is_completed(), work.is_success(), [tensor.tolist() for tensor in work.result()]]


def _from_anyone(rank: int, group: dist.ProcessGroup) -> int:
    """Return whom a message is from that was waited for from anybody."""
    if rank:
        dist.send(torch.ones(1), 0, group=group)
        return 0
    return dist.recv(torch.zeros(1), group=group)


def contract(place: Place, way: str) -> dict[str, Any]:
    """Open, leave, renew and close, by one way; the last process comes new after the first has been left."""
    newcomer = place.index == place.size - 1
    rank, size = (1 if newcomer else place.index), place.size - 1
    groups = new_groups()
    groups._exchange = Within if way == "stock" else Group
    groups._exchange.prepare()
    store = None if newcomer else place.store
    groups.open(rank=rank, world_size=size, generation=1 + newcomer, store=store)
    other = dist.new_group([0, 1], timeout=timedelta(seconds=15))
    assert isinstance(other, dist.ProcessGroup)
    groups.mark()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=other)
    first = tensor.tolist()
    asked = _polled(other)
    left = ""
    if not newcomer:
        place.meet("made", size)
        if rank == 1:
            # It comes to nothing, and another process takes its rank.
            place.meet("left", size)
            groups.close()
            place.meet("end", place.size)
            return {"first": first}
        alone = dist.all_reduce(torch.ones(3), group=other, async_op=True)
        asked += [alone.is_completed(), alone.is_success()]
        later(0.1, lambda: groups.abort(1))
        left = outcome(lambda: dist.all_reduce(torch.ones(300_000), group=other))
        asked += [alone.is_completed(), alone.is_success(), type(alone.exception()).__name__]
        place.meet("left", size)
    groups.configure(2, place.store)
    again = []
    for group in (dist.group.WORLD, other):
        tensor = torch.full((3,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        again.append(tensor.tolist())
    assert outcome(lambda: dist.barrier(other)) == "ok"
    got = torch.zeros(2)
    mine = torch.full((2,), float(rank))
    sides = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(sides):
        work.wait()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, f"rank {rank}")
    found = {
        "first": first,
        "left": left,
        "asked": asked,
        "last": _polled(other),
        "from": _from_anyone(rank, other),
        "again": again,
        "got": got.tolist(),
        "everyone": everyone,
        "backend": dist.get_backend(other),
        "stock": type(other) is dist.ProcessGroup,
        "calls": groups.calls,
        "members": len(groups._members),
    }
    place.meet("renewed", size)
    groups.close()
    found["closed"] = dist.is_initialized()
    place.meet("end", place.size)
    return found


# ---------------------------------------------------------------------------------------------- stress


def counts() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


@contextlib.contextmanager
def aborting(groups: ProcessGroups, delay: float) -> Iterator[list[float]]:
    """Abort from another thread after that time; the list gets when, and how long the call took."""
    moment: list[float] = []

    def go() -> None:
        time.sleep(delay)
        moment.append(time.monotonic())
        groups.abort()
        moment.append(time.monotonic() - moment[0])

    thread = threading.Thread(target=go)
    thread.start()
    yield moment
    thread.join()


def stress(place: Place, aborts: int) -> dict[str, Any]:
    """Training, and aborts at random moments with one rank hanging, each followed by a new generation."""
    groups = new_groups(timeout=4.0)
    groups.open(rank=place.index, world_size=place.size, generation=1, store=place.store)
    guard = guard_optimizers(groups)
    job = Job(place.index, "plain")
    job.train()
    record = job.record()
    start: tuple[int, int] = (0, 0)
    waits: list[float] = []
    calls: list[float] = []
    joins: list[float] = []
    names: set[str] = set()
    for generation in range(2, aborts + 2):
        delay = 0.005 + 0.08 * random.Random(generation).random() + 0.004 * random.random()
        hangs = generation % 4 == place.index
        with aborting(groups, delay) as moment:
            try:
                for number in range(10_000):
                    if hangs and number == 2:
                        time.sleep(0.1)
                    job.train()
            except (CollectiveFailed, GenerationEnded) as error:
                names.add(type(error).__name__)
                waited = time.monotonic()
        groups.abort()
        if not hangs:
            waits.append(max(0.0, waited - moment[0]))
        calls.append(moment[1])
        place.meet(f"out{generation}", place.size)
        began = time.monotonic()
        groups.configure(generation, place.store)
        joins.append(time.monotonic() - began)
        # Since torch 2.14 a rank can be through while another still connects, which its abort would break.
        place.meet(f"in{generation}", place.size)
        job.restore(record)
        if generation == 2:
            start = counts()
    for _ in range(3):
        job.train()
    losses = list(job.losses.values())[-3:]
    mine = job.digest()
    everyone: list[Any] = [None] * place.size
    dist.all_gather_object(everyone, mine)
    deadline = time.monotonic() + 12
    while groups.sweep() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(5.5)  # helper threads that are idle leave after 5 s
    end = counts()
    guard.remove()
    place.meet("end", place.size)
    groups.close()
    return {
        "waits": waits,
        "calls": calls,
        "joins": joins,
        "names": sorted(names),
        "start": start,
        "end": end,
        "losses": losses,
        "same": len(set(everyone)) == 1,
    }


def cost(place: Place, rounds: int) -> dict[str, float]:
    """Microseconds of a small all_reduce, stock and through `ProcessGroups`."""
    results: dict[str, float] = {}
    tensor = torch.ones(4)
    groups = new_groups()
    for name in ("stock", "groups"):
        if name == "stock":
            dist.init_process_group("gloo", store=place.store, rank=place.index, world_size=place.size)
        else:
            groups.open(rank=place.index, world_size=place.size, generation=1, store=place.store)
        for number in range(rounds + 50):
            if number == 50:
                start = time.perf_counter()
            dist.all_reduce(tensor)
        results[name] = 1e6 * (time.perf_counter() - start) / rounds
        place.meet(name, place.size)
        if name == "stock":
            dist.destroy_process_group()
    groups.close()
    return results
