"""The workload under torchrun, saved by torch.distributed.checkpoint to BENCH_SAVE, where there is one."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import workload  # type: ignore[import-not-found]  # run as a script, beside it
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

SAVES = Path(os.environ["BENCH_SAVE"]) if os.environ["BENCH_SAVE"] else None
ASYNC = "BENCH_ASYNC" in os.environ
KEPT = 2


def newest(saves: Path) -> int:
    """The newest step of which everything is there: its metadata are written last."""
    return max((int(path.parent.name) for path in saves.glob("*/.metadata")), default=0)


def main() -> None:
    """Load what there is; train without end."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = workload.model(world)
    optimizer = workload.optimizer(model)

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    done = newest(SAVES) if SAVES else 0
    if SAVES and done:
        found = state()
        load(found, checkpoint_id=SAVES / str(done))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    # Such a save needs a group of its own.
    beside = dist.new_group(backend="gloo") if ASYNC else None
    running: Any = None
    notes = workload.Notes(rank)
    while True:
        done += 1
        notes.step(done, workload.train_step(model, optimizer, done, rank))
        if SAVES is None or done % workload.EVERY:
            continue
        if ASYNC:
            if running is not None:
                running.result()
            running = async_save(state(), checkpoint_id=SAVES / str(done), process_group=beside)
        else:
            save(state(), checkpoint_id=SAVES / str(done))
        if rank == 0:
            shutil.rmtree(SAVES / str(done - KEPT * workload.EVERY), ignore_errors=True)


main()
