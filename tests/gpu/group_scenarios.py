"""What ranks do in the tests of process groups on a device: `group_scenarios.py SCENARIO PLANT`.

Each scenario's process is one rank of two; it prints what it has found as a line of JSON. `PLANT` names a
mistake that is made in the product first ("-" for none).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.gpu import kind

device: Any = kind.install()

import torch  # noqa: E402  # the device comes first
import torch.distributed as dist  # noqa: E402

from ckptless.daemon.protocol import messages as m  # noqa: E402
from ckptless.pytorch_hooks.commit.versions import Versions  # noqa: E402
from ckptless.pytorch_hooks.devices.arrival import Arrival  # noqa: E402
from ckptless.pytorch_hooks.errors import CollectiveFailed, DeviceLost, GenerationEnded  # noqa: E402
from ckptless.pytorch_hooks.process_groups import device_backends, exchange  # noqa: E402
from ckptless.pytorch_hooks.process_groups.device_backends import Devices  # noqa: E402
from ckptless.pytorch_hooks.process_groups.groups import (  # noqa: E402
    DeferredTeardown,
    ProcessGroups,
    _check_graph,
)
from ckptless.pytorch_hooks.process_groups.work import AbortableWork, Scope  # noqa: E402
from ckptless.pytorch_hooks.state import State, TensorSet  # noqa: E402
from ckptless.pytorch_hooks.torch_private import calls as torch_private  # noqa: E402
from ckptless.pytorch_hooks.torch_private import graphs, reads  # noqa: E402
from tests.torch.fabric_scenarios import outcome  # noqa: E402
from tests.torch.world import Place  # noqa: E402

SIZE = 2
MANY = 1 << 16
SLOW_S = 0.3
DEADLINE_S = 60.0
# Generations of one scenario.
HAMMERED = int(os.environ.get("HAMMERED", "5"))
# A communicator has dozens.
FEW_FDS = 8
DEVICE = kind.name()
BACKEND = {"cuda": "nccl", "simdev": "simccl"}[DEVICE]


def put(owner: Any, name: str, value: Any) -> None:
    """Have `owner.name` be something else."""
    setattr(owner, name, value)


class Rank:
    """One of two processes with process groups, and a store between them."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.place = Place(self.rank, SIZE, int(os.environ["MASTER_PORT"]))
        self.store = self.place.store
        self.groups = ProcessGroups(timedelta(seconds=DEADLINE_S), host="127.0.0.1")

    def open(self) -> None:
        self.groups.open(rank=self.rank, world_size=SIZE, generation=1, store=self.store)
        dist.all_reduce(torch.ones(1, device=DEVICE))
        device.synchronize()
        with self.groups.ours():
            pass  # what follows is the script's

    def meet(self, name: str) -> None:
        """Wait until both have come here."""
        self.place.meet(name, SIZE, DEADLINE_S)

    def late(self) -> None:
        """The second rank comes to the next collective later."""
        if self.rank:
            time.sleep(SLOW_S)


# --------------------------------------------------------------------------------------------- scenarios


def ordered(rank: Rank) -> dict[str, Any]:
    """A collective that is waited for is before what follows; no thread is blocked, `then` runs in order."""
    rank.open()
    tensor = torch.ones(MANY, device=DEVICE)
    # A kernel's first launch in a process takes long.
    (tensor * 2, tensor * 3)
    rank.meet("ready")
    rank.late()
    began, waits = time.monotonic(), kind.waits()
    work: Any = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    done_at_once = work.get_future().done()
    work.wait()
    tripled = tensor * 3
    enqueued_s, waited = time.monotonic() - began, kind.waits() - waits
    return {
        "done at once": done_at_once,
        "blocked": enqueued_s > SLOW_S / 2,
        "waited": waited,
        "then": doubled.wait()[0].item(),
        "after": tripled[0].item(),
    }


def left(rank: Rank) -> dict[str, Any]:
    """The second rank never comes. The first one reads a number, is freed, gets none, and is at rest."""
    rank.open()
    tensor = torch.ones(MANY, device=DEVICE)
    rank.meet("ready")
    if rank.rank:
        rank.store.wait(["over"], timedelta(seconds=DEADLINE_S))
        return {}
    flying: Any = dist.all_reduce(tensor, async_op=True)
    other = torch.ones(4, device=DEVICE)
    dist.all_reduce(other)
    began = time.monotonic()
    threading.Timer(SLOW_S, rank.groups.abort).start()
    read = outcome(lambda: float(other[0]))
    took_s = time.monotonic() - began
    after = {
        "all_reduce": outcome(lambda: dist.all_reduce(other)),
        "check": outcome(rank.groups.check),
        "item": outcome(other[0].item),
        "print": outcome(lambda: str(other)),
        "save": outcome(lambda: torch.save(other, os.devnull)),
    }
    rank.store.set("over", "1")
    del flying
    return {"read": read, "in time": took_s < DEADLINE_S / 2, **after}


def idle(rank: Rank) -> dict[str, Any]:
    """Tensors that are written once the device is idle stay so, also where an abort takes long."""
    real = Devices.abort

    def slow(devices: Devices) -> None:
        time.sleep(SLOW_S)
        real(devices)

    # Before a generation is entered: it keeps what it will call.
    put(Devices, "abort", slow)
    rank.open()
    tensor = torch.ones(MANY, device=DEVICE)
    rank.meet("ready")
    if rank.rank:
        rank.store.wait(["over"], timedelta(seconds=DEADLINE_S))
        return {}
    flying: Any = dist.all_reduce(tensor, async_op=True)
    rank.groups.abort()
    rank.groups.wait_idle(DEADLINE_S)
    tensor.fill_(7.0)
    time.sleep(2 * SLOW_S)
    device.synchronize()
    rank.store.set("over", "1")
    del flying
    return {"written": sorted({*tensor.cpu().tolist()})}


class Session:
    """An agent's part, as far as versions need it."""

    def __init__(self) -> None:
        from types import SimpleNamespace

        self.welcome = SimpleNamespace(job="job", run="0" * 32)
        self.sent: list[int] = []
        self.memory = -1

    def allocate(self, _generation: int, slot_nbytes: int, slots: int) -> tuple[Any, int]:
        """Give memory."""
        from types import SimpleNamespace

        self.memory = os.memfd_create("ckptless-test")
        os.ftruncate(self.memory, slot_nbytes * slots)
        return SimpleNamespace(region=1), os.dup(self.memory)

    def send(self, commit: Any) -> None:
        """Take a commit; with `seen` the number that its payload begins with."""
        payload = os.pread(self.memory, commit.tensors.nbytes, commit.tensors.offset)
        self.sent.append(commit.step)
        self.payload = payload


def commits(rank: Rank) -> tuple[torch.nn.Linear, Session, Versions, TensorSet]:
    """Return a model on the device, and all that its steps are committed with."""
    model = torch.nn.Linear(64, 64).to(DEVICE)
    session = Session()
    versions = Versions(session, lasts=rank.groups.lasts)  # type: ignore[arg-type]
    return model, session, versions, TensorSet(State(model=model))


def commit(versions: Versions, tensors: TensorSet, step: int) -> None:
    """Begin a commit of generation 1."""
    told = m.Commit(generation=1, step=step, record=b"", digest="", tensors=None, loss=None)
    versions.send(told, versions.write(tensors, step, 1, 0, 0))


def sealed(rank: Rank) -> dict[str, Any]:
    """A step whose gradients never came is not committed, whatever the device has made of it since."""
    rank.open()
    model, session, versions, tensors = commits(rank)
    commit(versions, tensors, 1)
    versions.wait()
    rank.meet("ready")
    if rank.rank == 0:
        dist.all_reduce(model.weight.data)
        commit(versions, tensors, 2)
        threading.Timer(SLOW_S, rank.groups.abort).start()
        versions.wait()
        rank.store.set("over", "1")
    else:
        rank.store.wait(["over"], timedelta(seconds=DEADLINE_S))
    rank.groups.abort()
    rank.groups.wait_idle(DEADLINE_S)
    versions.close()
    return {"sent": session.sent}


def copied(rank: Rank) -> dict[str, Any]:
    """A version is digested, and sealed, once its bytes have come from the device."""
    from ckptless.daemon.protocol import version

    rank.open()
    _model, session, versions, tensors = commits(rank)
    wanted = torch.zeros(tensors.layout.nbytes, dtype=torch.uint8).pin_memory()
    tensors.queue(wanted)
    device.synchronize()
    with kind.held():
        commit(versions, tensors, 1)
        time.sleep(SLOW_S)
        early = bool(session.sent)
    versions.wait()
    device.synchronize()
    data = memoryview(session.payload)
    header = version.decode(data)
    same = bytes(data[header.header_nbytes :]) == bytes(wanted.numpy())
    versions.close()
    return {"early": early, "same": same}


def ring(rank: Rank) -> dict[str, Any]:
    """Both send to each other first, in a batch: more than any buffer between them holds."""
    rank.open()
    out = torch.full((MANY * 64,), float(rank.rank + 1), device=DEVICE)
    back = torch.zeros_like(out)
    other = 1 - rank.rank
    ops = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, back, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return {"got": sorted({*back.cpu().tolist()})}


def told(work: Any) -> tuple[object, ...]:
    """Return what a work says of itself; torch's own works say neither whether they are well nor why not."""
    if torch_private.takes_backends():
        return work.is_completed(), work.is_success(), work.exception()
    return work.is_completed(), work.is_completed(), None


def answers(rank: Rank) -> dict[str, Any]:
    """A work says what the device says of it, and orders a stream behind itself without a wait, too."""
    rank.open()
    tensor = torch.ones(MANY, device=DEVICE)
    rank.meet("ready")
    found = {}
    for way in ("synchronize", "block_current_stream"):
        rank.meet(way)
        rank.late()
        work: Any = dist.all_reduce(tensor, async_op=True)
        before = told(work)
        getattr(work, way)()
        tripled = tensor * 3
        device.synchronize()
        after = told(work)
        found[way] = [rank.rank == 1 or before, after, tripled[0].item(), [len(one) for one in work.result()]]
    return found


def batch(device_type: str, other: int) -> list[Any]:
    """Exchange a message with the other rank in a batch."""
    out = torch.full((4,), float(dist.get_rank() + 1), device=device_type)
    back = torch.zeros_like(out)
    ops = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, back, other)]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    device.synchronize()
    return [back[0].item(), all(work.is_completed() for work in works)]


def coalesced(where: torch.device | None, *, async_ops: bool) -> list[float]:
    """Collectives as one: by torch's own note of them (no device is named) and by the device."""
    mine = [torch.full((2,), float(dist.get_rank() + i), device=DEVICE) for i in (1, 2)]
    all_of_them = [torch.zeros(4, device=DEVICE) for _ in mine]
    parts = [torch.zeros(2, device=DEVICE) for _ in mine]
    coalesce = dist._coalescing_manager  # type: ignore[attr-defined]
    for outputs, inputs, call in (
        (all_of_them, mine, dist.all_gather_into_tensor),
        (parts, all_of_them, dist.reduce_scatter_tensor),
    ):
        with coalesce(device=where, async_ops=async_ops) as both:
            for output, given in zip(outputs, inputs, strict=True):
                call(output, given)
        if async_ops:
            both.wait()
    with coalesce(device=where, async_ops=async_ops) as both:
        for part in parts:
            dist.all_reduce(part)
    if async_ops:
        both.wait()
    return [part[0].item() for part in parts]


def forwarded(rank: Rank) -> dict[str, Any]:
    """What scripts ask of torch's groups on a device, they may ask of these."""
    rank.open()
    here = torch.device(DEVICE, torch.get_device_module(DEVICE).current_device())
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 1], device_id=here)]
    sums = []
    for pair in pairs:
        tensor = torch.ones(2, device=DEVICE)
        dist.all_reduce(tensor, group=pair)
        dist.barrier(group=pair)
        dist.barrier(group=pair, device_ids=[here.index])
        sums.append(tensor[0].item())
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, torch.full((2,), float(rank.rank), device=DEVICE))
    shown: list[Any] = [torch.full((2,), 5.0, device=DEVICE) if rank.rank == 0 else None]
    dist.broadcast_object_list(shown, src=0, device=here)
    return {
        "backends": [dist.get_backend(pair) == BACKEND for pair in (None, *pairs)],
        "config": dist.get_backend_config() == f"cpu:gloo,{DEVICE}:{BACKEND}",
        "sums": sums,
        "objects": [[one.device == here, one[0].item()] for one in (*objects, *shown)],
        "coalesced": [coalesced(at, async_ops=later) for at in (None, here) for later in (False, True)],
        "batches": [batch(at, 1 - rank.rank) for at in ("cpu", DEVICE)],
    }


def sentence(call: Any) -> str:
    """Return what a call raises: the class, and the beginning of one sentence."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test knows it
        text = str(error).splitlines()[0]
        return f"{type(error).__name__}: {' '.join(text.split()[:6])}"
    return "nothing"


def refused(rank: Rank) -> dict[str, Any]:
    """What no group of ours can give is refused at once, and the groups go on."""
    import torch.distributed._symmetric_memory as symmetric

    rank.open()
    here = torch.device(DEVICE, 0)
    world: Any = dist.group.WORLD
    found = {
        "init": sentence(lambda: dist.init_process_group("mpi", device_id=here)),
        "again": sentence(rank.open),
        "split": sentence(lambda: dist.split_group(world, [[0, 1]])).partition(":")[0],
        "ucc": sentence(lambda: dist.new_group(backend="ucc")),
        "store": sentence(lambda: dist.distributed_c10d._get_default_store().get("key")),
        "enable": sentence(lambda: symmetric.enable_symm_mem_for_group(world.group_name)),
        "empty": sentence(lambda: symmetric.empty(4, device=here)),
        "rendezvous": sentence(lambda: symmetric.rendezvous(torch.ones(4, device=DEVICE), world)),
    }
    tensor = torch.ones(2, device=DEVICE)
    dist.all_reduce(tensor)
    return {**found, "after": tensor[0].item()}


def cut(rank: Rank) -> dict[str, Any]:
    """A batch that the end of a generation cuts off leaves nothing behind in its group, or ends the process.

    NCCL knows in each thread whether a batch is open, and queues nothing as long as one is.
    """
    rank.open()
    tensor = torch.ones(2, device=DEVICE)

    def left(where: torch.device | None) -> None:
        with dist._coalescing_manager(device=where):  # type: ignore[attr-defined]
            if where is None:
                dist.all_reduce(tensor)
            else:
                dist.isend(tensor, 1 - rank.rank)
            rank.groups.abort()
            tensor[0].item()

    rank.meet("ready")
    raised = [outcome(lambda: left(None))]
    rank.meet("left")
    rank.groups.wait_idle(DEADLINE_S)
    rank.groups.configure(2, rank.store)
    raised.append(outcome(lambda: batch(DEVICE, 1 - rank.rank)))
    after = torch.ones(2, device=DEVICE)
    dist.all_reduce(after)
    found = after[0].item()
    with rank.groups.ours():
        pass
    rank.meet("again")
    raised.append(outcome(lambda: left(torch.device(DEVICE, 0))))
    rank.meet("left again")
    rank.groups.wait_idle(DEADLINE_S)
    try:
        rank.groups.configure(3, rank.store)
    except DeviceLost:
        raised.append("DeviceLost")
    return {"raised": raised, "after": found}


def shared(rank: Rank) -> dict[str, Any]:
    """Two ranks on one device: one of them is told so, and the other one can be freed."""
    os.environ["NCCL_HOSTID"] = "the same"
    if DEVICE == "simdev":
        os.environ["SIMDEV_UUID"] = "one device"
    rank.groups.open(rank=rank.rank, world_size=SIZE, generation=1, store=rank.store)

    own: Any = torch_private.store_clone(rank.store)

    def free() -> None:
        own.wait(["said"], timedelta(seconds=DEADLINE_S))
        rank.groups.abort()

    threading.Thread(target=free, daemon=True).start()
    said = sentence(lambda: dist.all_reduce(torch.ones(2, device=DEVICE)))
    rank.store.set("said", "1")
    rank.store.set(f"said {rank.rank}", said)
    return {"said": sorted(rank.store.get(f"said {other}").decode() for other in range(SIZE))}


def renewed(rank: Rank) -> dict[str, Any]:
    """Groups go on in the next generation, on the device and on the CPU, subgroups among them."""
    rank.open()
    pair = dist.new_group([0, 1])
    found, fds = [], 0
    for generation in (1, 2, 3):
        # The other one may still be in a collective that this one is through with.
        rank.meet(f"before {generation}")
        if generation > 1:
            rank.groups.abort()
            rank.groups.wait_idle(DEADLINE_S)
            rank.groups.configure(generation, rank.store)
        tensor, cpu = torch.ones(8, device=DEVICE), torch.ones(8)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=pair)
        dist.all_reduce(cpu, group=pair)
        names: list[Any] = [None] * SIZE
        dist.all_gather_object(names, f"rank {rank.rank}")
        dist.barrier()
        found.append([tensor[0].item(), cpu[0].item(), names])
        fds = fds or open_fds()
    limit = time.monotonic() + DEADLINE_S / 2
    while (rank.groups.sweep() or open_fds() > fds + FEW_FDS) and time.monotonic() < limit:
        time.sleep(0.05)
    return {"found": found, "backend": dist.get_backend() == BACKEND, "fds": open_fds() <= fds + FEW_FDS}


def open_fds() -> int:
    """Return how many files this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])


def held_up_by_graphs(real: Any) -> Any:
    """Return an abort that does not return as long as a graph has its collectives, as NCCL's."""

    def abort(devices: Devices) -> None:
        real(devices)
        limit = time.monotonic() + DEADLINE_S
        while kind.Recorded.alive and time.monotonic() < limit:
            time.sleep(0.01)

    return abort


def graph(rank: Rank) -> dict[str, Any]:
    """A graph with a collective is replayed in its generation, and in no other."""
    if DEVICE == "simdev":
        graphs.guard(_check_graph, kind.Recorded)
        put(Devices, "abort", held_up_by_graphs(Devices.abort))
    rank.open()
    tensor, local = torch.ones(8, device=DEVICE), torch.ones(8, device=DEVICE)
    summed, doubled = kind.captured(lambda: dist.all_reduce(tensor)), kind.captured(lambda: local.mul_(2))
    tensor.fill_(1.0)
    summed.replay()
    found = [tensor[0].item()]
    rank.meet("before 2")
    if rank.rank == 0:
        summed.replay()  # the other one does not come
    rank.groups.abort()
    over = outcome(summed.replay)
    rank.groups.wait_idle(DEADLINE_S)
    rank.groups.configure(2, rank.store)
    old = outcome(summed.replay)
    doubled.replay()
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    again = kind.captured(lambda: dist.all_reduce(tensor))
    tensor.fill_(1.0)
    again.replay()
    return {"found": [*found, tensor[0].item()], "over": over, "old": old}


def hammered(rank: Rank) -> dict[str, Any]:
    """Generations end in the middle of collectives that are queued, one after the other."""
    rank.open()
    pair = dist.new_group([0, 1])
    tensor, other = torch.ones(MANY, device=DEVICE), torch.ones(8, device=DEVICE)
    queued, ends = 0, set()
    for generation in range(2, HAMMERED + 2):
        dist.all_reduce(tensor, group=pair)
        rank.meet(f"before {generation}")
        # Not at the same moment in both.
        threading.Timer(0.002 * (1 + generation % 5) + 0.005 * rank.rank, rank.groups.abort).start()
        with contextlib.suppress(GenerationEnded, CollectiveFailed):
            while True:
                dist.all_reduce(tensor, group=pair)
                dist.all_reduce(other)
                queued += 1
        rank.groups.abort()
        rank.groups.wait_idle(DEADLINE_S)
        rank.groups.configure(generation, rank.store)
        other.fill_(1.0)
        dist.all_reduce(other)
        ends.add(other[0].item())
    return {"queued": queued > 0, "ends": [*ends]}


class Slow:
    """Takes time while the interpreter is on its way out, as a device's libraries do."""

    def __del__(self) -> None:
        time.sleep(2 * SLOW_S)


def ended(rank: Rank) -> dict[str, Any]:
    """The process ends by itself, while its last communicators take long to go."""
    put(device, "slow", Slow())
    real, never = Devices.abort, torch_private.HashStore()

    def slow(devices: Devices) -> None:
        real(devices)
        with contextlib.suppress(RuntimeError):
            # In C++, as NCCL's.
            never.wait(["nothing"], timedelta(seconds=2 * SLOW_S))

    put(Devices, "abort", slow)
    rank.open()
    return {"ended": True}


# ------------------------------------------------------------------------------------------------ plants


def wait_does_not_order() -> None:
    """Works of ours on the device: done when the future is."""
    stock = exchange._forward("allreduce")

    def allreduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = stock(self, *args, **kwargs)
        return work if work is None else AbortableWork(self._scope, work, args[0])

    for owner in exchange.Exchange.__subclasses__():
        put(owner, "allreduce", allreduce)


def streams_are_not_waited_for() -> None:
    """The device counts as idle at once."""
    put(ProcessGroups, "wait_idle", lambda groups, _deadline_s: put(groups, "_reader", None))


def freed_before_it_is_over() -> None:
    """The generation ends once its collectives were aborted."""
    real = Scope.end

    def end(scope: Scope) -> None:
        for abort in scope.aborts:
            abort()
        scope.aborts = []
        time.sleep(SLOW_S)
        real(scope)

    put(Scope, "end", end)


def reads_are_not_guarded() -> None:
    """Nobody asks after what a read gives out."""
    put(reads, "guard", lambda _check: None)


def sealed_early() -> None:
    """Versions are sealed whatever has become of the generation."""
    put(ProcessGroups, "lasts", lambda _groups, _generation: True)


def commit_before_the_copy() -> None:
    """Copies count as there when they are queued."""
    put(Arrival, "wait", lambda _arrival: None)


def messages_one_by_one() -> None:
    """A batch of messages is none."""
    from ckptless.pytorch_hooks.process_groups.older import group
    from ckptless.pytorch_hooks.process_groups.stock import Within

    put(group, "_batch_messages", lambda: None)
    put(Within, "supports_coalescing", False)


def works_are_not_found() -> None:
    """Works of the device go out as torch's."""
    for owner in exchange.Exchange.__subclasses__():
        put(owner, "_hand_out", lambda _exchange, work, _device: work)


def batches_stay() -> None:
    """A batch that was cut off is still one."""
    put(torch_private, "forget_batches", lambda: None)


def graphs_are_not_guarded() -> None:
    """Nobody asks after the collectives that a graph has."""
    put(graphs, "note", lambda _generation: None)


def graphs_are_not_released() -> None:
    """They are kept, as the script keeps them."""
    put(graphs, "release", lambda: None)


def open_batches_are_not_seen() -> None:
    """Nobody asks whether a batch was ended."""
    put(ProcessGroups, "_refuse_unsound", lambda _groups: None)


def threads_are_not_waited_for() -> None:
    """The process ends however many threads are on their way back from C++."""
    put(DeferredTeardown, "seal", lambda *_given: None)


def devices_are_not_compared() -> None:
    """Nobody asks who else works on a device."""
    put(device_backends, "claim", lambda _store, _device, _rank: None)


PLANTS = {
    "wait-does-not-order": wait_does_not_order,
    "streams-not-waited-for": streams_are_not_waited_for,
    "freed-before-over": freed_before_it_is_over,
    "reads-not-guarded": reads_are_not_guarded,
    "graphs-not-guarded": graphs_are_not_guarded,
    "graphs-not-released": graphs_are_not_released,
    "open-batches-not-seen": open_batches_are_not_seen,
    "sealed-early": sealed_early,
    "commit-before-copy": commit_before_the_copy,
    "messages-one-by-one": messages_one_by_one,
    "works-not-found": works_are_not_found,
    "batches-stay": batches_stay,
    "devices-not-compared": devices_are_not_compared,
    "threads-not-waited-for": threads_are_not_waited_for,
}
SCENES = (
    *(ordered, left, idle, sealed, copied, ring, renewed),
    *(answers, forwarded, refused, cut, graph, shared, hammered, ended),
)
SCENARIOS = {one.__name__: one for one in SCENES}


def main() -> None:
    """Play one rank."""
    scenario, plant = sys.argv[1:]
    if plant != "-":
        PLANTS[plant]()
    rank = Rank()
    found = SCENARIOS[scenario](rank)
    print(json.dumps(found), flush=True)
    rank.meet("end")
    if scenario == ended.__name__:
        return
    # As the end of a scenario elsewhere: destructors of what hangs are never run.
    os._exit(0)


if __name__ == "__main__":
    main()
