"""Stopped on real Slurm: an agent alone is a fault, a job as a whole (`scontrol suspend`) is none."""

from __future__ import annotations

import time

import pytest

from ckptless.daemon.protocol.records import FaultRecord

from .cluster.api import Cluster
from .training import USER, Training

NODES = 5
# With the site's max_stall of 60 s an agent that is silent for 6 s is ended, and a rank for 3 s.
SUSPENDED_S, LONG_S = 8.0, 90.0


@pytest.fixture(autouse=True)
def whole(site: Cluster) -> None:
    site.restore()


def faults(job: Training) -> list[FaultRecord]:
    return [fault for fault in job.ledger().faults if fault.job == job.run_name]


@pytest.mark.slow
def test_an_agent_is_stopped(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.run("node02", "pkill", "-STOP", "-u", USER, "-f", "ckptless.daemon.agent.main --slurm")
    job.trains(2)
    job.ended()
    job.same_bits()
    lost = [fault for fault in faults(job) if fault.kind == "node-lost"]
    assert [fault.node for fault in lost] == [1], f"{lost}\n{job.story()}"
    assert "its agent does not answer" in lost[0].detail


@pytest.mark.parametrize("seconds", [SUSPENDED_S, pytest.param(LONG_S, marks=pytest.mark.slow)])
def test_a_job_is_suspended_and_resumed(site: Cluster, seconds: float) -> None:
    job = Training(site).submit()
    job.trains()
    site.run("ctl", "scontrol", "suspend", str(job.job_id))
    job.wait(lambda: job.slurm("JobState") == "SUSPENDED", "Slurm has it suspended")
    time.sleep(seconds)
    stood = job.newest()
    site.run("ctl", "scontrol", "resume", str(job.job_id))
    job.wait(lambda: job.newest() > stood, "it goes on")
    job.ended()
    job.same_bits()
    assert not faults(job), f"{faults(job)}\n{job.story()}"
