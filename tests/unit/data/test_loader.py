"""MappedLoader: the same batches whoever makes them, errors with their place, and no process left over."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from ckptless.daemon.protocol.errors import CkptlessError, DataError, ProtocolError, RecoveryError, UsageError
from ckptless.data import Cache, JsonLines, MappedLoader, Pack
from ckptless.pytorch_hooks.data.order import DataPosition
from ckptless.pytorch_hooks.state import codec, rng

COUNT = 41


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    processes, fds = children(), descriptors()
    yield
    gc.collect()
    assert children() <= processes
    assert descriptors() <= fds


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Counting:
    """Begun again by each `iter`."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Remembering(Counting):
    """torchdata's protocol."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.at = self.resumed = self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.resumed = state["at"]

    def __iter__(self) -> Iterator[int]:
        begin, self.resumed = self.resumed, 0
        for at in range(begin, self.count):
            self.at, self.read = at + 1, self.read + 1
            yield at


class Endless:
    def __iter__(self) -> Iterator[int]:
        n = 0
        while True:
            yield n
            n += 1


def noisy(value: int) -> tuple[int, float, float, float]:
    return value, random.random(), float(np.random.rand()), torch.rand(1).item()


def noisy_collate(values: list[Any]) -> list[Any]:
    return [*values, random.random()]


def make(source: Any = None, **options: Any) -> MappedLoader:
    options = {"batch_size": 6, "seed": 5, "collate": noisy_collate, "transform": noisy, **options}
    return MappedLoader(Numbers() if source is None else source, **options)


def run(loader: MappedLoader, epochs: int = 2) -> list[Any]:
    try:
        return [batch for _ in range(epochs) for batch in loader]
    finally:
        loader.close()


SOURCES = {"map": Numbers, "iterable": Counting, "stateful": Remembering}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_same_whoever_makes_it(kind: str, drop_last: bool) -> None:
    shuffle = kind == "map"
    want = run(make(SOURCES[kind](), workers=0, shuffle=shuffle, drop_last=drop_last))
    ids = [value[0] for batch in want for value in batch[:-1]]
    half = ids[: len(ids) // 2]
    assert len(ids) == 2 * (COUNT // 6 * 6 if drop_last else COUNT)
    assert len(set(half)) == len(half)
    assert (half != ids[len(half) :]) == shuffle
    for workers in (1, 3):
        assert run(make(SOURCES[kind](), workers=workers, shuffle=shuffle, drop_last=drop_last)) == want


@pytest.mark.parametrize("kind", SOURCES)
def test_any_position_leads_back(kind: str) -> None:
    shuffle = kind == "map"
    whole = make(SOURCES[kind](), workers=0, shuffle=shuffle)
    states = [whole.state_dict()]
    want = []
    for batch in whole:
        want.append(batch)
        states.append(codec.unpack(codec.pack(whole.state_dict())))
    ended = whole.state_dict()
    want_next = list(whole)
    # Once it has ended, as a living one goes on, and torchdata's do.
    after = make(SOURCES[kind](), workers=0, shuffle=shuffle)
    after.load_state_dict(ended)
    assert list(after) == want_next
    for done, state in enumerate(states):
        again = make(SOURCES[kind](), workers=done % 3, shuffle=shuffle)
        again.load_state_dict(state)
        assert list(again) == want[done:]
        assert list(again) == want_next
        again.close()


def test_a_stateful_source_is_not_read_from_the_begin() -> None:
    first = make(Remembering(), workers=0)
    batches = iter(first)
    for _ in range(4):
        next(batches)
    source = Remembering()
    again = make(source, workers=0)
    again.load_state_dict(first.state_dict())
    assert list(again) == list(batches)
    assert source.read == COUNT - 24


def test_an_endless_stream() -> None:
    loader = make(Endless(), workers=2)
    batches = iter(loader)
    ids = [value[0] for _ in range(30) for value in next(batches)[:-1]]
    assert ids == list(range(180))
    loader.close()


def test_a_whole_dataloader() -> None:
    def loader(workers: int, rank: int) -> MappedLoader:
        data = Numbers()
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=rank, seed=3)
        return MappedLoader(DataLoader(data, batch_size=4, sampler=sampler), workers=workers)

    want = run(loader(0, 1), epochs=2)
    assert len(want) == 12
    assert not torch.equal(want[0], want[6])
    one = loader(1, 1)
    batches = iter(one)
    found = [next(batches) for _ in range(4)]
    two = loader(1, 1)
    two.load_state_dict(one.state_dict())
    found += [*two, *two]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    one.close()
    two.close()


def test_a_shuffled_dataloader_draws_the_same_in_any_process() -> None:
    def loader(workers: int) -> MappedLoader:
        return MappedLoader(DataLoader(Numbers(), batch_size=4, shuffle=True), workers=workers)

    want = run(loader(0))
    assert not torch.equal(want[0], want[11])
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(run(loader(1)), want, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_training_draws_the_same_random_numbers(workers: int) -> None:
    before = codec.pack(rng.capture())
    assert len(run(make(workers=workers))) == 14
    assert codec.pack(rng.capture()) == before


def test_other_replicas_have_the_same_global_order() -> None:
    def samples(replicas: int, begin: dict[str, Any] | None = None) -> list[list[int]]:
        loaders = [make(workers=0, shuffle=True, replica=r, replicas=replicas) for r in range(replicas)]
        for loader in loaders:
            if begin is not None:
                loader.load_state_dict(begin)
        parts = zip(*loaders, strict=True)
        return [[value[0] for batch in step for value in batch[:-1]] for step in parts]

    whole = samples(1)
    assert [samples(n) for n in (2, 3, 4, 5)] == [whole] * 4
    one = make(workers=0, shuffle=True, replica=1, replicas=3)
    batches = iter(one)
    next(batches)
    next(batches)
    assert samples(2, one.state_dict()) == whole[2:]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("workers", [0, 2])
def test_virtual_ranks_have_their_parts_wherever_they_are(
    kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is what a replica of as many has, its random numbers among them."""
    virtual, shuffle = 5, kind == "map"
    alone = [
        make(SOURCES[kind](), workers=0, shuffle=shuffle, replica=v, replicas=virtual) for v in range(virtual)
    ]
    wanted = [list(parts) for parts in zip(*alone, strict=True)]
    for ranks in (1, 2, 3, 5):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        found: list[list[Any]] = [[] for _ in wanted]
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            loader = make(SOURCES[kind](), workers=workers, shuffle=shuffle)
            loader.deal_virtually(virtual)
            for batch, parts in zip(found, run(loader, 1), strict=True):
                batch += parts
        assert found == wanted


def test_what_cannot_be_dealt_to_virtual_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="leave replica and replicas out"):
        make(replica=0, replicas=2).deal_virtually(4)
    with pytest.raises(UsageError, match="give MappedLoader the dataset"):
        MappedLoader(DataLoader(Numbers(), batch_size=2)).deal_virtually(4)
    loader = make(workers=0)
    loader.deal_virtually(7)
    with pytest.raises(UsageError, match="6 samples are not enough for 7"):
        next(iter(loader))


def test_more_replicas_than_the_last_batch_has_samples() -> None:
    with pytest.raises(UsageError, match="5 samples for 6 replicas: set drop_last=True"):
        next(iter(make(workers=0, replica=0, replicas=6)))
    with pytest.raises(UsageError, match="not enough for 7"):
        next(iter(make(workers=0, replica=0, replicas=7, drop_last=True)))
    loader = make(Counting(), workers=0, replica=0, replicas=6)
    with pytest.raises(DataError, match="5 samples for 6 replicas: set drop_last=True"):
        list(loader)


# --------------------------------------------------------------------------------------------------- faults


def fails_at(number: int, error: Exception) -> Any:
    def transform(value: int) -> Any:
        if value == number:
            raise error
        return noisy(value)

    return transform


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_that_raises(workers: int) -> None:
    loader = make(workers=workers, transform=fails_at(20, ZeroDivisionError("at twenty")))
    found: list[Any] = []
    with pytest.raises(DataError, match=r"sample 20 of Numbers: the transform failed: .*at twenty") as caught:
        found.extend(loader)
    assert any("in transform" in note for note in caught.value.__notes__)
    assert len(found) == 3
    loader.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_is_skipped_moves_nothing(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    want = run(make(workers=0), epochs=1)
    loader = make(workers=workers, on_error="skip", transform=fails_at(20, ValueError("x")))
    events: list[tuple[str, str]] = []
    loader.on_event = lambda kind, text: events.append((kind, text))
    batches = iter(loader)
    with caplog.at_level(logging.WARNING):
        found = [next(batches) for _ in range(5)]
    assert [kind for kind, _text in events] == ["data-skipped"]
    assert loader.skipped == 1
    assert "sample 20 of Numbers" in caplog.text
    again = make(workers=workers, on_error="skip", transform=fails_at(20, ValueError("x")))
    again.load_state_dict(loader.state_dict())
    found += list(again)
    assert again.skipped == 1
    ids = [[value[0] for value in batch[:-1]] for batch in found]
    assert ids == [[value[0] for value in batch[:-1] if value[0] != 20] for batch in want]
    loader.close()
    again.close()


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_what_is_wrong_with_the_machine_is_never_skipped(kind: str) -> None:
    loader = make(
        SOURCES[kind](), workers=1, on_error="skip", transform=fails_at(20, OSError(5, "I/O error"))
    )
    with pytest.raises(DataError, match=r"sample 20 of .*I/O error"):
        list(loader)
    loader.close()


def test_all_of_a_batch_skipped() -> None:
    def transform(value: int) -> int:
        if value < 6:
            raise ValueError
        return value

    with pytest.raises(DataError, match="every record of replica 0's part of batch 0"):
        next(iter(make(workers=0, on_error="skip", transform=transform)))


def test_a_stream_that_raises() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield from range(8)
            raise ValueError("the well is dry")

    loader = make(Broken(), workers=1, on_error="skip")
    with pytest.raises(DataError, match=r"Broken failed after 8 samples: .*the well is dry"):
        list(loader)
    loader.close()


def test_a_batch_that_cannot_be_sent() -> None:
    loader = make(workers=1, collate=lambda _values: object())
    with pytest.raises(UsageError, match="batch"):
        list(loader)
    loader.close()


def test_a_collate_that_raises() -> None:
    loader = make(workers=1, transform=lambda n: "word" if n == 1 else n, collate=None)
    with pytest.raises(DataError, match="batch 0 of epoch 0 cannot be collated"):
        list(loader)
    loader.close()


def test_a_transform_that_hangs() -> None:
    loader = make(workers=1, transform=lambda _n: time.sleep(600), timeout_s=0.3)
    with pytest.raises(DataError, match=r"no batch from producer [0-9]+ for 0 s"):
        list(loader)
    loader.close()


@pytest.mark.parametrize("kind", SOURCES)
def test_workers_that_are_killed(kind: str, caplog: pytest.LogCaptureFixture) -> None:

    def large(values: list[Any]) -> list[Any]:
        # More than a pipe holds: else a worker has sent everything before it is killed.
        return [*noisy_collate(values), bytes(200_000)]

    want = run(make(SOURCES[kind](), workers=0, collate=large), epochs=3)
    loader = make(SOURCES[kind](), workers=2, collate=large)
    chance = random.Random(3)
    found = []
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for batch in loader:
                found.append(batch)
                if chance.random() < 0.5:
                    os.kill(chance.choice(loader._pool.workers).pid, signal.SIGKILL)
    assert found == want
    assert "was killed by SIGKILL" in caplog.text
    loader.close()


def test_a_worker_that_dies_each_time() -> None:
    def transform(value: int) -> int:
        if value == 20:
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGBUS)
        return value

    loader = make(workers=2, transform=transform)
    with pytest.raises(DataError, match="batch 3 of epoch 0 was killed by SIGBUS: was a data file cut off"):
        list(loader)
    loader.close()


def test_workers_end_with_their_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        loader = make(workers=2)
        next(iter(loader))
        (tmp_path / "pids.part").write_text(json.dumps([worker.pid for worker in loader._pool.workers]))
        (tmp_path / "pids.part").rename(tmp_path / "pids")
        signal.pause()
    limit = time.monotonic() + 60
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < limit
        time.sleep(0.01)
    workers = json.loads((tmp_path / "pids").read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < limit
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forgotten_loader_ends_its_workers() -> None:
    loader = make(workers=2)
    next(iter(loader))
    assert len(children()) >= 2
    del loader


def test_a_second_iteration_ends_the_first() -> None:
    loader = make(workers=0)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(UsageError, match="another iteration"):
        next(first)


def test_evaluation_in_the_middle_of_training() -> None:
    training, evaluation = make(workers=1, shuffle=True), make(Numbers(10), workers=1, seed=9)
    want, want_again = run(make(workers=0, shuffle=True)), run(make(Numbers(10), workers=0, seed=9), epochs=1)
    found = []
    for _ in range(2):
        for batch in training:
            found.append(batch)
            if len(found) % 5 == 0:
                evaluation.set_epoch(0)
                assert list(evaluation) == want_again
    assert found == want
    training.close()
    evaluation.close()


# ----------------------------------------------------------------------------------------------------- files


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_a_corrupt_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*range(5), "{nothing}\n", *range(6, 12)])
    cache = Cache(tmp_path / "cache")

    def loader(on_error: str) -> MappedLoader:
        source = JsonLines(path, cache=cache)
        return MappedLoader(source, batch_size=4, on_error=on_error, collate=list, workers=2)

    with pytest.raises(DataError, match=r"a\.jsonl, line 6 \(byte 10\)"):
        run(loader("raise"))
    skipping = loader("skip")
    assert list(skipping) == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
    assert skipping.skipped == 1
    skipping.close()


def test_other_data_than_the_positions(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.jsonl", list(range(40))), Cache(tmp_path / "cache")

    def loader(**options: Any) -> MappedLoader:
        options = {"batch_size": 4, "collate": list, "workers": 0, **options}
        return MappedLoader(JsonLines(path, cache=cache), **options)

    first = loader()
    next(iter(first))
    state = first.state_dict()
    loader().load_state_dict(state)
    loader(transform=noisy, workers=1, replica=0, replicas=2).load_state_dict(state)
    for other in ({"seed": 1}, {"batch_size": 5}, {"shuffle": True}, {"drop_last": True}, {"version": "2"}):
        with pytest.raises(RecoveryError, match=r"a position|position is one in other data"):
            loader(**other).load_state_dict(state)
    write(path, list(range(41)))
    with pytest.raises(RecoveryError, match="position is one in other data"):
        loader().load_state_dict(state)


BAD_STATES: list[Any] = [
    {},
    {"format": 2, "order": "", "position": {}},
    {"format": 1, "order": "", "position": {"epoch": -1}},
    {"format": 1, "order": "", "position": None},
]


@pytest.mark.parametrize("state", BAD_STATES)
def test_a_state_that_is_none(state: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        make(workers=0).load_state_dict(state)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (None, {"batch_size": None}, "batch_size"),
    (None, {"on_error": "ignore"}, "'raise' or 'skip'"),
    (None, {"nonsense": 1}, "nonsense"),
    (None, {"workers": -1}, "workers"),
    (Counting(), {"shuffle": True}, "shuffle needs a source with a length"),
    (Counting(), {"pack": Pack(4)}, "pack needs a source with a length"),
    (None, {"pack": Pack(4), "transform": None}, "needs a transform"),
    (iter([1]), {}, "read once only"),
    (3, {}, "no source"),
    (DataLoader(Numbers()), {}, "leave batch_size, collate out"),
    (DataLoader(Numbers()), {"batch_size": None, "collate": None, "workers": 2}, "at most 1"),
]


@pytest.mark.parametrize(("source", "options", "words"), WRONG)
def test_a_users_mistake_is_one_sentence(source: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(source, **options)


def test_no_samples() -> None:
    with pytest.raises(CkptlessError, match="0 samples make no batch"):
        next(iter(make(Numbers(0), workers=0)))


def test_the_seam_to_what_keeps_batches() -> None:
    """Batches and positions, as of one producer."""
    loader = make(workers=0, shuffle=True)
    produced = list(loader.production.produce(DataPosition(epoch=1, batch=2)))
    assert [p.after for p in produced] == [DataPosition(1, n) for n in range(3, 8)]
    assert [p.batch for p in produced] == run(loader, epochs=2)[9:]
