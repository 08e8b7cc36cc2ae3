"""Where the time of a real job's slots went, against what its ranks have measured themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ledger.store import Ledger
from tests.local.localrun import Job

SCRIPT = Path(__file__).parent / "spent_script.py"
STEPS = 100
# Steps are committed at 10, 20, ...: five steps are done again after the first, seven after the second.
KILLS = [[1, 35], [2, 67]]
REDONE = {*range(31, 36), *range(61, 68)}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    home = tmp_path_factory.mktemp("goodput")
    (home / "out").mkdir()
    options = ["--nodes", 2, "--nproc-per-node", 2, "--spares", 1]
    with Job(home, options, [SCRIPT, STEPS, home / "out", json.dumps(KILLS)]) as ended:
        assert ended.wait() == 0, ended.story()
    return ended


def lines(job: Job) -> list[tuple[int, float | None, bool]]:
    files = sorted((job.home / "out").glob("*.jsonl"))
    assert len(files) == 4
    return [tuple(json.loads(line)) for file in files for line in file.read_text().splitlines()]


def asked(job: Job, *words: str) -> dict[str, Any]:
    result = CliRunner().invoke(ckptctl, ["--state-dir", str(job.state_dir), "goodput", "--json", *words])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_steps_that_are_done_again_are_known_to_be_so(job: Job) -> None:
    told = lines(job)
    assert {step for step, _, redone in told if redone} == REDONE
    for step in range(1, STEPS + 1):
        times = [redone for number, _, redone in told if number == step]
        # First by all ranks, then, where that was lost, again.
        assert sorted(times) == [False] * 4 + [True] * (4 if step in REDONE else 0), step


def test_the_classes_are_what_the_ranks_have_measured(job: Job) -> None:
    (account,) = asked(job)["jobs"]
    seconds = account["seconds"]
    assert account["slots"] == 6
    assert sum(seconds.values()) == pytest.approx(account["wall_s"] * 6, rel=1e-9)
    assert account["excess_s"] <= 0.001 * account["total_s"]
    measured = {
        again: sum(took_s for _, took_s, redone in lines(job) if took_s is not None and redone is again)
        for again in (False, True)
    }
    forward = ("training", "data", "commit", "checkpoint")
    # What the script does between its own look at the clock and the commit's is less than a thousandth.
    assert sum(seconds[name] for name in forward) == pytest.approx(measured[False], rel=0.005)
    assert seconds["redone"] == pytest.approx(measured[True], rel=0.02)
    assert seconds["checkpoint"] >= 4 * 3 * 0.05
    for name in ("detect", "stop", "join", "restore", "first step", "start", "end", "unfinished", "spare"):
        assert seconds[name] > 0, name
    assert [name for name in ("untold", "planned", "queue", "lost") if seconds[name]] == []


def test_a_price_and_all_jobs(job: Job) -> None:
    one, all_jobs = asked(job, "--price", "3600"), asked(job, "--days", "1", "--price", "3600")
    assert one["jobs"] == all_jobs["jobs"]
    assert one["all"]["cost"] == pytest.approx(one["all"]["total_s"])
    table = CliRunner().invoke(
        ckptctl, ["--state-dir", str(job.state_dir), "goodput", "--all", "--price", "2"]
    )
    assert table.exit_code == 0, table.output
    assert "goodput" in table.stdout.splitlines()[0]
    assert "without spares" in table.stdout
    refused = CliRunner().invoke(ckptctl, ["--state-dir", str(job.state_dir), "goodput", "x", "--all"])
    assert refused.exit_code == 2
    assert "give one of them" in refused.stderr


def test_where_there_is_no_job_that_is_said(job: Job, tmp_path: Path) -> None:
    nothing = CliRunner().invoke(ckptctl, ["--state-dir", str(job.state_dir), "goodput", "--days", "1e-9"])
    assert (nothing.exit_code, "ended in the last 1e-09 days" in nothing.stderr) == (1, True), nothing.output
    with Ledger.open(tmp_path / "ledger.db"):
        pass
    nothing = CliRunner().invoke(ckptctl, ["--state-dir", str(tmp_path), "goodput", "--all"])
    assert (nothing.exit_code, nothing.stderr) == (1, "ckptctl: error: there is no job\n")


def test_a_picture(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "goodput.png"
    result = CliRunner().invoke(ckptctl, ["--state-dir", str(job.state_dir), "goodput", "--png", str(file)])
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")


PLAIN = """
import os, signal, sys, time
time.sleep(1)
if os.environ["RANK"] == "1" and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
"""


def test_of_a_plain_script_it_is_said_that_nothing_is_known(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    options = ["--nodes", 2, "--max-restarts", 1]
    with Job(tmp_path / "job", options, [script, tmp_path / "struck"]) as ended:
        assert ended.wait() == 0, ended.story()
    # Its processes were started again, and whoever did it has not seen a step.
    assert [(one.rung, one.outcome) for one in ended.ledger().recoveries] == [("process", "unwatched")]
    (account,) = asked(ended)["jobs"]
    told = {name for name, seconds in account["seconds"].items() if seconds}
    assert {"start", "untold"} <= told <= {"start", "untold", "detect", "stop", "leave", "agree"}
    assert (account["untold"], account["goodput"]) == (2, None)
    assert account["seconds"]["untold"] > 2 * 2 * 1.0
