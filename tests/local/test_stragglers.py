"""A rank of eight that is slower than the others is named soon, with what makes it so; nobody else is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .localrun import HERE, Job

RANK, FROM, TO, STEPS = 5, 40, 120, 180
DEADLINE_S = 120.0


def shown(job: Job, *options: str) -> dict[str, Any]:
    program = "from ckptless.daemon.ckptctl.main import main; main()"
    command = [sys.executable, "-c", program, "--state-dir", str(job.state_dir), "stragglers", "--json"]
    found: dict[str, Any] = json.loads(subprocess.check_output([*command, *options]))
    return found


@pytest.mark.parametrize("how", ["compute", pytest.param("data", marks=pytest.mark.slow)])
def test_a_slow_rank_is_named(tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    options = ["--job", "slow", "--nodes", 4, "--nproc-per-node", 2, "--tee", "none"]
    with Job(tmp_path, options, [HERE / "slow_script.py", STEPS, out, RANK, FROM, TO, 40, how]) as job:
        job.ended(0, DEADLINE_S)
        events = [event for event in job.ledger().events if event.kind.startswith("straggler")]
    begun, over = events
    assert begun.kind == "straggler", job.story()
    assert begun.text.startswith(f"rank {RANK} on node-{RANK // 2}: "), begun.text
    assert f", {how}; " in begun.text
    assert (over.kind, over.text) == ("straggler-over", f"rank {RANK} as fast as the others again")
    lines = (out / "steps.txt").read_text().splitlines()
    at = {int(step): float(time_s) for step, time_s in map(str.split, lines)}
    # The bar is 50; a busy machine, and the time until it is told, add to that.
    assert at[FROM] < begun.at_s < at[TO]
    found = shown(job)
    assert [one["rank"] for one in found["ranks"]] == list(range(8))
    assert (
        0.5 < sum(found["shares"][name] for name in ("compute", "data", "network", "waiting", "commit")) < 1.1
    )


@pytest.mark.slow
def test_a_slow_switch_is_named_as_a_whole(tmp_path: Path) -> None:
    options = ["--job", "switch", "--nodes", 5, "--domains", "s1,s1,s2,s3,s4", "--tee", "none"]
    script = [HERE / "slow_script.py", TO, tmp_path / "out", "0,1", 1, TO, 40, "compute"]
    with Job(tmp_path, options, script) as job:
        job.ended(0, DEADLINE_S)
        told = [event.text for event in job.ledger().events if event.kind == "straggler"]
    assert told[-1].startswith("failure domain s1, all of it (node-0, node-1): "), told
    rows = {row["domain"]: row["slow"] for row in shown(job, "--by", "domain")["domains"]}
    assert rows == {"s1": "compute", "s2": None, "s3": None, "s4": None}
    assert {row["node"]: row["slow"] for row in shown(job, "--by", "node")["nodes"]}[1] == "compute"


@pytest.mark.slow
def test_a_job_that_mostly_reduces_is_bound_by_the_network(tmp_path: Path) -> None:
    script = [HERE / "slow_script.py", 60, tmp_path / "out", -1, 0, 0, 0, "network"]
    with Job(tmp_path, ["--job", "bound", "--nodes", 2, "--tee", "none"], script) as job:
        job.ended(0, DEADLINE_S)
    assert shown(job)["bound"] == "network"


@pytest.mark.slow
def test_where_none_is_slow_none_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--job", "even", "--nodes", 4, "--nproc-per-node", 2, "--tee", "none"]
    with Job(tmp_path, options, [HERE / "slow_script.py", 1000, out, -1, 0, 0, 0, "compute"]) as job:
        job.ended(0, 6 * DEADLINE_S)
        assert [event.text for event in job.ledger().events if event.kind.startswith("straggler")] == []
