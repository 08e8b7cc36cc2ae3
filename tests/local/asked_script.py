"""A script as it is written for torchrun, in ckptless.run: `asked_script.py OUT KILL_STEP [early]`.

It makes the default group itself, named groups, asks what they are made over, meets before run.keep, and
destroys the default group at the end. With "early" it sums before run.keep.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# As many do: before ckptless is asked for anything.
from torch.distributed import destroy_process_group, init_process_group

import ckptless

OUT, KILL_STEP, EARLY = Path(sys.argv[1]), int(sys.argv[2]), "early" in sys.argv[3:]
STEPS = 12


def train(run: Any) -> None:
    init_process_group("gloo", timeout=timedelta(minutes=5), rank=run.rank, world_size=run.world_size)
    # As DDP's users and dist.nn.functional ask.
    assert dist.get_backend() is dist.Backend.GLOO
    assert "cpu:gloo" in dist.get_backend_config()
    dist.barrier()
    if EARLY:
        dist.all_reduce(torch.ones(1))
    groups: list[Any] = []

    def build() -> ckptless.State:
        torch.manual_seed(1)
        groups[:] = [dist.new_group(backend="gloo"), dist.new_group([0], backend="cpu:gloo")]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        return ckptless.State(model=model, optimizer=optimizer)

    state = run.keep(build)
    whole = KEPT.setdefault("whole", groups[0]) if groups else KEPT["whole"]
    assert dist.get_backend(whole) is dist.Backend.GLOO
    while run.step < STEPS:
        loss = state.model(torch.full((4, 8), float(run.step + dist.get_rank()))).pow(2).mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        total = torch.ones(1)
        dist.all_reduce(total, group=whole)
        assert total.item() == dist.get_world_size()
        dist.monitored_barrier()
        if run.step == KILL_STEP and run.rank == 1 and run.generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.commit(loss=loss.item())
    destroy_process_group()
    (OUT / f"final-{run.rank}.txt").write_text(f"{loss.item().hex()}\n")


# What a survivor's training function finds again.
KEPT: dict[str, Any] = {}
ckptless.run(train)
