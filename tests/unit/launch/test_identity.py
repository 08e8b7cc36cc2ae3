"""What tells jobs of the same number apart, and what must not."""

import re

import pytest

from ckptless.daemon.launch.identity import run_id

JOB = {"SLURM_CLUSTER_NAME": "one", "SLURM_JOB_ID": "4711", "SLURM_JOB_UID": "5001"}


def test_all_runs_of_a_job_have_the_same() -> None:
    mine = run_id(JOB)
    assert re.fullmatch("[0-9a-f]{32}", mine)
    again = {
        "SLURM_RESTART_COUNT": "3",
        "SLURM_JOB_START_TIME": "1",
        "SLURM_STEP_ID": "7",
        "SLURM_PROCID": "2",
    }
    assert run_id({**JOB, **again}) == mine


@pytest.mark.parametrize("name", list(JOB))
def test_other_jobs_have_another(name: str) -> None:
    assert run_id({**JOB, name: "77"}) != run_id(JOB)
    assert run_id({key: value for key, value in JOB.items() if key != name}) != run_id(JOB)


def test_values_are_not_run_together() -> None:
    other = {"SLURM_CLUSTER_NAME": "one4", "SLURM_JOB_ID": "711", "SLURM_JOB_UID": "5001"}
    assert run_id(other) != run_id(JOB)
