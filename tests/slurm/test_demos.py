"""`make demo` and its kin, which the README and the quickstart begin with, on a machine that is set up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import require_slurm
from .training import ROOT

DEADLINE_S = 600.0
# The elastic demo has a bar for a duration, which is no test's business.
LATE = "the job of higher priority waited"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 30)]


def make(target: str, said: str = "", args: str = "") -> str:
    """Run it as a reader does, but with the environment that runs this; return what it printed."""
    done = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), f"VENV={sys.prefix}", target],
        input=said,
        env={**os.environ, "ARGS": args},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    wrong = done.stdout.partition("NOT as it should be:\n")[2].splitlines()
    assert done.returncode == 0 or (wrong and all(LATE in line for line in wrong)), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("target", ["demo", "slurm-demo", "elastic-demo"])
def test_a_demo(tmp_path: Path, target: str) -> None:
    if target != "demo":
        require_slurm()
    make(target, args=f"--out {tmp_path / 'out'}")


def test_the_prompt_on_a_cluster() -> None:
    require_slurm()
    assert "idle" in make("slurm-shell", "sinfo\n", "--nodes 3")
