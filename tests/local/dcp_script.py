"""What one trains elastically without ckptless: `dcp_script.py STEPS OUT CHECKPOINTS`, under torchrun.

The model, the data and the step are those of recut_script.py with FSDP2. Every step is saved by
torch.distributed.checkpoint, so that none is done again; a start goes on from the newest. Rank 0 notes each
step, how many ranks there are, and when it was.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, OUT, CHECKPOINTS = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
SLEEP_S = float(os.environ.get("RECUT_SLEEP_S", "0"))
BATCH, WIDTH, SAMPLES = 12, 37, 60
KEPT = 2


def newest() -> int:
    """The newest step of which everything is there: its metadata are written last."""
    return max((int(path.parent.name) for path in CHECKPOINTS.glob("*/.metadata")), default=0)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, object]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    done = newest()
    if done:
        found = state()
        load(found, checkpoint_id=CHECKPOINTS / str(done))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],  # type: ignore[arg-type]
            optim_state_dict=found["optimizer"],  # type: ignore[arg-type]
        )
    with (OUT / f"steps-{rank}.txt").open("a", buffering=1) as log:
        for step in range(done + 1, STEPS + 1):
            x = batch(step)[BATCH * rank // world : BATCH * (rank + 1) // world]
            loss = (model(x) - x).pow(2).mean(1).sum() / BATCH
            (loss * world).backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            # Before it is saved: what was noted and is not there is done, and noted, again.
            log.write(json.dumps([step, world, time.time()]) + "\n")
            save(state(), checkpoint_id=CHECKPOINTS / str(step))
            if rank == 0 and step > KEPT:
                shutil.rmtree(CHECKPOINTS / str(step - KEPT))
            time.sleep(SLEEP_S)


def batch(step: int) -> torch.Tensor:
    """The samples of a step, of all ranks."""
    first = (step - 1) * BATCH
    rows = [(first + row) % SAMPLES for row in range(BATCH)]
    return torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(row)) for row in rows])


main()
