"""The workload under torchrun, kept by nvidia-resiliency-ext's local checkpoints: two copies of each.

Its state dicts assert that tensors are on CUDA; what else a save in order does works on the CPU, with Gloo.
A save beside the training waits for CUDA, so none of these is made.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import workload  # type: ignore[import-not-found]  # run as a script, beside it
from nvidia_resiliency_ext.checkpointing.local import (  # type: ignore[import-not-found]  # of the peer's environment
    basic_state_dict,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import (  # type: ignore[import-not-found]
    local_manager,
)
from nvidia_resiliency_ext.checkpointing.local.replication import (  # type: ignore[import-not-found]
    strategies,
)
from torch.distributed.tensor import DTensor


class OnCpu(basic_state_dict.BasicTensorAwareStateDict):  # type: ignore[misc]  # untyped
    """One whose tensors are on the CPU."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False


def own(value: Any) -> Any:
    """Return this rank's part of it, in other containers: a save empties them for a moment."""
    if isinstance(value, dict):
        return {key: own(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [own(one) for one in value]
    if isinstance(value, DTensor):
        return value.to_local()
    return value.detach() if isinstance(value, torch.Tensor) else value


def main() -> None:
    """Train without end; nothing is loaded: nobody is killed here."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = workload.model(world)
    optimizer = workload.optimizer(model)
    copies = strategies.CliqueReplicationStrategy.from_replication_params(1, 2)
    manager = local_manager.LocalCheckpointManager(os.environ["BENCH_SAVE"], repl_strategy=copies)
    notes = workload.Notes(rank)
    step = 0
    while True:
        step += 1
        notes.step(step, workload.train_step(model, optimizer, step, rank))
        if step % workload.EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            manager.save(OnCpu(own(state)), step)


main()
