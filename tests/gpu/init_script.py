"""A plain script that makes its process group on the device and sums once: `init_script.py OUT`.

It writes when it began to do so, and when it was done (seconds since the epoch).
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu import kind
from tests.simdev import collectives

rank = os.environ["RANK"]
# On a GPU that all ranks share NCCL takes them only where each seems to be a machine of its own.
os.environ["NCCL_HOSTID"] = rank
device = kind.install()
number = torch.ones(1, device=kind.name())
device.synchronize()
began = time.time()
if kind.name() == "cuda":
    dist.init_process_group("nccl")
else:
    collectives.install()
    dist.init_process_group("simccl")
dist.all_reduce(number)
device.synchronize()
ended = time.time()
assert number.item() == dist.get_world_size()
(Path(sys.argv[1]) / f"rank-{rank}.txt").write_text(f"{began} {ended}\n")
dist.destroy_process_group()
