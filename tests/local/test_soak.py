"""Half an hour without a fault where nobody gets the CPU he wants: nobody is accused of anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .localrun import read_toy, toy, wait_until

SOAK_S = float(os.environ.get("CKPTLESS_SOAK_S", "1800"))
BUSY_PER_CORE = 2

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SOAK_S + 600)]


@contextmanager
def starvation() -> Iterator[None]:
    """As many processes that never sleep as it takes for everybody else to wait."""
    count = BUSY_PER_CORE * (os.cpu_count() or 1)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_nobody_is_accused_while_all_are_starved(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": "2.0", "TOY_SLEEP_WHILE": str(slow)}
    options = ["--max-stall", "300"]
    steps = int(SOAK_S)
    with starvation(), toy(tmp_path, spares=1, steps=steps, options=options, env=env) as job:
        wait_until(lambda: read_toy(job.home / "out").losses, 300.0, job)
        end = time.monotonic() + SOAK_S
        wait_until(lambda: time.monotonic() > end, SOAK_S + 60.0, job)
        ledger = job.ledger()
        newest = max(step for _, step in read_toy(job.home / "out").losses)
        print(f"{newest} steps, load {os.getloadavg()}, {len(ledger.events)} events")
    assert not ledger.faults
    assert [row.generation for row in ledger.generations] == [1]
    assert not [event for event in ledger.events if event.kind in ("fenced", "node-lost", "leader")], (
        ledger.events
    )
