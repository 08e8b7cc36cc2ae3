"""Jobs of steps that take now this long, now that, or on a machine without time: nobody hangs or is slow.

For as long as CKPTLESS_SOAK_S says, each: `make false-alarms SECONDS=3600`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptless.daemon.agent.core.stillness import FEWEST

from .localrun import HERE, Job

SECONDS = float(os.environ.get("CKPTLESS_SOAK_S", "120"))
RANKS = 4
pytestmark = [pytest.mark.slow, pytest.mark.timeout(10 * SECONDS + 400)]


@contextmanager
def others(count: int) -> Iterator[None]:
    """Have so many processes compute for ever."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in burners:
            one.kill()
            one.wait()


@pytest.mark.parametrize(("how", "load"), [("even", 20), ("wild", 0), ("wild", 20)])
def test_no_alarm_is_false(tmp_path: Path, how: str, load: int) -> None:
    options = ["--job", "wild", "--nodes", RANKS, "--tee", "none"]
    script = [HERE / "wild_script.py", SECONDS, tmp_path / "out", load, how]
    with Job(tmp_path, options, script) as job:
        with others(load):
            job.ended(0, 10 * SECONDS + 300.0)
        ledger = job.ledger()
    steps = int((tmp_path / "out" / "steps").read_text())
    print(f"{how} steps, {load} others compute: {steps} steps of {RANKS} ranks, {len(ledger.faults)} faults")
    # In fewer nobody has a rhythm to be late by.
    assert steps > 2 * FEWEST, job.story()
    assert ledger.faults == (), job.story()
    found = [f"{event.kind}: {event.text}" for event in ledger.events if event.kind in ("late", "straggler")]
    assert found == [], job.story()
