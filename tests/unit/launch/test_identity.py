"""What tells jobs of the same number apart, and what must not."""

import re

import pytest

from ckptless.daemon.launch.allocation import launch_id, run_id

JOB = {
    "SLURM_CLUSTER_NAME": "one",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_UID": "5001",
    "SLURM_SPANK_CKPTLESS_SUBMITTED": "1795445000000000000",
}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_JOB_START_TIME": "1795445001",
    "SLURM_STEP_LAUNCHER_PORT": "40123",
    "SLURM_SRUN_COMM_PORT": "40123",
}


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


def test_the_tasks_of_a_step_are_one_run() -> None:
    tasks = [
        {**STEP, "SLURM_PROCID": str(n), "SLURM_NODEID": str(n), "SLURMD_NODENAME": f"n{n}"} for n in "01"
    ]
    assert len({launch_id(task) for task in tasks}) == 1


@pytest.mark.parametrize("name", list(STEP))
def test_steps_of_other_jobs_and_starts_are_other_runs(name: str) -> None:
    assert launch_id({**STEP, name: "77"}) != launch_id(STEP)


def test_values_are_not_run_together() -> None:
    assert run_id({**JOB, "SLURM_CLUSTER_NAME": "one4", "SLURM_JOB_ID": "711"}) != run_id(JOB)
