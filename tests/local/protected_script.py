"""A script that is no function, as nanoGPT's train.py: `protected_script.py OUT STEPS KILLS`.

KILLS is "STEP:RANK,...", of a step that is done: where its process kills itself, or with "raise:STEP:RANK"
raises. Under torchrun nothing is protected. Each rank writes its losses, and at the end a digest of all. With
RPC in the environment each batch comes back from the other rank.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

import ckptless

OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])
FAULTS = [one.rpartition("raise:") for one in sys.argv[3].split(",") if one]
OUT.mkdir(parents=True, exist_ok=True)

run = ckptless.protect()
init_process_group("gloo")
rank = dist.get_rank()


def strike(step: int) -> None:
    """End this process where it is told to, once."""
    for number, (_, raises, where) in enumerate(FAULTS):
        if where == f"{step}:{rank}":
            try:
                (OUT / f"struck-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if raises:
                raise ValueError("as it was told to")
            os.kill(os.getpid(), signal.SIGKILL)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one, as nanoGPT does."""
    x = torch.randn(8, 16)
    if "RPC" in os.environ:
        x = rpc.rpc_sync(f"w{1 - rank}", torch.add, args=(x, rank))
    return x, x.argmax(1) % 4


torch.manual_seed(1337 + rank)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if "RPC" in os.environ:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)  # type: ignore[no-untyped-call]
strike(-1)
state = run.keep(ckptless.State(model=model, optimizer=optimizer, best=9.0))

while run.step < STEPS:
    x, y = get_batch()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    strike(run.step)
    optimizer.step()
    found = float(loss)
    state.best = best = min(float(state.best), found)
    with (OUT / f"loss-{rank}.txt").open("a") as file:
        file.write(f"{run.step} {found.hex()} {best.hex()}\n")
    run.commit(loss=loss)

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
(OUT / f"final-{rank}.txt").write_text(
    f"{digest.hexdigest()} {model.module[1].running_mean.sum().item().hex()}\n"
)
if "RPC" in os.environ:
    rpc.shutdown()
if "PLAIN" in os.environ:
    dist.barrier()
    # Stock Gloo groups now and then crash a process that ends with them.
    os._exit(0)
destroy_process_group()
sys.exit(int(os.environ.get("CODE", "0")))
