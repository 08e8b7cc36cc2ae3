"""A script that is no function: after a fault new processes run it from its begin, and go on at the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from .frameworks import RANKS, plain, told
from .localrun import FAULTY_DEADLINE_S, HERE, Job

SCRIPT = HERE / "protected_script.py"
STEPS = 12


@pytest.mark.parametrize(
    "faults",
    ["", "0:1,4:0,5:1,11:0", "-1:1,3:0", "raise:6:1"],
    ids=["none", "killed", "killed before keep", "raises"],
)
def test_it_ends_as_without_faults(tmp_path: Path, faults: str) -> None:
    options = ["--nodes", RANKS, "--tee", "none", "--max-stall", 60]
    with Job(tmp_path / "job", options, [SCRIPT, tmp_path / "ours", STEPS, faults]) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = job.ledger()
        struck = [one.kind for one in ledger.faults if one.kind != "broken"]
        assert struck == ["raised" if "raise" in one else "died" for one in faults.split(",") if one]
        # A process that lives is good for nothing else, and is no fault.
        assert len(ledger.recoveries) == len(struck)
        assert not ledger.problems
    assert told(tmp_path / "ours") == plain(SCRIPT, tmp_path, STEPS, {})


def test_workers_of_rpc_meet_again(tmp_path: Path) -> None:
    env = {"RPC": "1"}
    options = ["--nodes", RANKS, "--tee", "none", "--max-stall", 60]
    with Job(tmp_path / "job", options, [SCRIPT, tmp_path / "ours", STEPS, "3:1,7:0"], env) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        # Who asks the one that died raises, too.
        kinds = [one.kind for one in job.ledger().faults if one.kind not in ("broken", "raised")]
        assert kinds == ["died", "died"], job.story()
    assert told(tmp_path / "ours") == plain(SCRIPT, tmp_path, STEPS, env)


def test_its_exit_code_is_the_job_s(tmp_path: Path) -> None:
    options = ["--nodes", RANKS, "--tee", "none"]
    with Job(tmp_path / "job", options, [SCRIPT, tmp_path / "ours", 2, ""], {"CODE": "7"}) as job:
        job.ended(7, FAULTY_DEADLINE_S)


def test_a_spare_that_nobody_needs_ends_with_the_job(tmp_path: Path) -> None:
    options = ["--nodes", RANKS, "--spares", 1, "--tee", "none"]
    with Job(tmp_path / "job", options, [SCRIPT, tmp_path / "ours", 2, ""]) as job:
        job.ended(0, FAULTY_DEADLINE_S)
