"""The workload under nvidia-resiliency-ext's in-process restart, with ranks in reserve.

Each rank saves its own part to /dev/shm after BENCH_EVERY steps, and whoever is that rank next loads it.
Its abort knows NCCL alone: with BENCH_ABORT=sockets a thread shuts the sockets of Gloo down, without which
ranks stay in a collective until its time is over.
"""

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import workload  # type: ignore[import-not-found]  # run as a script, beside it
from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found]  # of the peer's environment

SAVES = Path(os.environ["BENCH_SAVE"])
RANKS = int(os.environ["BENCH_RANKS"])
TUNED = os.environ.get("BENCH_ABORT") == "sockets"
GLOO_TIMEOUT = timedelta(seconds=10)
# Lives as long as the process that was rank 0 first; so does the store of the wrapper itself.
STORE = dist.TCPStore(  # type: ignore[attr-defined]
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]) + 1,
    is_master=os.environ["RANK"] == "0",
    wait_for_workers=False,
)
BEFORE_GLOO: set[str] = set()


def sockets() -> dict[str, int]:
    """The sockets of this process, as /proc names them, and their descriptors."""
    found: dict[str, int] = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[str(path.readlink())] = int(path.name)
    return {name: fd for name, fd in found.items() if name.startswith("socket:")}


class ShutSockets(inprocess.abort.Abort):  # type: ignore[misc]  # untyped
    """Shut down what Gloo has opened, then give the groups up."""

    def __call__(self, state: object) -> object:
        if not dist.is_initialized():
            # A rank in reserve.
            return state
        for name, fd in sockets().items():
            if name not in BEFORE_GLOO:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
                    # A listener that is shut down ends the process. This raises for it.
                    one.getpeername()
                    one.shutdown(socket.SHUT_RDWR)
        dist.destroy_process_group()
        # Else the next default group has another name on ranks whose groups were made half.
        dist.distributed_c10d._world.group_count = 0
        return state


def steps(rank: int, world: int) -> None:
    """Load what this rank's file has; train without end."""
    model = workload.model(world)
    optimizer = workload.optimizer(model)
    done = restored(rank, model, optimizer)
    notes = workload.Notes(rank)
    while True:
        done += 1
        notes.step(done, workload.train_step(model, optimizer, done, rank))
        if done % workload.EVERY == 0:
            target = SAVES / f"{rank}-{done}"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{target}.part")
            Path(f"{target}.part").rename(target)
            (SAVES / f"{rank}-{done - 3 * workload.EVERY}").unlink(missing_ok=True)


def restored(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest step that all ranks have saved, and return it; 0: none."""
    saved = [
        {int(path.name.split("-")[1]) for path in SAVES.glob(f"{one}-*") if path.suffix != ".part"}
        for one in range(dist.get_world_size())
    ]
    newest = torch.tensor(max(set.intersection(*saved), default=0))
    # All look at the same files, and one of them may have looked later.
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    step = int(newest)
    if step:
        found = torch.load(SAVES / f"{rank}-{step}", weights_only=False)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    return step


TUNING = {
    "monitor_thread_interval": timedelta(milliseconds=100),
    "monitor_process_interval": timedelta(milliseconds=100),
    "last_call_wait": timedelta(milliseconds=100),
    "heartbeat_interval": timedelta(milliseconds=200),
    "heartbeat_timeout": timedelta(seconds=5),
    "abort": ShutSockets(),
}


@inprocess.Wrapper(  # type: ignore[untyped-decorator]
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(RANKS), inprocess.rank_assignment.ShiftRanks()
    ),
    **(TUNING if TUNED else {}),
)
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    """Called again after each fault, with what is then this process's rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    BEFORE_GLOO.clear()
    BEFORE_GLOO.update(sockets())
    name = str(call_wrapper.iteration if call_wrapper else 0)
    prefixed = dist.PrefixStore(name, STORE)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world, timeout=GLOO_TIMEOUT)
    steps(rank, world)


train()
