"""A node is taken out of a running job by somebody's word: the spare takes over, and no bit is another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .localrun import Job, fault, read_toy, recovered, same_as_reference, toy, wait_until

DEADLINE_S = 60.0


def evict(job: Job, node: str, *words: str) -> tuple[int, Any]:
    """`ckptctl evict`: its exit code, and the answer."""
    (run,) = job.ledger().jobs
    program = "from ckptless.daemon.ckptctl.main import main; main()"
    command = [sys.executable, "-c", program, "--state-dir", str(job.state_dir), "--json"]
    command += ["evict", "--yes", *words, run.job, node]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["evicted"]


def trains(job: Job, generation: int, steps: int = 4) -> None:
    """Until some more steps are made in this generation."""

    def newest() -> int:
        found = read_toy(job.home / "out")
        if max(found.generations, default=0) < generation:
            return 0
        return min(max((s for r, s in found.losses if r == rank), default=0) for rank in range(4))

    wait_until(lambda: newest() > 0, DEADLINE_S, job)
    start = newest()
    wait_until(lambda: newest() >= start + steps, DEADLINE_S, job)


def test_nodes_are_taken_out_until_there_is_no_spare(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": "0.1", "TOY_SLEEP_WHILE": str(slow)}
    with toy(tmp_path, spares=2, env=env) as job:
        trains(job, 1)
        code, answer = evict(job, "node-2", "--reason", "ECC errors")
        assert (code, answer["verdict"], answer["node"]) == (0, "accepted", 2), answer
        trains(job, 2)
        wait_until(lambda: job.pid_of(2, "agent") is None, DEADLINE_S, job)
        assert job.pid_of(2, "daemon") is not None
        code, answer = evict(job, "2")
        assert (code, answer["verdict"]) == (0, "already"), answer
        # The leader's own.
        assert evict(job, "0", "--source", "health", "--reason", "GPU 3 is gone")[0] == 0
        trains(job, 3)
        code, answer = evict(job, "1")
        assert (code, answer["verdict"]) == (1, "refused")
        assert "no spare" in answer["text"]
        trains(job, 3)
        slow.unlink()
        job.ended(0, 150.0)
        ledger = same_as_reference(job, [])
    assert [g.places for g in ledger.generations][-1] == ((5, 0), (1, 0), (4, 0), (3, 0))
    assert len(recovered(ledger)) == 2
    lost = [(f.node, f.source) for f in ledger.faults if f.kind == "node-lost"]
    assert lost == [(2, "operator"), (0, "health")]
    told = [event for event in ledger.events if event.kind == "evicted"]
    assert len(told) == 2
    assert told[0].text.startswith("node-2 (node-2, rank 2) is taken out by uid ")
    assert told[0].text.endswith(": ECC errors")
    assert told[0].about is not None
    assert told[0].about.node == 2
    assert "by a health check" in told[1].text
    assert not [event for event in ledger.events if event.kind == "node-lost"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_move_before_their_node_is_out(tmp_path: Path, parallel: str) -> None:
    """And all train for as long as it takes the spare to build for the rank that it gets, and to get state.

    By the ring it holds nothing of that rank.
    """
    slow, hold = tmp_path / "slow", tmp_path / "out" / "hold"
    slow.touch()
    env = {"TOY_SLEEP_S": "0.1", "TOY_SLEEP_WHILE": str(slow), "TOY_PARALLEL": parallel}
    builds = fault("build", "hold", 1, often=True)
    with toy(tmp_path, [builds], spares=1, env=env) as job:
        trains(job, 1)
        hold.touch()
        assert evict(job, "node-1", "--planned")[1]["verdict"] == "accepted"
        wait_until(lambda: told(job, "prepares"), DEADLINE_S, job)
        trains(job, 1, 20)
        assert evict(job, "node-1", "--planned")[1]["verdict"] == "already"
        assert read_toy(job.home / "out").generations == {1}
        hold.unlink()
        trains(job, 2)
        wait_until(lambda: job.pid_of(1, "agent") is None, DEADLINE_S, job)
        slow.unlink()
        job.ended(0, 150.0)
        ledger = same_as_reference(job, [], parallel=parallel)
    assert ledger.generations[-1].places == ((0, 0), (4, 0), (2, 0), (3, 0))
    (leaves,) = told(job, "leaves")
    (step,) = map(int, re.findall(r"; where they go there is step (\d+)$", leaves))
    restored = ledger.generations[-1].restore_step
    assert restored is not None
    # The others may be stopped as they are about to keep that step, and it is made again.
    assert 20 < step <= restored + 1
    assert ledger.faults == ()
    assert [(r.rung, r.outcome) for r in ledger.recoveries] == [("spare", "recovered")]
    assert [text for kind in ("not-prepared", "stays") for text in told(job, kind)] == []
    assert told(job, "evicted") == ["node-1 (node-1, no rank) is taken out by uid 0"]


def told(job: Job, kind: str) -> list[str]:
    return [event.text for event in job.ledger().events if event.kind == kind]
