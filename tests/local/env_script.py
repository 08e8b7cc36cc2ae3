"""A script as it is written for torchrun: `env_script.py OUT [--fail-once]`; knows nothing of ckptless."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

PREFIXES = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_")


@record
def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert rank == int(os.environ["RANK"])
    assert size == int(os.environ["WORLD_SIZE"])
    marker = out / "failed"
    if "--fail-once" in sys.argv and rank == 1 and not marker.exists():
        marker.touch()
        raise RuntimeError("fails once")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    names: list[dict[str, str] | None] = [None] * size
    own = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    dist.all_gather_object(names, own)
    told = {
        "env": own,
        "ranks": [name and name["RANK"] for name in names],
        "sum": total.item(),
        "argv": sys.argv,
        "path": sys.path[0],
        "cwd": str(Path.cwd()),
        "pid": os.getpid(),
        "at": time.time(),
    }
    (out / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
