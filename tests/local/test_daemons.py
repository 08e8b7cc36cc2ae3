"""Daemons may be killed at any time: training does not notice, and recovery only waits for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .localrun import Fault, Job, read_toy, same_as_reference, toy, wait_until

DEADLINE_S = 60.0


def newest(job: Job) -> tuple[int, int]:
    """(generation, step): the newest step that every rank has made, and the newest generation that trains."""
    found = read_toy(job.home / "out")
    steps = [max((s for r, s in found.losses if r == rank), default=0) for rank in range(4)]
    return max(found.generations, default=0), min(steps)


def trains_on(job: Job, generation: int, steps: int = 4) -> None:
    """Until some more steps are made in this generation or a later one."""
    wait_until(lambda: newest(job)[0] >= generation, DEADLINE_S, job)
    start = newest(job)[1]
    wait_until(lambda: newest(job)[1] >= start + steps, DEADLINE_S, job)


def kill(pid: int | None) -> int:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def kill_daemon(job: Job, node: int) -> int:
    return kill(job.pid_of(node, "daemon"))


def kill_rank(job: Job, rank: int) -> None:
    kill(int((job.home / "out" / f"pid-{rank}.txt").read_text().split()[0]))


def back(job: Job, node: int, old: int) -> None:
    """Until a node's daemon has been started again and has heard of its agent."""

    def known() -> bool:
        pids = {n.daemon_pid for n in job.ledger().nodes if n.node == node}
        return job.pid_of(node, "daemon") in pids and old not in pids

    wait_until(known, DEADLINE_S, job)


def test_daemons_and_agents_are_killed(tmp_path: Path) -> None:
    # Slow for as long as this file is there, so that the end does not come before the last fault.
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": "0.2", "TOY_SLEEP_WHILE": str(slow)}
    with toy(tmp_path, spares=1, env=env) as job:
        trains_on(job, 1)
        # A follower's, and the leader's: nothing happens.
        for node in (2, 0):
            old = kill_daemon(job, node)
            trains_on(job, 1)
            back(job, node, old)
            assert newest(job)[0] == 1
        kill_rank(job, 1)
        trains_on(job, 2)
        assert newest(job)[0] == 2
        # A daemon, and a rank of its node before it can be back.
        old = kill_daemon(job, 1)
        kill_rank(job, 1)
        trains_on(job, 3)
        back(job, 1, old)
        # The one that leads now or once did, and a rank elsewhere.
        old = kill_daemon(job, 0)
        kill_rank(job, 2)
        trains_on(job, 4)
        back(job, 0, old)
        # An agent alone: its node is lost, and the spare takes over.
        kill(job.pid_of(3, "agent"))
        trains_on(job, 5)
        slow.unlink()
        job.ended(0, 150.0)
        ledger = same_as_reference(job, [])
    generations = ledger.generations
    assert generations[-1].places[3] == (4, 0)
    assert [f.kind for f in ledger.faults].count("node-lost") == 1
    assert len(generations) == 5


def test_daemons_die_in_the_middle_of_recoveries(tmp_path: Path) -> None:
    """A rank dies; then the leader's daemon, or another, in each phase of the recovery from that."""
    faults: list[Fault] = []
    for number, phase in enumerate(("leave", "enter", "restore", "forward")):
        for node in (0, 1):
            step = 5 + 40 * number + 20 * node
            faults.append({"rank": 2 + node, "where": "forward", "kind": "kill", "step": step})
            faults.append({"rank": node, "where": phase, "kind": "daemon", "after": len(faults) - 1})
    with toy(tmp_path, faults) as job:
        job.ended(0, 200.0)
        same_as_reference(job, faults)
