"""Steps by virtual ranks on several real ones, against the same step in one process. Run by `world.run`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.elastic import sums
from ckptless.pytorch_hooks.elastic.exact import Exact, ExactSteps
from ckptless.pytorch_hooks.elastic.sums import Share
from ckptless.pytorch_hooks.elastic.tree import block
from ckptless.pytorch_hooks.state import State, rng

from .world import Place


class Mixed(nn.Module):
    """Parameters of two dtypes, one of which a single virtual rank alone uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.rare = nn.Linear(7, 13), nn.Parameter(torch.ones(3))
        self.last, self.unused = nn.Linear(13, 1, dtype=torch.bfloat16), nn.Parameter(torch.ones(2))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.drop(self.first(x)).bfloat16()).float().square().mean()
        return found + self.rare.sum() if x[0, 0] > 100 else found


def part(number: int) -> torch.Tensor:
    x = torch.randn(2 + number % 2, 7, generator=torch.Generator().manual_seed(number))
    if number == 1:
        x[0, 0] = 101
    return x


def stepped(share: Share) -> list[Any]:
    """The loss, and of each gradient a digest, of three calls."""
    net = Mixed()
    steps = ExactSteps(Exact(share.virtual), State(model=net), share, lambda: 5)
    found: list[Any] = []
    for call in range(3):
        parts = [part(number + call) for number in steps.virtual_ranks]
        loss = steps.step(parts, net)
        found.append(float(loss).hex())
        for parameter in net.parameters():
            grad = parameter.grad
            bits = (
                None
                if grad is None
                else hashlib.sha256(bytes(grad.view(-1).view(torch.uint8).tolist())).hexdigest()
            )
            found.append(bits)
    return found


def bits(place: Place, virtual: int, bucket_nbytes: int) -> dict[str, Any]:
    """The same bits as in one process, in buckets of any size; and what ranks cannot agree on."""
    sums.BUCKET_NBYTES = bucket_nbytes
    rng.seed(6)
    alone = stepped(Share(0, 1, virtual))
    dist.init_process_group("gloo", store=place.store, rank=place.index, world_size=place.size)
    share = Share(place.index, place.size, virtual)
    together = stepped(share)
    net = Mixed()
    steps = ExactSteps(Exact(virtual), State(model=net), share, lambda: 5)
    parts = [part(number) for number in block(*share)]
    torch.manual_seed(place.index)
    refused = []
    for found in ("other numbers", "other threads", "another call"):
        torch.set_num_threads(1)
        if found == "other threads":
            torch.manual_seed(0)
            torch.set_num_threads(1 + place.index)
        elif found == "another call":
            steps._call = place.index
        try:
            steps.step(parts, net)
        except UsageError as error:
            refused.append(str(error))
    place.leave()
    return {"alone": alone, "together": together, "refused": refused}
