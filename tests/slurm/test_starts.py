"""Many starts in a row on one cluster, on a machine that has more to do than it can: every node comes up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from .cluster.api import Cluster
from .training import USER

STARTS = 50
NODES = 3
BURNERS = 5 * (os.cpu_count() or 1)
LONGEST_S = 110.0  # less than the job waits for its nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STARTS * 60)]


@pytest.fixture
def load() -> Iterator[None]:
    """Processes that take every CPU several times over."""
    with ExitStack() as burning:
        for _ in range(BURNERS):
            process = burning.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            burning.callback(process.kill)
        yield


def start(site: Cluster, number: int) -> float:
    """Submit a job that trains nothing, and wait for its end; seconds that it took."""
    place = f"/shared/start-{number}"
    site.run("ctl", "mkdir", place, user=USER)
    home = site.shared / place[8:]
    (home / "job.sh").write_text("#!/bin/bash\necho > t.py; ckptless-run t.py\n")
    words = ("sbatch", "--parsable", "--ckptless", f"--nodes={NODES}", "--exclusive", "job.sh")
    began = time.monotonic()
    job = site.run("ctl", *words, user=USER, cwd=place, timeout_s=LONGEST_S).stdout.strip()
    while True:
        said = site.run("ctl", "scontrol", "-o", "show", "job", job, timeout_s=LONGEST_S).stdout
        took_s = time.monotonic() - began
        if "JobState=COMPLETED" in said:
            return took_s
        states = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        running = any(f"JobState={word}" in said for word in states)
        if not running or took_s > LONGEST_S:
            logs = [path.read_text(errors="replace")[-2000:] for path in home.rglob("*") if path.is_file()]
            raise AssertionError("\n---\n".join([f"start {number}: {took_s:.0f} s", said, *logs]))
        time.sleep(0.2)


def test_fifty_starts_under_load(site: Cluster, load: None) -> None:
    took = sorted(start(site, number) for number in range(STARTS))
    print(f"{STARTS} starts: median {took[STARTS // 2]:.1f} s, longest {took[-1]:.1f} s")
