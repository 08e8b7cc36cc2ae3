"""What docs/tutorials shows: each script, started by its page's own command, goes on as the page says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptless.daemon.ckptctl.main import ckptctl

from .localrun import Job, wait_until

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"^\$ ckptless-run --local (.*)$", re.MULTILINE)
DEADLINE_S = 100.0
pytestmark = pytest.mark.timeout(4 * DEADLINE_S)


def block(page: str, language: str) -> str:
    """The first one in this language."""
    found = [text for word, text in BLOCK.findall((PAGES / page).read_text()) if word == language]
    return str(found[0])


def start(home: Path, page: str, steps: int) -> Job:
    """The page's job, in the page's folder, with so many steps (or epochs) instead of the page's."""
    found = OURS.search((PAGES / page).read_text())
    assert found is not None
    *options, script, _steps = shlex.split(found[1])
    if "--state-dir" in options:
        # That of a test is its own.
        at = options.index("--state-dir")
        del options[at : at + 2]
    return Job(home, ["--max-stall", 60, *options], [script, steps], cwd=home)


def says(job: Job, words: str) -> None:
    wait_until(lambda: words in job.stdout, DEADLINE_S, job)


def trains(job: Job, rank: int) -> int:
    """Wait until this rank has made its first steps; return its process."""
    wait_until(
        lambda: any(s.rank == rank and (s.step or 0) >= 3 for s in job.ledger().slots), DEADLINE_S, job
    )
    (pid,) = [one.pid for one in job.ledger().slots if one.rank == rank]
    assert pid is not None
    return pid


def ask(job: Job, *words: str) -> None:
    """A command of ckptctl's, which must do what it is asked for."""
    done = CliRunner().invoke(ckptctl, ["--state-dir", str(job.state_dir), *words])
    assert done.exit_code == 0, done.output


def test_the_first_job_outlives_a_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("first-job.md", "python"))
    with start(tmp_path, "first-job.md", 50) as job:
        os.kill(pid := trains(job, 1), signal.SIGKILL)
        job.ended(0, DEADLINE_S)
        assert f"[ckptless] rank 1 on node-1 (slot 0, pid {pid}) was ended by SIGKILL" in job.stdout
        assert "[rank 0] step 50, loss " in job.stdout


def changed(home: Path, page: str = "your-script.md") -> None:
    """Save the plain script, and beside it what the page's diff makes of it."""
    plain = block(page, "python")
    for name in ("plain.py", "train.py"):
        (home / name).write_text(plain)
    diff = f"--- a/train.py\n+++ b/train.py\n{block(page, 'diff')}"
    subprocess.run(
        ["git", "apply", "-"],
        cwd=home,
        input=diff,
        text=True,
        check=True,
    )


def test_a_script_prints_the_same_before_the_change_and_after(tmp_path: Path) -> None:
    changed(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "plain.py", "2"]
    before = subprocess.run(
        torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    ).stdout.splitlines()
    with start(tmp_path, "your-script.md", 2) as job:
        job.ended(0, DEADLINE_S)
        assert [line.removeprefix("[rank 0] ") for line in job.stdout.splitlines()] == before
    assert len(before) == 2


def test_the_changed_script_is_rehearsed(tmp_path: Path) -> None:
    changed(tmp_path)
    command = [sys.executable, "-m", "ckptless.daemon.launch.main", "--rehearse", "train.py", "20"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all of it is the same, bit for bit" in done.stdout + done.stderr


def test_a_lightning_script_outlives_a_rank_and_prints_the_same(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    changed(tmp_path, "lightning.md")
    with start(tmp_path, "lightning.md", 4) as job:
        os.kill(pid := trains(job, 1), signal.SIGKILL)
        job.ended(0, DEADLINE_S)
        assert f"[ckptless] rank 1 on node-1 (slot 0, pid {pid}) was ended by SIGKILL" in job.stdout
        losses = re.findall(r"^\[rank 0\] (epoch .*)$", job.stdout, re.MULTILINE)
    plain = subprocess.run(
        [sys.executable, "plain.py", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    ).stdout
    assert losses == re.findall(r"^epoch .*$", plain, re.MULTILINE)
    assert len(losses) == 4


def test_a_sharded_job_outlives_a_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("fsdp2.md", "python"))
    with start(tmp_path, "fsdp2.md", 100) as job:
        trains(job, 1)
        ask(job, "drill", "shards", "--kill-agent", "node-1", "--yes")
        says(job, "[ckptless] generation 2 trains")
        job.ended(0, DEADLINE_S)
        assert "[rank 0] step 100, loss " in job.stdout


def test_an_elastic_job_shrinks_and_grows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("elastic.md", "python"))
    with start(tmp_path, "elastic.md", 15) as job:
        trains(job, 2)
        ask(job, "resize", "el", "--nodes", "1")
        says(job, "[rank 0] 1 ranks instead of 3, after step ")
        says(job, "[ckptless] generation 2 trains")
        ask(job, "resize", "el", "--nodes", "max")
        says(job, "[rank 0] 3 ranks instead of 1, after step ")
        job.ended(0, DEADLINE_S)
        assert "[rank 0] epoch 14, 16 samples a rank" in job.stdout
