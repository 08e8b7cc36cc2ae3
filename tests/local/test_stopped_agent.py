"""An agent that is stopped (SIGSTOP) is a node that is lost: nobody waits for it, in no part of a run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from localrun import Job, newest_loss, read_toy, same_as_reference, toy, wait_until

pytestmark = pytest.mark.timeout(240)

DEADLINE_S = 90.0


def stop_agent(job: Job, node: int) -> int:
    pid = job.pid_of(node, "agent")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_before_it_is_up(tmp_path: Path) -> None:
    """Ctrl-C is answered at once all the same."""
    with toy(tmp_path, nodes=2, steps=100_000) as job:
        wait_until(lambda: job.pid_of(1, "agent"), DEADLINE_S, job)
        stop_agent(job, 1)
        job.launcher.send_signal(signal.SIGINT)
        job.ended(128 + signal.SIGINT, DEADLINE_S)
        assert "SIGKILL" not in job.stderr


def test_in_the_middle_the_spare_takes_over(tmp_path: Path) -> None:
    with toy(tmp_path, nodes=4, spares=1, env={"TOY_SLEEP_S": "0.05"}) as job:
        wait_until(lambda: newest_loss(tmp_path) >= 20, DEADLINE_S, job)
        stop_agent(job, 1)
        job.ended(0, DEADLINE_S)
        ledger = same_as_reference(job, [])
        assert "does not answer" in ledger.faults[0].detail


def test_when_training_is_over(tmp_path: Path) -> None:
    """The other nodes are done; what is left of the job does not wait for this one."""
    faults = [{"rank": 1, "where": "finish", "kind": "stop-agent"}]
    with toy(tmp_path, faults, nodes=2, steps=10) as job:
        job.launcher.wait(DEADLINE_S)
        job.nothing_left()


def test_sigterm_with_a_stopped_agent(tmp_path: Path) -> None:
    with toy(tmp_path, nodes=2, steps=100_000) as job:
        wait_until(lambda: len(read_toy(tmp_path / "out").losses) >= 3, DEADLINE_S, job)
        stop_agent(job, 0)
        begun = time.monotonic()
        job.launcher.send_signal(signal.SIGTERM)
        job.ended(128 + signal.SIGTERM, DEADLINE_S)
        assert time.monotonic() - begun < 25.0, job.story()
