"""What a worker says of a value: in how many seconds it was made; and words that no worker says."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ckptless.daemon.api import ring as m
from ckptless.pytorch_hooks.data import MappedLoader, workers
from ckptless.pytorch_hooks.data.order import position_of
from ckptless.pytorch_hooks.data.workers import Worker, WorkerDied

PAUSE_S = 0.05
DEADLINE_S = 60.0


def slow_ones() -> Iterator[int]:
    for number in range(3):
        time.sleep(PAUSE_S * (number + 1))
        yield number


def test_the_time_that_a_value_took_comes_with_it() -> None:
    worker = Worker(slow_ones)
    for number in range(3):
        assert worker.next(DEADLINE_S) == number
        assert worker.took_s >= PAUSE_S * (number + 1)
    worker.close()


@pytest.mark.parametrize(
    "frame",
    [(3, 1, 0), (255, 0, 0), (0, workers.LIMIT + 1, 0), (0, 1, 10**15 + 1), (0, 1, (1 << 64) - 1)],
)
def test_a_frame_that_no_worker_sends(frame: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def says(_make: Any, writer: int) -> int:
        os.write(writer, struct.pack("<BQQ", *frame))
        return 0

    monkeypatch.setattr(workers, "_serve", says)
    worker = Worker(slow_ones)
    with pytest.raises(WorkerDied, match=f"a frame of kind {frame[0]}, {frame[1]} bytes and {frame[2]} ns"):
        worker.next(DEADLINE_S)
    worker.close()


@pytest.mark.parametrize("took_s", [-1.0, float("nan"), float("inf"), 1e9, "1", None])
def test_a_time_that_no_producer_says(took_s: Any) -> None:
    sound = m.RingMade(stream=0, seq=1, nbytes=2, position=b"", took_s=0.5)
    said = msgspec.to_builtins(sound)
    assert msgspec.convert(said, m.RingMade) == sound
    data = msgspec.msgpack.encode({**said, "took_s": took_s})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=m.RingMade)


class Slow:
    """A map-style dataset whose samples take time."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(PAUSE_S)
        return index


def test_a_batch_took_what_its_samples_took() -> None:
    """And not what its worker was ahead of the others."""
    loader = MappedLoader(Slow(), batch_size=2, replica=0, replicas=1, workers=2)
    numbered = loader._numbered
    assert numbered is not None
    made = numbered.produce(0, numbered.before(position_of(loader.state_dict()["position"])))
    for _ in range(6):
        _seq, _batch, _after, took_s = next(made)
        assert took_s >= 2 * PAUSE_S
    made.close()  # type: ignore[attr-defined]
    loader.close()
