"""A small job, DDP or sharded, that injects faults into itself: `toy.py STEPS OUT [FAULTS as JSON]`.

A fault is {"rank", "step", "where", "kind"}; `where` is a place of WHERE in the step after `step` commits
(or a phase of a recovery), `kind` is kill, stop (SIGSTOP), stop-agent, raise, exit, daemon (its node's),
node (agent, daemon and ranks of its node), or one that spoils versions of the rank's shard before it kills:
rot-own, rot-replica, rot-newest (see rot.py; in DDP all have shard 0), or hold, which waits while there is
a file OUT/hold, or eat, which takes memory without end, or flip, of one bit of the first parameter, or
sticky: no call of the process's device works from there on, or oom: it asks its device for more than there
is, or slow, which takes LATE_S. Every fault strikes once, over all processes and generations, unless it is
"often". Without "step" it strikes at any; with "after" (the number of another fault) only in the recovery
from that one or later.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from held import held  # type: ignore[import-not-found]  # run as a script, beside it
from own_node import kill_daemon, lose_node  # type: ignore[import-not-found]  # run as a script, beside it
from rot import rot  # type: ignore[import-not-found]  # run as a script, beside it
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptless
from ckptless.pytorch_hooks.devices import accelerator

WHERE = (
    *("import", "enter", "build", "restore", "recovered", "forward", "backward", "update", "commit"),
    *("committed", "leave", "finish", "health"),
)

HOLD_DEADLINE_S = 60.0
LATE_S = 0.15
# What flip strikes.
PARAMETERS: list[torch.Tensor] = []

STEPS = int(sys.argv[1])
OUT = Path(sys.argv[2])
FAULTS: list[dict[str, Any]] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else []
SLEEP_S = float(os.environ.get("TOY_SLEEP_S", "0"))
SLEEP_WHILE = os.environ.get("TOY_SLEEP_WHILE")
# While this is there, too, ranks of this node of Slurm's sleep for twice as long.
SLOWER = Path(f"{SLEEP_WHILE}-{os.environ.get('SLURMD_NODENAME')}")
NAN_FROM = int(os.environ.get("TOY_NAN_FROM", "0"))
WATCH = "TOY_WATCH" in os.environ
PARALLEL = os.environ.get("TOY_PARALLEL", "ddp")
# Of one rank alone, or of all.
EVERY: Any = os.environ.get(
    f"TOY_COMMIT_EVERY_{os.environ.get('RANK', '0')}", os.environ.get("TOY_COMMIT_EVERY", "1")
)
OVERLAP: Any = os.environ.get("TOY_OVERLAP", "off")
BUDGET = float(os.environ.get("TOY_COMMIT_BUDGET", "0.01"))
WIDTH = int(os.environ.get("TOY_WIDTH", "48"))
DEVICE = os.environ.get("TOY_DEVICE", "cpu")
BALLAST = int(os.environ.get("TOY_BALLAST", "0"))
HELD: list[torch.Tensor] = []
LAZY = "TOY_LAZY" in os.environ
# A mistake that is made in the product.
PLANT = os.environ.get("TOY_PLANT")
# A variable that the script sets when it builds.
LATE_SETTING = os.environ.get("TOY_LATE_SETTING")
# The first commits make memory, settle buckets, and are read back.
WARM = 3


def strike(where: str, rank: int, step: int, generation: int) -> None:
    for number, fault in enumerate(FAULTS):
        if fault["where"] != where or fault["rank"] != rank or fault.get("step", step) != step:
            continue
        if fault.get("generation", generation) != generation or step < fault.get("from", 0):
            continue
        if "after" in fault and not follows(fault, generation):
            continue
        if fault.get("often") or first_time(number, generation):
            inject(fault["kind"], 0 if PARALLEL == "ddp" else rank)


def follows(fault: dict[str, Any], generation: int) -> bool:
    """Whether a fault's forerunner has struck: in this generation for "leave", in an older one otherwise."""
    try:
        before = int((OUT / f"struck-{fault['after']}").read_text())
    except (FileNotFoundError, ValueError):
        return False
    return generation > before or (fault["where"] == "leave" and generation == before)


def first_time(number: int, generation: int) -> bool:
    try:
        (OUT / f"fault-{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    (OUT / f"fault-{number}").write_text(f"{time.time()}\n")
    (OUT / f"struck-{number}").write_text(f"{generation}\n")
    return True


def inject(kind: str, shard: int) -> None:
    if kind.startswith("rot-"):
        count = rot(kind.removeprefix("rot-"), shard)
        print(f"{kind}: {count} versions of shard {shard}", flush=True)
    if kind in GO_ON:
        GO_ON[kind]()
        return
    if kind == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(16 << 20))
    if kind == "raise":
        raise ValueError("the toy raises, as told")
    if kind == "exit":
        os._exit(7)
    if kind == "daemon":
        kill_daemon()
        return
    if kind == "stop-agent":
        os.kill(os.getppid(), signal.SIGSTOP)
        return
    if kind == "node":
        lose_node()
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def break_device() -> None:
    """Whatever the script does next on its device raises, as after an assert in a kernel."""
    if DEVICE == "simdev":
        getattr(torch, DEVICE).inject_sticky_error("device-side assert triggered")
    else:
        # An index that is out of range is such an assert.
        torch.zeros(4, device=DEVICE)[torch.full((1,), 9, device=DEVICE)]


def flip() -> None:
    """As a cosmic ray, or a core that is not sound, would: nothing raises, and nobody counts it."""
    own(PARAMETERS[0]).data.view(torch.int32).view(-1)[0] ^= 1 << 22


def hold() -> None:
    limit = time.monotonic() + HOLD_DEADLINE_S
    while (OUT / "hold").exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"nobody has removed {OUT / 'hold'}")
        time.sleep(0.02)


def too_much() -> None:
    """Raise what torch does of a device that is full."""
    torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)


def late() -> None:
    time.sleep(LATE_S)


# After these the rank goes on.
GO_ON = {"hold": hold, "flip": flip, "sticky": break_device, "oom": too_much, "slow": late}


class Step(torch.optim.AdamW):
    """An optimizer that can be struck in the middle of its update."""

    rank = step_number = generation = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        strike("update", self.rank, self.step_number, self.generation)
        return loss


class Probe:
    """A user's own object in the state, where a recovery can be struck in the middle of a restore."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        strike("restore", self.run.rank, self.run.step, self.run.generation)
        self.count = state["count"]


def make_model(run: Any) -> nn.Module:
    """The model as `TOY_PARALLEL` says: ddp; fsdp, every rank with its own shard; hsdp, two with the same."""
    if PARALLEL == "ddp":
        body = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)
        )
        return nn.parallel.DistributedDataParallel(body.to(DEVICE))
    body = nn.Sequential(
        nn.Linear(32, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, WIDTH),
        nn.Linear(WIDTH, 32),
    ).to(DEVICE)
    if PARALLEL == "fsdp":
        mesh = init_device_mesh(DEVICE, (run.world_size,))
    else:
        mesh = init_device_mesh(DEVICE, (2, run.world_size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in body:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(body, mesh=mesh)
    return body


def build(run: Any) -> ckptless.State:
    if LATE_SETTING:
        os.environ[LATE_SETTING] = "1"
    torch.manual_seed(1)
    random.seed(run.rank)
    if BALLAST:
        # As a model that fills its device would.
        HELD.append(torch.empty(BALLAST, dtype=torch.uint8, device=DEVICE))
    model = make_model(run)
    strike("build", run.rank, run.step, run.generation)
    PARAMETERS[:] = list(model.parameters())
    optimizer = Step(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    data = torch.utils.data.TensorDataset(torch.randn(64, 32))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    torch.manual_seed(100 + run.rank)
    return ckptless.State(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, probe=Probe(run), seen=0
    )


def watch(rank: int, generation: int) -> None:
    """What this process holds, for a test of leaks."""
    with (OUT / f"watch-{rank}.txt").open("a") as log:
        log.write(" ".join(map(str, (generation, *held()))) + "\n")


def train(run: Any) -> None:
    (OUT / f"pid-{run.rank}.txt").write_text(f"{os.getpid()} {run.generation}")
    try:
        strike("enter", run.rank, run.step, run.generation)
        steps(run)
    except BaseException:
        strike("leave", run.rank, run.step, run.generation)
        raise


def steps(run: Any) -> None:
    run.on_recovery(lambda run: strike("recovered", run.rank, run.step, run.generation))
    state = run.keep(lambda: build(run))
    log = (OUT / f"loss-{run.rank}.txt").open("a", buffering=1)
    state.optimizer.rank, state.optimizer.generation = run.rank, run.generation
    for (x,) in run.batches(state.loader, epochs=10_000):
        if run.step >= STEPS:
            break
        state.optimizer.step_number = run.step
        strike("forward", run.rank, run.step, run.generation)
        x = x.to(DEVICE)
        noise = torch.randn_like(x) + random.random()
        loss = (state.model(x + noise) - x).pow(2).mean()
        if NAN_FROM and run.step >= NAN_FROM:
            loss = loss * float("nan")
        strike("backward", run.rank, run.step, run.generation)
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()
        if SLEEP_WHILE is None or Path(SLEEP_WHILE).exists():
            time.sleep(SLEEP_S * (1 + SLOWER.exists()))
        state.seen += len(x)
        state.probe.count += 1
        strike("commit", run.rank, run.step, run.generation)
        if LAZY:
            commit_lazily(run, loss)
        value = loss.item()
        log.write(f"{run.step + (not LAZY)} {value.hex()} {state.seen} {time.time()} {run.generation}\n")
        if not LAZY:
            run.commit(loss=value)
        strike("committed", run.rank, run.step, run.generation)
        if WATCH:
            watch(run.rank, run.generation)
    strike("finish", run.rank, run.step, run.generation)
    (OUT / f"final-{run.rank}.txt").write_text(f"{digest(state)} {state.seen} {state.probe.count}")
    if run.rank == 0:
        total = sum((float(own(p).double().sum().item()) for p in state.model.parameters()), 0.0)
        (OUT / "final.txt").write_text(total.hex())


def commit_lazily(run: Any, loss: torch.Tensor) -> None:
    """Commit the step with its loss on the device; once things run, a wait for the device raises in it."""
    device = getattr(torch, DEVICE)
    if run.step >= WARM:
        device.set_sync_debug_mode("error")
    try:
        run.commit(loss=loss)
    finally:
        device.set_sync_debug_mode("default")


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(state: Any) -> str:
    """Of everything that the training has made: parameters, buffers, the optimizer's moments."""
    found = hashlib.sha256()
    moments = [v for entry in state.optimizer.state_dict()["state"].values() for v in entry.values()]
    for tensor in [*state.model.state_dict().values(), *moments]:
        found.update(own(tensor).detach().cpu().numpy().tobytes())
    return found.hexdigest()


def called(name: str) -> Any:
    """Return a hook that writes down that it was called; the check of one rank fails once."""

    def hook() -> None:
        with (OUT / f"hooks-{os.environ['RANK']}.txt").open("a") as log:
            used = DEVICE != "cpu" and getattr(torch, DEVICE).is_initialized()
            log.write(f"{name} {os.getpid()}{' on the device' if used else ''}\n")
        if name == "health_check":
            strike("health", int(os.environ["RANK"]), 0, 0)

    return hook


def nothing(deadline_s: float = 0.0) -> None:
    """Do nothing, in no time."""
    del deadline_s


def join_before_the_check() -> None:
    """A rank joins without a look at its device."""
    accelerator.prove_sound = accelerator.wait_idle = nothing


def begin_before_memory_is_back() -> None:
    """Nobody waits for memory that a dead process still has."""
    accelerator.wait_for_memory = nothing


PLANTS = {
    "join-before-check": join_before_the_check,
    "begin-before-memory": begin_before_memory_is_back,
}

OUT.mkdir(parents=True, exist_ok=True)
if PLANT is not None:
    PLANTS[PLANT]()
if DEVICE != "cpu":
    from ckptless.pytorch_hooks.devices import sums
    from tests.gpu import kind

    # So that the toy's tensors are large enough to be copied beside the training.
    sums.COLUMNS, sums.LEAST_NBYTES = 8, 256
    # On a GPU that all ranks share NCCL takes them only where each seems to be a machine of its own.
    os.environ.setdefault("NCCL_HOSTID", str(os.getpid()))
    kind.install()
strike("import", int(os.environ.get("RANK", "0")), 0, 0)
HOOKS = ("abort", "finalize", "health_check", "warmup") if "TOY_HOOKS" in os.environ else ()
ckptless.run(
    train,
    commit_every=EVERY if EVERY == "auto" else int(EVERY),
    commit_budget=BUDGET,
    overlap=OVERLAP,
    **{name: called(name) for name in HOOKS},
)
