"""Faults that somebody has asked for: the job goes on, no bit is another, and all that is told says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .localrun import Job, newest_loss, read_toy, recovered, same_as_reference, toy, wait_until

DEADLINE_S = 60.0
# Each call of ckptctl takes some steps.
RANKS, STEPS = 2, 500


def ckptctl(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    program = "from ckptless.daemon.ckptctl.main import main; main()"
    command = [sys.executable, "-c", program, "--state-dir", str(job.state_dir), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def drill(job: Job, *words: str) -> tuple[int, Any]:
    """`ckptctl drill`: its exit code, and the answer."""
    (run,) = job.ledger().jobs
    done = ckptctl(job, "--json", "drill", run.job, "--yes", *words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["drilled"]


def is_done(job: Job, *words: str) -> None:
    """It is taken; for a moment after another one it may not be."""
    said: list[Any] = []

    def taken() -> bool:
        code, answer = drill(job, *words)
        said.append(answer["text"])
        assert code == 0 or "one is under way" in said[-1] or "it does not train" in said[-1], said
        return code == 0

    wait_until(taken, DEADLINE_S, job)


def trains(job: Job, generation: int) -> None:
    """Until a step is made in this generation, and some more."""

    def newest() -> int:
        return max(read_toy(job.home / "out").generations, default=0)

    wait_until(lambda: newest() >= generation, DEADLINE_S, job)
    start = newest_loss(job.home)
    wait_until(lambda: newest_loss(job.home) >= start + 4, DEADLINE_S, job)
    assert newest() == generation


def test_every_kind_in_one_job(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": "0.1", "TOY_SLEEP_WHILE": str(slow)}
    with toy(tmp_path, nodes=RANKS, steps=STEPS, spares=1, env=env) as job:
        trains(job, 1)
        step = newest_loss(tmp_path) + 20
        code, answer = drill(job, "--kill-rank", "1", "--when", f"step={step}")
        assert (code, answer["verdict"]) == (0, "accepted"), answer
        code, answer = drill(job, "--kill-rank", "0")
        assert (code, answer["verdict"]) == (1, "refused"), answer
        assert "another one waits for its step: rank 1's process is killed" in answer["text"]
        trains(job, 2)
        assert newest_loss(tmp_path) > step
        # Longer than a rank may be silent: it is found as one that hangs.
        is_done(job, "--pause", "0", "--for", "60")
        trains(job, 3)
        # Shorter: the others wait for it, and nothing else happens.
        is_done(job, "--pause", "1", "--for", "1")
        trains(job, 3)
        is_done(job, "--kill-agent", "node-1")
        trains(job, 4)
        assert job.pid_of(1, "agent") is None
        assert job.pid_of(1, "daemon") is not None
        code, answer = drill(job, "--kill-agent", "0")
        assert (code, answer["verdict"]) == (1, "refused")
        assert "no spare" in answer["text"]
        code, answer = drill(job, "--kill-rank", "2")
        assert (code, answer["verdict"]) == (1, "refused")
        assert "there is no rank 2" in answer["text"]
        status, timeline = ckptctl(job, "status").stdout, ckptctl(job, "timeline").stdout
        slow.unlink()
        job.ended(0, 150.0)
        ledger = same_as_reference(job, [], STEPS, ranks=RANKS)
    assert len(recovered(ledger)) == 3
    assert {fault.source for fault in ledger.faults} == {"drill"}, ledger.faults
    causes = [(f.kind, f.rank, f.node) for f in ledger.faults if f.kind not in ("broken", "stall")]
    assert causes == [("died", 1, 1), ("hung", 0, 0), ("node-lost", None, 1)]
    assert [(g.rung, g.places) for g in ledger.generations] == [
        ("start", ((0, 0), (1, 0))),
        ("process", ((0, 0), (1, 0))),
        ("process", ((0, 0), (1, 0))),
        ("spare", ((0, 0), (2, 0))),
    ]
    told = [event.text for event in ledger.events if event.kind == "drill"]
    assert len([text for text in told if "asks for a drill" in text]) == 4
    assert len([text for text in told if text.startswith("drill of uid ")]) == 4
    assert all(" (drill)" in e.text for e in ledger.events if e.kind in ("died", "hung", "node-lost"))
    assert "last drill:" in status
    assert "node-lost (drill)" in status
    assert all(f"{kind} (drill)" in timeline for kind in ("died", "hung", "node-lost"))


def test_a_step_that_does_not_come(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    env = {"TOY_SLEEP_S": "0.1", "TOY_SLEEP_WHILE": str(slow)}
    with toy(tmp_path, nodes=RANKS, steps=STEPS, env=env) as job:
        trains(job, 1)
        assert drill(job, "--kill-rank", "0", "--when", "step=100000", "--deadline", "1")[0] == 0

        def told() -> bool:
            return any(
                e.kind == "drill" and e.text.startswith("not done in time") for e in job.ledger().events
            )

        wait_until(told, DEADLINE_S, job)
        # There is room for another one.
        is_done(job, "--kill-rank", "1")
        trains(job, 2)
        slow.unlink()
        job.ended(0, 150.0)
        same_as_reference(job, [], STEPS, ranks=RANKS)
