"""Iterables and DataLoaders whose batches come from a ring: the same ones as without, whatever happens."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckptless.pytorch_hooks.data import MappedLoader
from ckptless.pytorch_hooks.data.producer import STATE_LIMIT
from ckptless.pytorch_hooks.data.ring_reader import RingFeed

from .ring_world import Agent, one_agent, producers, until

COUNT, EPOCHS = 23, 3


class Counting:
    """An iterable without a state; `log` gets a byte for each time it is begun."""

    log: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self.log is not None:
            os.write(self.log, b"+")
        return iter(range(COUNT))


class Remembering:
    """An iterable with torchdata's protocol; another order in each epoch."""

    def __init__(self, ballast: int = 0) -> None:
        self._epoch = self._at = self._resumed = 0
        self._ballast = bytes(ballast)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "ballast": self._ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state["at"]

    def __iter__(self) -> Iterator[int]:
        begin, self._resumed = self._resumed, 0
        for at in range(begin, COUNT):
            self._at = at + 1
            yield (at * 7 + self._epoch) % COUNT


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


def shuffled() -> DataLoader[int]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True)


SOURCES: dict[str, Callable[[], Any]] = {
    "iterable": Counting,
    "stateful": Remembering,
    "DataLoader": shuffled,
}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with one_agent(tmp_path) as made:
        yield made


def make(source: Any, replica: int = 0, replicas: int = 1, workers: int = 1) -> MappedLoader:
    options = {} if isinstance(source, DataLoader) else {"batch_size": 4}
    return MappedLoader(source, replica=replica, replicas=replicas, workers=workers, **options)  # type: ignore[arg-type]


def fed(agent: Agent, loader: MappedLoader, slot: int = 0) -> RingFeed:
    feed = RingFeed(agent.socket, slot, "")
    feed.enter(1)
    loader.feed_from(feed)
    return feed


def epochs(loader: MappedLoader) -> list[list[int]]:
    return [batch.tolist() for _ in range(EPOCHS) for batch in loader]


@pytest.mark.parametrize("kind", SOURCES)
def test_the_batches_are_those_without_a_ring(agent: Agent, kind: str) -> None:
    want = [epochs(make(SOURCES[kind](), replica, 2, workers=0)) for replica in range(2)]
    loaders = [make(SOURCES[kind](), replica, 2) for replica in range(2)]
    for replica, loader in enumerate(loaders):
        fed(agent, loader, replica)
        assert epochs(loader) == want[replica]
    # One process makes an iterable's for both; a DataLoader has one part only.
    assert len(producers()) == (2 if kind == "DataLoader" else 1)
    for loader in loaders:
        loader.close()
    until(lambda: any(name == "ring-closed" for name, _ in agent.events))
    assert {name for name, _ in agent.events} <= {"ready", "ring-closed"}


@pytest.mark.parametrize("kind", SOURCES)
def test_processes_that_go_on_anywhere(agent: Agent, kind: str) -> None:
    """Faults at random: a process is replaced or goes back itself, also over an epoch's end."""
    chance = random.Random(kind)
    want = epochs(make(SOURCES[kind](), workers=0))
    loader = make(SOURCES[kind](), workers=1)
    feed = fed(agent, loader)
    found: list[list[int]] = []
    records = [loader.state_dict()]
    batches = iter(loader)
    fault = 3
    while len(found) < len(want):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            continue
        found.append(batch.tolist())
        records.append(loader.state_dict())
        loader.committed(records[-min(3, len(records))])
        if len(found) == fault:
            fault += chance.randint(2, 6)
            back = chance.randint(0, 2)
            found, records = found[: len(found) - back], records[: len(records) - back]
            if chance.random() < 0.6:
                feed.abandon()
                loader = make(SOURCES[kind](), workers=1)
                feed = fed(agent, loader)
            loader.load_state_dict(records[-1])
            batches = iter(loader)
    assert found == want
    assert next(batches, None) is None
    loader.close()
    assert {name for name, _ in agent.events} <= {"ready", "ring-resumed", "ring-producer", "ring-closed"}


def test_after_a_death_the_batches_are_there(agent: Agent) -> None:
    reads, writes = os.pipe2(os.O_NONBLOCK)
    source = Counting()
    source.log = writes
    loader = make(source)
    feed = fed(agent, loader)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    # All of the epoch has been made: it fits into the window.
    until(lambda: len(producers()) == 1)
    assert sum(1 for _ in batches) == 4
    feed.abandon()
    until(lambda: not producers())
    heir = make(source)
    assert os.read(reads, 1000)
    fed(agent, heir)
    heir.load_state_dict(state)
    assert [batch.tolist() for batch in heir] == epochs(make(Counting(), workers=0))[2:6]
    with pytest.raises(BlockingIOError):
        os.read(reads, 1)
    assert agent.expect("ring-resumed").endswith("goes on with batch 2 of stream 0: 4 were there")
    heir.close()
    os.close(reads)
    os.close(writes)


def test_a_state_that_is_too_large_is_done_without(agent: Agent) -> None:
    loader = make(Remembering(ballast=STATE_LIMIT))
    fed(agent, loader)
    told = []
    loader.on_event = lambda kind, text: told.append((kind, text))
    batches = iter(loader)
    found = [next(batches).tolist() for _ in range(2)]
    state = loader.state_dict()
    assert state["position"]["stream"] is None
    assert told[0][0] == "data-state"
    heir = make(Remembering(ballast=STATE_LIMIT), workers=0)
    heir.load_state_dict(state)
    found += [batch.tolist() for batch in heir]
    assert found == epochs(make(Remembering(), workers=0))[:6]
    loader.close()


def test_an_epoch_that_is_left_does_not_keep_its_workers(agent: Agent) -> None:
    loader = make(Remembering())
    fed(agent, loader)
    for epoch in range(4):
        loader.set_epoch(epoch)
        next(iter(loader))
    (producer,) = producers()
    until(lambda: len(Path(f"/proc/{producer}/task/{producer}/children").read_text().split()) <= 1)
    loader.close()
