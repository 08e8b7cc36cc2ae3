"""An exact job has the same bits, whatever happens to it: those of one process alone."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simdev import build
from tests.simdev import device as simulated

from .localrun import Job, wait_until

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("exact_script.py")
SIMULATED = pytest.mark.skipif(simulated.missing() is not None, reason=str(simulated.missing()))
STEPS, DEADLINE_S = 200, 150.0
# Bits depend on it: the agents of a machine's nodes share its cores, a process alone would take all.
THREADS = {"OMP_NUM_THREADS": "1"}


def seen(folder: Path) -> dict[int, set[str]]:
    """Return what any rank noted of each step: loss, what was drawn outside, digest of the state."""
    found: dict[int, set[str]] = {}
    for step, _world, loss, jitter, _numbers, digest, _told in _lines(folder):
        found.setdefault(step, set()).add(f"{loss} {jitter} {digest}")
    return found


def worlds(folder: Path) -> set[int]:
    return {line[1] for line in _lines(folder)}


def _lines(folder: Path) -> list[Any]:
    lines = [
        line for path in folder.glob("seen-*.txt") for line in path.read_text().splitlines(keepends=True)
    ]
    # Whoever is killed may be in the middle of one.
    return [json.loads(line) for line in lines if line.endswith("\n")]


@functools.cache
def alone(device: str = "cpu", steps: int = STEPS) -> dict[int, set[str]]:
    """The run of one process, without a launcher; made once."""
    with tempfile.TemporaryDirectory(prefix="ckptless-exact-") as scratch:
        out = Path(scratch) / "out"
        words = [sys.executable, str(SCRIPT), str(steps), str(out)]
        subprocess.run(words, env={**os.environ, **on(device)}, cwd=scratch, check=True, timeout=DEADLINE_S)
        found = seen(out)
    assert sorted(found) == list(range(1, steps + 1))
    assert all(len(lines) == 1 for lines in found.values())
    return found


def on(device: str) -> dict[str, str]:
    """A script's environment; it imports from its own folder alone, else."""
    return {**THREADS, "EXACT_DEVICE": device, "PYTHONPATH": str(SCRIPT.parents[2])}


def run(home: Path, nodes: int, during: Callable[[Job], None], *options: object, device: str = "cpu") -> None:
    """A local run of so many nodes; its every step is that of the process alone."""
    words = ["--nodes", nodes, "--max-stall", 60, "--tee", "none", "--job", "exact", *options]
    env = {**on(device), "EXACT_SLEEP_S": "0.3" if options else "0"}
    (home / "out").mkdir(parents=True)
    with Job(home, words, [SCRIPT, STEPS, home / "out"], env) as job:
        during(job)
        (home / "out" / "fast").touch()
        job.ended(0, DEADLINE_S)
        found, wanted = seen(home / "out"), alone(device)
        wrong = {step: lines for step, lines in found.items() if lines != wanted.get(step)}
        assert not wrong, f"{sorted(wrong.items())[:3]}\n{job.story()}"
        assert found.keys() == wanted.keys()


def reached(job: Job, ranks: int) -> None:
    wait_until(lambda: ranks in worlds(job.home / "out"), DEADLINE_S, job)


def resize(job: Job, nodes: int) -> None:
    words: list[object] = ["--state-dir", job.state_dir, "resize", "exact", "--nodes", nodes]
    ckptctl = Path(sys.executable).with_name("ckptctl")
    subprocess.run([str(ckptctl), *map(str, words)], check=True, timeout=30)


@pytest.mark.parametrize("nodes", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_a_job_has_the_bits_of_one_process(tmp_path: Path, nodes: int) -> None:
    run(tmp_path, nodes, lambda _job: None)
    assert worlds(tmp_path / "out") == {nodes}


def test_resized(tmp_path: Path) -> None:
    def during(job: Job) -> None:
        reached(job, 4)
        for nodes in (2, 1):
            resize(job, nodes)
            reached(job, nodes)
        steps = max(seen(tmp_path / "out"))
        resize(job, 4)
        wait_until(
            lambda: any(line[0] > steps and line[1] == 4 for line in _lines(tmp_path / "out")), 60, job
        )

    policy = tmp_path / "policy.yaml"
    policy.write_text("nodes:\n" + "".join(f"  {n}: {{told: of {n}}}\n" for n in (1, 2, 3, 4)))
    policy.chmod(0o644)
    run(tmp_path, 4, during, "--min-nodes", 1, "--scale-up-after", 1, "--elastic-policy", policy)
    assert {1, 2, 4} <= worlds(tmp_path / "out")
    assert all(line[6] == f"of {line[1]}" for line in _lines(tmp_path / "out"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("simdev", marks=SIMULATED)])
def test_a_node_is_lost(tmp_path: Path, device: str) -> None:
    if device != "cpu":
        # Before any job: a rank that does so comes late.
        build.build()

    def during(job: Job) -> None:
        reached(job, 4)
        for what in ("daemon", "agent"):
            pid = job.pid_of(2, what)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        reached(job, 3)

    run(tmp_path, 4, during, "--min-nodes", 1, "--step", 1, device=device)
    assert {3, 4} <= worlds(tmp_path / "out")


CHANGES, NODES = 100, 4
SEED = int(os.environ.get("CKPTLESS_ELASTIC_SEED", "1"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_changes(tmp_path: Path) -> None:
    """Sizes and deaths of ranks, drawn by a seed: every step is that of one process alone, bit for bit."""
    out, draw, size = tmp_path / "out", random.Random(SEED), NODES
    print(f"seed {SEED}")
    options = ["--job", "exact", "--nodes", NODES, "--min-nodes", 1, "--max-stall", 60, "--tee", "none"]
    out.mkdir()
    with Job(tmp_path, [*options], [SCRIPT, 10**9, out], {**on("cpu"), "EXACT_SLEEP_S": "0.02"}) as job:
        reached(job, NODES)
        for _ in range(CHANGES):
            before = max(seen(out))
            victim = process_of(job, draw.randrange(size))
            if draw.random() < 0.7:
                size = draw.choice([one for one in range(1, NODES + 1) if one != size])
                resize(job, size)
            if draw.random() < 0.5 and victim is not None:
                time.sleep(draw.uniform(0.0, 0.6))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            wait_until(lambda b=before, s=size: goes_on(out, b, s), DEADLINE_S, job)  # type: ignore[misc]
        last = max(seen(out)) + 300
        (out / "new").write_text(str(last))
        (out / "new").rename(out / "last")
        (out / "fast").touch()
        job.ended(0, DEADLINE_S)
        found, wanted = seen(out), alone(steps=last)
        wrong = {step: lines for step, lines in found.items() if lines != wanted[step]}
        assert not wrong, f"{sorted(wrong.items())[:3]}\n{job.story()}"
        assert found.keys() == wanted.keys()
        assert len(job.ledger().generations) > CHANGES * 0.7


def process_of(job: Job, rank: int) -> int | None:
    found = {slot.rank: slot.pid for slot in job.ledger().slots}
    return found.get(rank)


def goes_on(out: Path, before: int, size: int) -> bool:
    """Whether so many ranks have made a step well beyond this one."""
    return any(line[0] > before + 3 and line[1] == size for line in _lines(out))
