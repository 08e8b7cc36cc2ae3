"""Loaders of a script under an agent: what a new process could not give them is not used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.data import MappedLoader
from ckptless.pytorch_hooks.running.loaders import Loaders
from ckptless.pytorch_hooks.state import rng


class Noisy(Dataset[torch.Tensor]):
    """Draws in its worker."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


class RingSession:
    """What has a ring's address; nobody listens there."""

    agent_socket = "nowhere"
    welcome = SimpleNamespace(slot=0)

    def send(self, message: Any) -> None:
        pass


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


def part(sizes: tuple[int, ...] = ()) -> m.Assigned:
    return m.Assigned(
        generation=1,
        rank=0,
        world_size=2,
        local_world_size=1,
        group_rank=0,
        restore_step=None,
        store=("127.0.0.1", 1),
        peers=("127.0.0.1",),
        sizes=sizes,
    )


def test_in_an_elastic_job_only_what_can_be_cut_anew_is_taken() -> None:
    """At the first call, not in the middle of an epoch when the first node is lost."""
    _session, loaders, loader = begun()
    loaders.enter(part())
    loaders.batches(loader, 1, "")
    loaders.enter(part((2, 3)))
    with pytest.raises(UsageError, match="the job is elastic, and a DataLoader cannot cut its batches"):
        loaders.batches(loader, 1, "")
    with pytest.raises(UsageError, match="the job is elastic, and a MappedLoader cannot"):
        loaders.batches(MappedLoader(loader, workers=0), 1, "")
    with pytest.raises(UsageError, match="the job is elastic, and a list cannot"):
        loaders.batches([1, 2], 1, "")


@pytest.mark.parametrize(
    ("batch_size", "why"), [(2, "2 samples are not enough for 3"), (4, "2 samples for 3")]
)
def test_in_an_elastic_job_each_size_has_something_of_each_batch(batch_size: int, why: str) -> None:
    """Of six samples: no batch, and not the last one, is too small for three ranks."""
    session: Any = RingSession()
    loaders = Loaders(session)
    loaders.enter(part((2, 3)))
    with pytest.raises(UsageError, match=why):
        loaders.batches(MappedLoader(Noisy(), batch_size=batch_size, workers=0), 1, "")
    loaders.batches(MappedLoader(Noisy(), batch_size=4, drop_last=True, workers=0), 1, "")
    # The script says how many there are.
    loaders.batches(MappedLoader(Noisy(), batch_size=2, replica=0, replicas=1, workers=0), 1, "b")


def test_what_is_forgotten_makes_its_own_batches() -> None:
    session: Any = RingSession()
    loaders = Loaders(session)
    loaders.enter(part())
    loader = MappedLoader(Noisy(), batch_size=2, replica=0, replicas=1, workers=0)
    batches = loaders.batches(loader, 2, "")
    for _ in range(4):
        next(batches)
    assert loaders.epoch == 1
    loaders.forget()
    assert loaders.epoch == 0
    assert loader._feed is None
