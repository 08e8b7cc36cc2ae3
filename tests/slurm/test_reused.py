"""Slurm gives a job's number once more: the new job trains, and has a story of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cluster.api import Cluster
from .conftest import require_slurm
from .training import STEPS, Training, make_site

NUMBER = 10
# slurmctld forgets a job so soon after its end.
FORGOTTEN_S = 60.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    conf = {"FirstJobId": str(NUMBER), "MaxJobId": str(NUMBER + 1), "MinJobAge": "2"}
    place = tmp_path_factory.mktemp("site") / "cluster"
    with make_site(place, tmp_path_factory.mktemp("spank"), 3, conf) as up:
        yield up


def is_known(site: Cluster) -> bool:
    return site.run("ctl", "scontrol", "show", "job", str(NUMBER), check=False).returncode == 0


@pytest.mark.parametrize(
    ("srun", "restart"),
    [(False, False), (False, True), (True, True)],
    ids=["batch", "restart", "srun"],
)
def test_a_number_that_comes_again(site: Cluster, srun: bool, restart: bool) -> None:
    """The same user, script and daemons; in another folder, so that the run has the same name, too."""
    stories: list[set[str]] = []
    for steps in (STEPS, STEPS + 10):
        job = Training(site, nodes=3, spares=1, steps=steps, options=("--ntasks-per-node=2",), srun=srun)
        job.submit().hurry()
        assert job.job_id == NUMBER
        job.wait(lambda job=job: job.outcome() is not None, "an outcome")  # type: ignore[misc]
        job.same_bits()
        job.wait(lambda job=job: job.row() == ("done", 0), "its row is closed")  # type: ignore[misc]
        ledger = job.ledger().of_job(job.run_name)
        assert len(ledger.generations) == 1, job.story()
        stories.append({event.event for event in ledger.events})
        job.nothing_left()
        job.wait(lambda: not is_known(site), "slurmctld forgets it", FORGOTTEN_S)
        for node in site.plan.node_names if restart else ():
            site.service_stop(node, "ckptlessd")
            site.service_start(node, "ckptlessd")
    assert stories[0]
    assert not stories[0] & stories[1]
