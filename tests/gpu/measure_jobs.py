"""What jobs on a device take: to make their process groups, and to go on after a process was killed."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu import kind
from tests.local.localrun import FAULTY_DEADLINE_S, RANKS, Job, fault, on, recovered, toy

SCRIPT = Path(__file__).with_name("init_script.py")
DEADLINE_S = 120.0


def joined_s(out: Path, ranks: int) -> float:
    """Return the time from the last rank's begin to the last rank's end."""
    times = [tuple(map(float, one.read_text().split())) for one in out.glob("rank-*.txt")]
    assert len(times) == ranks
    return max(ended for _began, ended in times) - max(began for began, _ended in times)


def rootless_s(ranks: int) -> float:
    """Return how long it takes under ckptless-run."""
    with tempfile.TemporaryDirectory(prefix="ckptless-init-") as scratch:
        out = Path(scratch)
        options = ["--nodes", 1, "--nproc-per-node", ranks, "--tee", "none"]
        with Job(out / "job", options, [SCRIPT, out], on(kind.name())) as job:
            job.ended(0, DEADLINE_S)
        return joined_s(out, ranks)


def torchrun_s(ranks: int) -> float:
    """Return how long it takes under torchrun."""
    with tempfile.TemporaryDirectory(prefix="ckptless-init-") as scratch:
        out = Path(scratch)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = {**os.environ, **on(kind.name())}
        command = [sys.executable, *words, str(SCRIPT), str(out)]
        subprocess.run(command, env=env, check=True, timeout=DEADLINE_S, capture_output=True)
        return joined_s(out, ranks)


def joining(ranks: int, rounds: int) -> dict[str, float]:
    """Return the medians of both, taken in turns."""
    found = [(rootless_s(ranks), torchrun_s(ranks)) for _ in range(rounds)]
    rootless, root = zip(*found, strict=True)
    return {
        "ranks": ranks,
        "rounds": rounds,
        "rootless_s": statistics.median(rootless),
        "torchrun_s": statistics.median(root),
    }


def recoveries(kills: int) -> dict[str, float]:
    """Kill processes of a job of four, one after the other; return the median of each phase (seconds)."""
    faults = [fault("forward", "kill", number % RANKS, 3 * number + 3) for number in range(kills)]
    with (
        tempfile.TemporaryDirectory(prefix="ckptless-recoveries-") as scratch,
        toy(Path(scratch), faults, steps=3 * kills + 6, env=on(kind.name())) as job,
    ):
        job.ended(0, FAULTY_DEADLINE_S)
        found = recovered(job.ledger())
    phases = {name: statistics.median(one.phases[name] for one in found) for name in found[0].phases}
    whole = statistics.median(sum(one.phases.values()) for one in found)
    return {"recoveries": len(found), **phases, "whole": whole}
