"""A script for torchrun: `tier1_script.py OUT exit|kill|exit-well`; all meet, then rank 1 fails, or not."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(out: Path, how: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    there = [name for name in ("ckptless.pytorch_hooks", "torch._dynamo") if name in sys.modules]
    told = {"env": dict(os.environ), "sum": total.item(), "preloaded": there}
    (out / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    if rank == 1 and how == "exit":
        sys.exit(7)
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # without rank 1: fails, or waits for it


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
