"""The workload under torchft: replica groups of one rank, each with a Manager; the lighthouse is the bench's.

The global step is the Manager's. It has no groups for FSDP2 on CPUs: its Gloo refuses reduce_scatter.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import workload  # type: ignore[import-not-found]  # run as a script, beside it
from torchft import (  # type: ignore[import-not-found]  # of the peer's environment
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)


def main() -> None:
    """Train without end, with whichever groups there are."""
    rank = int(os.environ["REPLICA_GROUP_ID"])
    body = workload.body()
    inner = workload.optimizer(body)

    def state_dict() -> dict[str, Any]:
        return {"model": body.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        body.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=int(os.environ["BENCH_FEWEST"]),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"group-{rank}-",
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, body)
    optimizer = Optimizer(manager, inner)
    notes = workload.Notes(rank)
    while True:
        step = manager.current_step() + 1
        optimizer.zero_grad()
        # A rank that comes back has the step of the others only when their quorum has been formed.
        loss = workload.loss_of(model, step, rank)
        optimizer.step()
        workload.time.sleep(workload.SIZE.sleep_s)
        if manager.current_step() >= step:
            notes.step(manager.current_step(), loss.item())


main()
