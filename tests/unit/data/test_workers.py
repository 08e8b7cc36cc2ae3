"""Frames that no worker sends."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from ckptless.pytorch_hooks.data import workers
from ckptless.pytorch_hooks.data.workers import Worker, WorkerDied

PAUSE_S = 0.05
DEADLINE_S = 60.0


def numbers() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize(
    "frame",
    [(3, 1), (255, 0), (0, workers.LIMIT + 1), (0, (1 << 64) - 1)],
)
def test_a_frame_that_no_worker_sends(frame: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def says(_make: Any, writer: int) -> None:
        os.write(writer, struct.pack("<BQ", *frame))

    monkeypatch.setattr(workers, "_serve", says)
    worker = Worker(numbers)
    with pytest.raises(WorkerDied, match=f"a frame of kind {frame[0]} and {frame[1]} bytes"):
        worker.next(DEADLINE_S)
    worker.close()
