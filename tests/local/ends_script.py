"""Trains a little with ckptless.run and DDP, and ends: `ends_script.py`."""

from typing import Any

import torch
from torch import nn

import ckptless

STEPS = 3


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


ckptless.run(train)
