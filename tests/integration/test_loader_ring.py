"""A MappedLoader that takes its batches from a ring: the same ones as without, whatever happens to either."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptless.daemon.protocol.errors import DataError, UsageError
from ckptless.pytorch_hooks.data import MappedLoader
from ckptless.pytorch_hooks.data.ring_reader import RingFeed
from ckptless.pytorch_hooks.errors import GenerationEnded

from .ring_world import Agent, children, one_agent, producers, until

COUNT, BATCH, EPOCHS = 23, 4, 3
BAD = 17


class Numbers:
    """A map-style dataset."""

    def __init__(self, bad: int = -1) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._bad:
            raise ValueError("a bad record")
        return torch.tensor(float(index)) + torch.randn(3)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with one_agent(tmp_path) as made:
        yield made


def make(replica: int = 0, replicas: int = 2, workers: int = 1, **options: Any) -> MappedLoader:
    source = options.pop("source", Numbers())
    options = {"seed": 5, "shuffle": True, "batch_size": BATCH, "drop_last": True, **options}
    return MappedLoader(source, workers=workers, replica=replica, replicas=replicas, **options)


def fed(agent: Agent, slot: int = 0, **options: Any) -> tuple[MappedLoader, RingFeed]:
    loader = make(**options)
    feed = RingFeed(agent.socket, slot, "")
    feed.enter(1)
    loader.feed_from(feed)
    return loader, feed


def epochs(loader: MappedLoader) -> list[torch.Tensor]:
    return [batch for _ in range(EPOCHS) for batch in loader]


def same(found: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(found) == len(want)
    assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))


def made(agent: Agent) -> tuple[int, int]:
    words = agent.expect("ring-closed").split()
    return int(words[2]), int(words[6])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_batches_are_those_without_a_ring(agent: Agent, workers: int) -> None:
    loaders = [fed(agent, replica, replica=replica, workers=workers)[0] for replica in range(2)]
    for replica, loader in enumerate(loaders):
        same(epochs(loader), epochs(make(replica, workers=0)))
    # One process makes them for both.
    assert len(producers()) == 1
    for loader in loaders:
        loader.close()
    assert {kind for kind, _ in agent.events} <= {"ready", "ring-closed"}
    until(lambda: any(kind == "ring-closed" for kind, _ in agent.events))
    assert made(agent)[1] >= 2 * len(epochs(make(workers=0)))


def test_ranks_of_one_replica_share_them(agent: Agent) -> None:
    loaders = [fed(agent, slot)[0] for slot in range(2)]
    for pair in zip(*(iter(loader) for loader in loaders), strict=True):
        assert torch.equal(*pair)
    for loader in loaders:
        loader.close()
    until(lambda: any(kind == "ring-closed" for kind, _ in agent.events))
    count, given = made(agent)
    assert given > count


def test_another_process_goes_on_with_what_is_there(agent: Agent) -> None:
    loader, feed = fed(agent)
    it = iter(loader)
    states = []
    for _ in range(3):
        next(it)
        states.append(loader.state_dict())
    loader.committed(states[0])
    rest = list(it)
    feed.abandon()
    heir, _ = fed(agent)
    heir.load_state_dict(states[0])
    same(list(heir)[2:], rest)
    assert not agent.expect("ring-resumed").endswith(": 0 were there")
    heir.close()


def test_where_the_agent_is_gone_it_makes_its_own(agent: Agent) -> None:
    # More batches than the agent sends ahead of use: those are still taken.
    loader, _ = fed(agent, batch_size=2)
    told = []
    loader.on_event = lambda kind, text: told.append(kind)
    it = iter(loader)
    found = [next(it), next(it)]
    agent.kill()
    same([*found, *it], list(make(workers=0, batch_size=2)))
    assert told == ["ring-off"]
    loader.close()


def test_the_end_of_a_generation_ends_a_wait(agent: Agent) -> None:
    reads, writes = os.pipe()

    def stuck(value: torch.Tensor) -> torch.Tensor:
        os.read(reads, 1)
        return value

    loader, feed = fed(agent, transform=stuck)
    stopper = threading.Timer(0.2, feed.stop, [1])
    stopper.start()
    with pytest.raises(GenerationEnded, match="generation 1 ended"):
        next(iter(loader))
    stopper.join()
    # Said before anybody waits, it is not forgotten either.
    with pytest.raises(GenerationEnded):
        next(iter(loader))
    os.write(writes, b"+" * 1000)
    feed.enter(2)
    assert next(iter(loader)).shape == (BATCH // 2, 3)
    loader.close()
    os.close(reads)
    os.close(writes)


def test_a_bad_record_is_skipped_and_told(agent: Agent) -> None:
    bad = Numbers(bad=BAD)
    options: dict[str, Any] = {"source": bad, "on_error": "skip", "replicas": 1, "drop_last": False}
    loader, _ = fed(agent, **options)
    told = []
    loader.on_event = lambda kind, text: told.append((kind, text))
    same(epochs(loader), epochs(make(workers=0, **options)))
    assert [kind for kind, _ in told] == ["data-skipped"] * EPOCHS
    assert loader.skipped == 1
    loader.close()


def test_a_bad_record_is_named(agent: Agent) -> None:
    loader, _ = fed(agent, source=Numbers(bad=BAD), replicas=1, drop_last=False)
    with pytest.raises(DataError, match=f"sample {BAD} of Numbers: cannot be read(.|\n)*a bad record"):
        list(loader)
    loader.close()


def test_a_worker_that_is_killed(agent: Agent) -> None:
    loader, _ = fed(agent, workers=2, collate=lambda rows: [torch.stack(rows), bytes(100_000)])
    told = []
    loader.on_event = lambda kind, text: told.append(kind)
    found = []
    for batch in loader:
        found.append(batch[0])
        # Once: it is three deaths in a row that are too many.
        for producer in producers() if len(found) == 2 else ():
            for worker in children(producer):
                os.kill(worker, signal.SIGKILL)
    same(found, list(make(workers=0)))
    loader.close()


def test_how_many_are_made_ahead(agent: Agent) -> None:
    loader, _ = fed(agent, prefetch=2)
    same(list(islice(loader, 4)), list(make(workers=0))[:4])
    loader.close()
    made = int(agent.expect("ring-closed").partition(": ")[2].split()[0])
    assert 4 <= made <= 4 + 2


@pytest.mark.parametrize("wrong", [{"prefetch": 0}, {"prefetch": 257}, {"budget_nbytes": 0}])
def test_limits_that_are_none(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="prefetch must be 1 to 256"):
        make(**wrong)
