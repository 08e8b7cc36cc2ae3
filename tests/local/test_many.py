"""More nodes than a daemon has neighbours: what they say to each other goes by way of others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ckptless.daemon.ckptlessd.membership.overlay import overlay

from .localrun import Job, read_toy, same_as_reference, toy, wait_until

DEADLINE_S = 90.0
RANKS, SPARES = 6, 5
NODES = RANKS + SPARES
STOPPED_S = 5.0


def newest(job: Job) -> tuple[int, int]:
    """The newest generation, and the step that every rank has made."""
    found = read_toy(job.home / "out")
    steps = [max((s for r, s in found.losses if r == rank), default=0) for rank in range(RANKS)]
    return max(found.generations, default=0), min(steps)


def trains(job: Job, generation: int, steps: int = 4) -> None:
    """Until some more steps are made in this generation."""
    wait_until(lambda: newest(job)[0] >= generation, DEADLINE_S, job)
    start = newest(job)[1]
    wait_until(lambda: newest(job)[1] >= start + steps, DEADLINE_S, job)
    assert newest(job)[0] == generation


def send(job: Job, node: int, what: str, number: signal.Signals) -> None:
    pid = job.pid_of(node, what)
    assert pid is not None
    os.kill(pid, number)


def test_eleven_nodes(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": "0.2", "TOY_SLEEP_WHILE": str(slow)}
    with toy(tmp_path, nodes=RANKS, spares=SPARES, env=env) as job:
        trains(job, 1)
        (run,) = job.ledger().jobs
        graph = overlay(run.job, tuple(range(NODES)))
        assert any(node not in graph.neighbours(0) for node in range(1, NODES))
        # Stopped daemons, the leader's too: their nodes live, and nobody thinks otherwise.
        for node in (2, 0):
            send(job, node, "daemon", signal.SIGSTOP)
            time.sleep(STOPPED_S)
            send(job, node, "daemon", signal.SIGCONT)
            trains(job, 1)
        # The leader's daemon and a rank elsewhere at once.
        send(job, 0, "daemon", signal.SIGKILL)
        os.kill(int((job.home / "out" / "pid-2.txt").read_text().split()[0]), signal.SIGKILL)
        trains(job, 2)
        # A node as a whole, that of whoever leads or led first; then one that had a rank.
        for generation, node in ((3, 0), (4, 3)):
            send(job, node, "agent", signal.SIGKILL)
            trains(job, generation)
        slow.unlink()
        job.ended(0, 150.0)
        ledger = same_as_reference(job, [], ranks=RANKS)
    assert [fault.node for fault in ledger.faults if fault.kind == "node-lost"] == [0, 3]
    assert len(ledger.generations) == 4
