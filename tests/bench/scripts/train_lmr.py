"""The workload under lm-resiliency's GEMINI, on torchrun: copies in memory, flushed to /dev/shm."""

import os

import torch
import torch.distributed as dist
import workload  # type: ignore[import-not-found]  # run as a script, beside it
from lm_resiliency import (  # type: ignore[import-not-found]  # of the peer's environment
    InMemoryCkptConfig,
    enable_resiliency,
)


def main() -> None:
    """Go on from what it finds; train without end."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = workload.model(world)
    optimizer = workload.optimizer(model)
    handle = enable_resiliency(
        model,
        optimizer,
        interval=workload.EVERY,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(
            disk_flush_interval=workload.EVERY,
            disk_folder=os.environ["BENCH_SAVE"],
            run_id="bench",
            pin_memory=False,
        ),
        # Else it asks for groups of NCCL, which a CPU's torch does not have.
        group=dist.group.WORLD,
        nccl_group=dist.group.WORLD,
        device=torch.device("cpu"),
    )
    notes = workload.Notes(rank)
    while True:
        step = handle.step_count + 1
        notes.step(step, workload.train_step(model, optimizer, step, rank))


main()
