"""An agent that is stopped (SIGSTOP) is a node that is lost: nobody waits for it, in no part of a run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from ckptless.daemon.protocol.outcome import outcome_path

from .localrun import STEPS, Job, check, fault, newest_loss, read_toy, same_as_reference, toy, wait_until

pytestmark = pytest.mark.timeout(400)

DEADLINE_S = 90.0


def stop_agent(job: Job, node: int, what: str = "agent") -> int:
    pid = job.pid_of(node, what)
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


def of_node(job: Job, node: int) -> list[int]:
    """Return the processes that a node has of the job: its agent, and what that has started."""
    agent = job.pid_of(node, "agent")
    assert agent is not None
    found, left = [], [agent]
    while left:
        found.append(pid := left.pop())
        for task in Path(f"/proc/{pid}/task").iterdir():
            left += map(int, (task / "children").read_text().split())
    return found


def test_one_with_its_ranks_as_no_suspended_job_is(tmp_path: Path) -> None:
    """Its daemon lives, and the kernel answers for it; but other nodes are not stopped."""
    with toy(tmp_path, nodes=4, spares=1, env={"TOY_SLEEP_S": "0.05"}) as job:
        wait_until(lambda: newest_loss(tmp_path) >= 20, DEADLINE_S, job)
        for pid in of_node(job, 1):
            os.kill(pid, signal.SIGSTOP)
        job.ended(0, DEADLINE_S)
        ledger = same_as_reference(job, [])
        assert [one.kind for one in ledger.faults if one.kind != "broken"] == ["node-lost"]
        assert "its agent and ranks are stopped by a signal" in ledger.faults[0].detail


def test_when_training_is_over(tmp_path: Path) -> None:
    """The other nodes are done; what is left of the job does not wait for this one."""
    faults = [{"rank": 1, "where": "finish", "kind": "stop-agent"}]
    with toy(tmp_path, faults, nodes=2, steps=10) as job:
        job.launcher.wait(DEADLINE_S)
        job.nothing_left()


@pytest.mark.parametrize("what", ["agent", "daemon"])
def test_sigterm_with_one_that_is_stopped(tmp_path: Path, what: str) -> None:
    with toy(tmp_path, nodes=2, steps=100_000) as job:
        wait_until(lambda: len(read_toy(tmp_path / "out").losses) >= 3, DEADLINE_S, job)
        stop_agent(job, 0, what)
        job.launcher.send_signal(signal.SIGTERM)
        job.ended(128 + signal.SIGTERM, DEADLINE_S)
        # It goes on, and ends by itself; nobody waits until it has to be killed.
        assert "does not end" not in job.stderr, job.story()
        outcomes = [outcome_path(job.state_dir / f"node-{node}") for node in range(2)]
        assert all(json.loads(path.read_text())["state"] == "stopped" for path in outcomes), job.story()


# ------------------------------------------------------------------------------- fifteen, at any moment

IN_A_STEP = ("forward", "backward", "update", "commit", "committed")
IN_A_RECOVERY = ("leave", "enter", "restore", "recovered")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_in_training_in_the_recovery_from_that_and_at_the_end(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    faults = [
        fault(draw.choice(IN_A_STEP), "stop-agent", draw.randrange(4), draw.randrange(5, STEPS - 5)),
        fault(IN_A_RECOVERY[seed], "stop-agent", draw.randrange(4), after=0),
        fault("finish", "stop-agent", draw.randrange(4)),
    ]
    found = check(tmp_path, faults, spares=3)
    assert found["node-lost"] == 3
    assert set(found) <= {"node-lost", "broken"}  # as who was connected to it says it


@pytest.mark.slow
def test_while_the_job_forms(tmp_path: Path) -> None:
    """One that trains and a spare while they start up, and one in training."""
    draw = random.Random(4)
    faults = [fault("update", "stop-agent", 2, draw.randrange(5, STEPS - 5))]
    with toy(tmp_path, faults, spares=3) as job:
        for node in (draw.randrange(3), 5):
            wait_until(partial(job.pid_of, node, "agent"), DEADLINE_S, job)
            time.sleep(draw.uniform(0.0, 1.0))
            stop_agent(job, node)
        job.ended(0, 350.0)
        same_as_reference(job, faults)
