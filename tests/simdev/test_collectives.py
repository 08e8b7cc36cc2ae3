"""simccl does what NCCL does: its results, its order of streams, its silence about the dead, its abort."""

import faulthandler
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.simdev import build, collectives, device

pytestmark = pytest.mark.skipif(bool(device.missing()), reason=str(device.missing()))

dist: Any = distributed  # much of it is not exported as mypy understands it

RANKS = 4
PATIENCE_S = 60.0
LONG = 100_003  # elements: more than one chunk, and no multiple of anything
GARBAGE = 0x7F7F7F7F


# ---- processes that stand for ranks


class Place:
    """What a scenario gets in its process: who it is, and a store of the run's own."""

    def __init__(self, rank: int, size: int, folder: str, run: int) -> None:
        self.rank, self.size = rank, size
        self.store = dist.FileStore(f"{folder}/{run}")
        self.extension = collectives.install()

    @contextmanager
    def world(self, backend: str = "simccl") -> Iterator[Any]:
        """The default process group, with a communicator."""
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        dist.all_reduce(torch.ones(1, device="simdev"))
        torch.accelerator.synchronize()
        yield dist.distributed_c10d._get_default_group()._get_backend(torch.device("simdev"))
        dist.destroy_process_group()

    def say(self, word: str) -> None:
        self.store.set(word, "said")

    def hear(self, word: str) -> None:
        self.store.wait([word], timedelta(seconds=PATIENCE_S))


Scenario = Callable[..., Any]


def serve(pipe: Any, rank: int, size: int, folder: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    while True:
        try:
            run, scenario, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # with whatever hangs in a stream left hanging
        try:
            pipe.send((True, scenario(Place(rank, size, folder, run), *arguments)))
        except BaseException:  # noqa: BLE001 - it is raised in the test
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """So many processes, each of which runs the scenarios that it is told."""

    def __init__(self, size: int, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "tests.simdev.test_collectives"])
        self.folder = folder
        self._runs = itertools.count()
        self._pipes = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, folder), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, scenario: Scenario, *arguments: Any) -> None:
        run = next(self._runs)
        for pipe in self._pipes:
            pipe.send((run, scenario, arguments))

    def result(self, rank: int) -> Any:
        if not self._pipes[rank].poll(PATIENCE_S):
            self.close()
            raise TimeoutError(f"rank {rank} does not answer")
        fine, result = self._pipes[rank].recv()
        if not fine:
            raise AssertionError(f"rank {rank}: {result}")
        return result

    def run(self, scenario: Scenario, *arguments: Any) -> list[Any]:
        self.start(scenario, *arguments)
        return [self.result(rank) for rank in range(len(self._pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def some_ranks(size: int) -> Iterator[Ranks]:
    build.build()
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(size, folder)
        try:
            yield ranks
        finally:
            ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with some_ranks(RANKS) as ranks:
        yield ranks


# ---- every collective against what it should give


def data(rank: int, size: int = LONG, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=generator).to(dtype)


def dev(tensor: Tensor) -> Tensor:
    return tensor.to("simdev")


def empty(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="simdev")


def summed(members: list[int], size: int = LONG, dtype: torch.dtype = torch.float32) -> Tensor:
    return reduce(Tensor.add, [data(rank, size, dtype) for rank in members])


FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
}
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int32, torch.int64, torch.uint8, torch.bool)


class Checks:
    """The collectives within one group. `me` is the rank in the group, `members` are the global ones."""

    def __init__(self, group: Any, members: list[int]) -> None:
        self.group, self.members = group, members
        self.me, self.size = members.index(dist.get_rank()), len(members)
        self.mine = data(members[self.me])
        self.all = [data(rank) for rank in members]

    def reductions(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for op, fold in FOLDS.items():
            bitwise = op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR)
            for dtype in WHOLE if bitwise else FLOATING + WHOLE:
                tensor = dev(data(self.members[self.me], dtype=dtype))
                dist.all_reduce(tensor, op, group=self.group)
                expected = reduce(fold, [data(rank, dtype=dtype) for rank in self.members])
                yield f"all_reduce {op} {dtype}", tensor, expected
        for dtype in FLOATING:
            tensor = dev(data(self.members[self.me], dtype=dtype))
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=self.group)
            yield f"all_reduce AVG {dtype}", tensor, summed(self.members, dtype=dtype) / self.size
        tensor = dev(self.mine)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5), group=self.group)
        yield "all_reduce PREMUL_SUM", tensor, reduce(Tensor.add, [each * 0.5 for each in self.all])

    def rooted(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for root in range(self.size):
            there = self.members[root]
            tensor = dev(self.mine)
            dist.broadcast(tensor, there, group=self.group)
            yield f"broadcast {root}", tensor, self.all[root]
            tensor = dev(self.mine)
            dist.reduce(tensor, there, group=self.group)
            yield f"reduce {root}", tensor, summed(self.members) if self.me == root else self.mine
            gathered = [empty(LONG) for _ in self.members] if self.me == root else None
            dist.gather(dev(self.mine), gathered, there, group=self.group)
            for got, expected in zip(gathered or [], self.all, strict=False):
                yield f"gather {root}", got, expected
            tensor = empty(LONG)
            dist.scatter(
                tensor, [dev(each) for each in self.all] if self.me == root else None, there, self.group
            )
            yield f"scatter {root}", tensor, self.mine

    def gathering(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        gathered = [empty(LONG) for _ in self.members]
        dist.all_gather(gathered, dev(self.mine), group=self.group)
        for got, expected in zip(gathered, self.all, strict=True):
            yield "all_gather", got, expected
        uneven = [data(rank, 1000 + 70_000 * index) for index, rank in enumerate(self.members)]
        gathered = [empty(each.numel()) for each in uneven]
        dist.all_gather(gathered, dev(uneven[self.me]), group=self.group)
        for got, expected in zip(gathered, uneven, strict=True):
            yield "all_gather uneven", got, expected
        tensor = empty(LONG * self.size)
        dist.all_gather_into_tensor(tensor, dev(self.mine), group=self.group)
        yield "all_gather_into_tensor", tensor, torch.cat(self.all)

    def scattering(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        wide = summed(self.members, LONG * self.size).chunk(self.size)
        inputs = list(dev(data(self.members[self.me], LONG * self.size)).chunk(self.size))
        tensor = empty(LONG)
        dist.reduce_scatter(tensor, [each.clone() for each in inputs], group=self.group)
        yield "reduce_scatter", tensor, wide[self.me]
        tensor = empty(LONG)
        dist.reduce_scatter_tensor(tensor, torch.cat(inputs), dist.ReduceOp.AVG, group=self.group)
        yield "reduce_scatter_tensor", tensor, wide[self.me] / self.size

    def everyone(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        def piece(source: int, target: int) -> Tensor:
            return self.all[source][: 1000 + 40_000 * source + 100 * target]

        inputs = [dev(piece(self.me, other)) for other in range(self.size)]
        expected = [piece(other, self.me) for other in range(self.size)]
        outputs = [empty(each.numel()) for each in expected]
        dist.all_to_all(outputs, inputs, group=self.group)
        for got, wanted in zip(outputs, expected, strict=True):
            yield "all_to_all", got, wanted
        tensor = empty(sum(each.numel() for each in expected))
        dist.all_to_all_single(
            tensor,
            torch.cat(inputs),
            [each.numel() for each in expected],
            [each.numel() for each in inputs],
            group=self.group,
        )
        yield "all_to_all_single", tensor, torch.cat(expected)

    def coalesced(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        sizes = (LONG, 1, 1000)
        tensors = [dev(data(self.members[self.me], size)) for size in sizes]
        with dist._coalescing_manager(self.group, async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.group)
        works.wait()
        for tensor, size in zip(tensors, sizes, strict=True):
            yield "all_reduce_coalesced", tensor, summed(self.members, size)
        gathered = [empty(size * self.size) for size in sizes]
        with dist._coalescing_manager(self.group):
            for into, size in zip(gathered, sizes, strict=True):
                dist.all_gather_into_tensor(into, dev(data(self.members[self.me], size)), group=self.group)
        for into, size in zip(gathered, sizes, strict=True):
            yield "all_gather coalesced", into, torch.cat([data(rank, size) for rank in self.members])
        scattered = [empty(size) for size in sizes]
        with dist._coalescing_manager(self.group):
            for into, size in zip(scattered, sizes, strict=True):
                wide = dev(data(self.members[self.me], size * self.size))
                dist.reduce_scatter_tensor(into, wide, group=self.group)
        for into, size in zip(scattered, sizes, strict=True):
            expected = summed(self.members, size * self.size).chunk(self.size)[self.me]
            yield "reduce_scatter coalesced", into, expected

    def messages(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        after, before = ((self.me + step) % self.size for step in (1, -1))
        ring = empty(LONG)
        operations = [
            dist.P2POp(dist.isend, dev(self.mine), self.members[after], self.group),
            dist.P2POp(dist.irecv, ring, self.members[before], self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        yield "ring", ring, self.all[before]
        # Two messages of one pair and one batch, which the other side takes in two batches.
        sent = [data(self.members[self.me], size) for size in (LONG, 1000)]
        sends = [dist.P2POp(dist.isend, dev(each), self.members[after], self.group) for each in sent]
        pair = [empty(LONG), empty(1000)]
        receives = [dist.P2POp(dist.irecv, into, self.members[before], self.group) for into in pair]
        batches = (
            ([*sends, receives[0]], receives[1:]) if self.me == 0 else (receives[:1], [*sends, receives[1]])
        )
        for batch_of in batches:
            dist.batch_isend_irecv(batch_of)[-1].wait()
        for into in pair:
            yield "two messages of one pair", into, data(self.members[before], into.numel())
        # A lone message: only its two ranks take part.
        if self.me == 0:
            dist.send(dev(self.mine), self.members[1], group=self.group)
        elif self.me == 1:
            got = empty(LONG)
            dist.recv(got, self.members[0], group=self.group)
            yield "recv", got, self.all[0]


def every_collective(place: Place) -> tuple[int, list[str]]:
    done, wrong = 0, []
    with place.world():
        pairs = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
        for group, members in (
            (None, [0, 1, 2, 3]),
            (pairs[place.rank % 2], [place.rank % 2, place.rank % 2 + 2]),
        ):
            checks = Checks(group, members)
            kinds = ("reductions", "rooted", "gathering", "scattering", "everyone", "coalesced", "messages")
            for kind in kinds:
                for name, got, expected in getattr(checks, kind)():
                    done += 1
                    if not torch.equal(got.cpu(), expected):
                        wrong.append(f"{name} of {len(members)}")
            objects: list[Any] = [None] * len(members)
            dist.all_gather_object(objects, {"rank": place.rank}, group=group)
            if objects != [{"rank": rank} for rank in members]:
                wrong.append(f"all_gather_object: {objects}")
    return done, wrong


def test_every_collective_gives_what_it_should(four: Ranks) -> None:
    for done, wrong in four.run(every_collective):
        assert done > 100
        assert not wrong


def refusals(place: Place) -> list[str]:
    said = []
    with place.world() as backend:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: dist.all_reduce(empty(12).view(3, 4).t()),
            lambda: backend.allreduce([torch.ones(3)]).wait(),
            lambda: dist.recv(empty(1)),
            lambda: dist.all_reduce(empty(4), dist.ReduceOp.BAND),
            lambda: dist.all_gather_into_tensor(empty(3), empty(3)),
        )
        for call in calls:
            try:
                call()
                said.append("nothing")
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                said.append(str(error).splitlines()[0])
        before = place.extension.synchronizations()
        dist.barrier()
        said.append(f"{place.extension.synchronizations() - before} waits for a barrier")
    return said


def test_what_nccl_refuses_is_refused_and_a_barrier_blocks_the_host(four: Ranks) -> None:
    for said in four.run(refusals):
        expected = ("contiguous", "on simdev only", "recvAnysource", "no such reduction", "number of ranks")
        assert all(part in sentence for part, sentence in zip(expected, said, strict=False)), said
        assert said[-1] == "1 waits for a barrier"


# ---- order of streams


def early_future(place: Place) -> Any:
    """Rank 0 calls long before the others do."""
    with place.world():
        tensor = dev(torch.full((LONG,), 1.0))
        if place.rank != 0:
            place.hear("go")
            return dist.all_reduce(tensor)
        waits = place.extension.synchronizations()
        work = dist.all_reduce(tensor, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        seen = [work.is_completed(), work.get_future().done(), doubled.done(), work.is_success()]
        work.wait()
        behind = tensor * 10  # queued on the current stream, which now waits: not the host
        seen.append(place.extension.synchronizations() - waits)
        place.say("go")
        seen += [behind[-1].item(), doubled.wait()[-1].item(), work.is_completed(), work.is_success()]
        return seen


def test_a_future_is_done_at_the_call_and_what_follows_it_is_ordered_by_streams(four: Ranks) -> None:
    assert four.run(early_future)[0] == [False, True, True, False, 0, 40.0, 8.0, True, True]


def missing_wait(place: Place) -> Any:
    with place.world():
        tensor = dev(torch.full((LONG,), 1.0))
        if place.rank != 0:
            place.hear("go")
            return dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        stale = tensor.clone()[-1].item()
        place.say("go")
        work.wait()
        return stale, tensor.clone()[-1].item()


def test_without_wait_stale_data_is_read_and_wait_cures_it(four: Ranks) -> None:
    assert four.run(missing_wait)[0] == (1.0, 4.0)


def lone_pair(place: Place) -> float:
    """Ranks 2 and 3 exchange a message, and the others have nothing to do with the group at all."""
    if place.rank < 2:
        return 0.0
    backend = collectives.create(place.store, place.rank, place.size, timedelta(seconds=PATIENCE_S))
    tensor = dev(torch.full((LONG,), float(place.rank)))
    if place.rank == 2:
        backend.send([tensor], 3, 0).wait()
    else:
        backend.recv([tensor], 2, 0).wait()
    return tensor[-1].item()


def test_a_lone_message_takes_its_two_ranks_only(four: Ranks) -> None:
    assert four.run(lone_pair)[3] == 2.0


def dropped(place: Place) -> Any:
    """Rank 0 lets go of the tensor and the work before the kernel has run, and uses as much memory again."""
    with place.world():
        tensor = dev(torch.full((LONG,), 1.0))
        if place.rank != 0:
            place.hear("go")
            return dist.all_reduce(tensor)
        address = tensor.data_ptr()
        work = dist.all_reduce(tensor, async_op=True)
        del work, tensor
        torch.accelerator.current_stream().synchronize()
        others = [dev(torch.full((LONG,), 7.0)) for _ in range(3)]
        place.say("go")
        torch.accelerator.synchronize()
        again = dev(torch.full((LONG,), 8.0))
        return {other[-1].item() for other in others}, again.data_ptr() == address


def test_memory_that_a_kernel_uses_is_kept_until_it_has_run_and_then_given_back(four: Ranks) -> None:
    assert four.run(dropped)[0] == ({7.0}, True)


# ---- abort, and peers that are gone


def words(tensor: Tensor) -> set[int]:
    return set(tensor.cpu().view(torch.int32).tolist())


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def aborting(place: Place, async_op: bool) -> Any:
    """No other rank takes part in what rank 0 calls."""
    with place.world() as backend:
        if place.rank != 0:
            return place.hear("over")
        tensor, queued = dev(torch.ones(LONG)), dev(torch.ones(3))
        work = dist.all_reduce(tensor, async_op=async_op)
        second = dist.all_reduce(queued, async_op=True)
        if work is not None:
            work.wait()
        threading.Timer(0.3, backend.abort).start()
        began = time.monotonic()
        torch.accelerator.synchronize()
        blocked = time.monotonic() - began
        backend.abort()
        errors = [error_of(call) for call in (second.wait, partial(dist.all_reduce, queued), dist.barrier)]
        state = (second.is_completed(), second.is_success(), isinstance(second.exception(), RuntimeError))
        place.say("over")
        return blocked, words(tensor), words(queued), state, errors


@pytest.mark.parametrize("async_op", [True, False])
def test_abort_frees_a_blocked_host_and_leaves_garbage(four: Ranks, async_op: bool) -> None:
    blocked, first, second, state, errors = four.run(aborting, async_op)[0]
    assert 0.2 < blocked < 5
    assert first == {GARBAGE}
    assert second == {GARBAGE}
    assert state == (True, False, True)
    assert all(
        error.startswith("DistBackendError: simccl: the communicator of rank 0") for error in errors
    ), errors


def alone(place: Place, seconds: float, abort: bool) -> Any:
    """Rank 0 makes a communicator, and nobody joins it."""
    if place.rank != 0:
        return None
    backend = place.extension.SimCCL(place.store, 0, place.size, timedelta(seconds=seconds))
    if abort:
        threading.Timer(0.3, backend.abort).start()
    began = time.monotonic()
    error = error_of(lambda: backend.allreduce([empty(1)]))
    return error, time.monotonic() - began


@pytest.mark.parametrize(("seconds", "abort", "why"), [(0.5, False, "timed out"), (60.0, True, "aborted")])
def test_the_rendezvous_of_a_communicator_ends(four: Ranks, seconds: float, abort: bool, why: str) -> None:
    error, took = four.run(alone, seconds, abort)[0]
    assert f"simccl: {why} while waiting for all ranks to join" in error
    assert took < 5


def absent_leader(place: Place) -> str:
    """Rank 0 publishes nothing at first, and then what an earlier job had published."""
    if place.rank == 0:
        return ""
    said = []
    for abort in (True, False):
        store = dist.PrefixStore(f"{place.rank} {abort}", place.store)
        backend = place.extension.SimCCL(store, place.rank, place.size, timedelta(seconds=PATIENCE_S))
        if abort:
            threading.Timer(0.2, backend.abort).start()
        else:
            store.set("simccl/0", f"/proc/{os.getpid()}/fd/999 12345")
        said.append(error_of(partial(backend.eager_connect_single_device, torch.device("simdev:0"))))
    return " / ".join(said)


def test_a_leader_that_does_not_come_or_is_an_earlier_jobs(four: Ranks) -> None:
    for said in four.run(absent_leader)[1:]:
        assert "aborted while waiting for rank 0 to publish simccl/0 / " in said
        assert "is gone (/proc/" in said


def unfinished(place: Place) -> Any:
    """Rank 0 gives groups up in which its kernels wait for the others."""
    timeout = timedelta(seconds=PATIENCE_S)
    stores = [dist.PrefixStore(name, place.store) for name in ("dropped", "shut", "next")]
    dropped, shut, fresh = (
        place.extension.SimCCL(store, place.rank, place.size, timeout) for store in stores
    )
    for backend in (dropped, shut):
        backend.allreduce([empty(1)]).wait()
    torch.accelerator.synchronize()
    if place.rank == 0:
        tensor, other = dev(torch.ones(5)), dev(torch.ones(5))
        work = dropped.allreduce([tensor])
        shut.allreduce([other])
        began = time.monotonic()
        del dropped, backend
        torch.accelerator.current_stream().synchronize()
        threading.Timer(0.3, shut.abort).start()
        shut.shutdown()
        took = time.monotonic() - began
        failed = error_of(work.wait)
    result = dev(torch.full((5,), 1.0))
    fresh.allreduce([result]).wait()
    total = result.tolist()
    fresh.shutdown()
    late = error_of(partial(fresh.allreduce, [result]))
    return (total, late, took, failed, words(tensor), words(other)) if place.rank == 0 else (total, late)


def test_no_end_of_a_group_hangs_and_the_next_one_works(four: Ranks) -> None:
    results = four.run(unfinished)
    for result in results:
        assert result[0] == [4.0] * 5
        assert result[1].endswith("was shut down")
    _, _, took, failed, dropped, shut = results[0]
    assert 0.2 < took < 5
    assert failed.endswith("was aborted")
    assert dropped == shut == {GARBAGE}


def two_streams(place: Place) -> list[float]:
    """Synchronous collectives of one group on two streams: they run in the order of the calls."""
    with place.world():
        here, there = dev(torch.full((LONG,), 1.0)), dev(torch.full((LONG,), 10.0))
        other = torch.Stream(device="simdev")
        torch.accelerator.synchronize()
        for _ in range(10):
            dist.all_reduce(here, dist.ReduceOp.AVG)
            with other:
                dist.all_reduce(there, dist.ReduceOp.AVG)
            dist.all_reduce(here, dist.ReduceOp.AVG, async_op=True).wait()
        torch.accelerator.synchronize()
        return [*set(here.tolist()), *set(there.tolist())]


def test_kernels_of_one_group_on_several_streams_do_not_mix(four: Ranks) -> None:
    assert four.run(two_streams) == [[1.0, 10.0]] * RANKS


def broken_device(place: Place) -> Any:
    """A kernel spins on rank 0 while its device breaks: abort() still gets it out, and nothing hangs."""
    with place.world() as backend:
        if place.rank != 0:
            return place.hear("over")
        tensor = empty(LONG)
        work = dist.all_reduce(tensor, async_op=True)
        place.extension.inject_sticky_error("device-side assert")
        calls = (partial(dist.all_reduce, tensor), work.wait, work.is_completed)
        errors = [error_of(call) for call in calls]
        backend.abort()
        place.say("over")
        return errors


def test_a_broken_device_says_so_and_its_group_can_be_aborted() -> None:
    with some_ranks(2) as two:
        errors = two.run(broken_device)[0]
    assert all("device-side assert" in error for error in errors), errors


def left_alone(place: Place) -> Any:
    """Rank 2 is killed, or stopped for a while, instead of taking part."""
    with place.world() as backend:
        tensor = dev(torch.full((LONG,), 1.0))
        if place.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(tensor)
            torch.accelerator.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.5)
        stopped = work.is_completed()
        place.say(f"waited {place.rank}")
        work.wait()
        total = tensor[-1].item()
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.5)
        killed = work.is_completed(), work.exception() is None
        backend.abort()
        torch.accelerator.synchronize()
        return stopped, total, killed, words(tensor)


def test_peers_that_are_stopped_or_killed_are_waited_for_until_abort() -> None:
    before = set(Path("/dev/shm").iterdir())
    with some_ranks(3) as three:
        three.start(left_alone)
        store = dist.FileStore(f"{three.folder}/0")
        store.wait(["waited 0", "waited 1"], timedelta(seconds=PATIENCE_S))
        os.kill(three.processes[2].pid or 0, signal.SIGCONT)
        for rank in range(2):
            assert three.result(rank) == (False, 3.0, (False, True), {GARBAGE})
        three.processes[2].join(PATIENCE_S)
        assert three.processes[2].exitcode == -signal.SIGKILL
        left = {path for path in set(Path("/dev/shm").iterdir()) - before if "sim" in path.name}
        assert not left


# ---- training with what torch has on top


STEPS = 5


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))


def optimizer(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 6, generator=generator)


def loss_of(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    result: Tensor = ((net(inputs) - targets) ** 2).mean()
    return result


def in_rank_order(gradients: list[Tensor]) -> Tensor:
    return reduce(Tensor.add, gradients) / len(gradients)


def shards_first(gradients: list[Tensor]) -> Tensor:
    return ((gradients[0] + gradients[1]) / 2 + (gradients[2] + gradients[3]) / 2) / 2


AVERAGES = {"ddp": in_rank_order, "fsdp2": in_rank_order, "hsdp": shards_first}


def emulated(_: Place, kind: str) -> list[bytes]:
    """The same job in one process on the CPU, with gradients averaged as the collectives should."""
    net = model()
    optim = optimizer(net.parameters())
    for step in range(STEPS):
        gradients = []
        for rank in range(RANKS):
            loss = loss_of(net, *batch(step, rank))
            gradients.append(torch.autograd.grad(loss, list(net.parameters())))
        for parameter, each in zip(net.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = AVERAGES[kind](list(each))
        optim.step()
    return [parameter.detach().numpy().tobytes() for parameter in net.parameters()]


def train(place: Place, kind: str) -> tuple[list[bytes], list[int]]:
    with place.world("simccl" if kind == "fsdp2" else "cpu:gloo,simdev:simccl"):
        net: Any = model().to("simdev")
        if kind == "ddp":
            net = nn.parallel.DistributedDataParallel(net)
        else:
            shape, names = ((RANKS,), ("shard",)) if kind == "fsdp2" else ((2, 2), ("replicate", "shard"))
            mesh = init_device_mesh("simdev", shape, mesh_dim_names=names)
            for layer in net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        optim = optimizer(net.parameters())
        waits = []
        for step in range(STEPS):
            inputs, targets = (dev(each) for each in batch(step, place.rank))
            before = place.extension.synchronizations()
            torch.autograd.backward([loss_of(net, inputs, targets)])
            optim.step()
            optim.zero_grad()
            waits.append(place.extension.synchronizations() - before)
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        return [each.detach().cpu().numpy().tobytes() for each in whole], waits


@pytest.mark.parametrize("kind", AVERAGES)
def test_training_gives_the_bits_of_the_same_job_in_one_process(four: Ranks, kind: str) -> None:
    # In a rank's process: with as many threads as a stream has, on which the bits of a product depend.
    expected = four.run(emulated, kind)[0]
    for parameters, waits in four.run(train, kind):
        assert parameters == expected
        # DDP arranges its buckets anew after the first step, and waits for the device to do it.
        assert waits[2:] == [0] * (STEPS - 2)
