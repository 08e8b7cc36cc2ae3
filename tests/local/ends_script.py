"""Trains a little with ckptless.run and DDP, and ends: `ends_script.py [STEPS] [one-more]`.

With `one-more` rank 1 calls a collective at its end that the others do not.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptless

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 3


def train(run: Any) -> None:
    def build() -> ckptless.State:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    state = run.keep(build)
    while run.step < STEPS:
        state.optimizer.zero_grad()
        loss = state.model(torch.ones(2, 4)).sum()
        loss.backward()
        state.optimizer.step()
        run.commit(loss=loss.item())
    if "one-more" in sys.argv and run.rank == 1:
        dist.all_reduce(torch.ones(3))


ckptless.run(train)
