"""Loaders of a script under an agent: what a new process could not give them is not used."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ckptless.pytorch_hooks.running.loaders import Loaders
from ckptless.pytorch_hooks.state import rng


class Noisy(Dataset[torch.Tensor]):
    """Draws in its worker."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


class Session:
    """What is sent, and to nobody."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def begun() -> tuple[Any, Loaders, DataLoader[torch.Tensor]]:
    session: Any = Session()
    return session, Loaders(session), DataLoader(Noisy(), 2, num_workers=1, persistent_workers=True)


def test_workers_that_draw_do_not_go_on_from_epoch_to_epoch() -> None:
    torch.manual_seed(5)
    session, loaders, loader = begun()
    batches = loaders.batches(loader, 2, "")
    found = [next(batches).tolist() for _ in range(5)]
    record = rng.capture(), loaders.committed()
    found += [batch.tolist() for batch in batches]
    assert [note.kind for note in session.sent] == ["workers-anew"]
    _session, loaders, loader = begun()
    rng.restore(record[0])
    loaders.restore(record[1])
    assert [batch.tolist() for batch in loaders.batches(loader, 1, "")] == found[5:]
