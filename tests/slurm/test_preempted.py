"""Preemption with grace time, and other ends of Slurm's: what becomes of the job, and what users are told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cluster.api import Cluster
from .conftest import require_slurm
from .training import USER, Training, kept, make_site

NODES = 2
GRACE_S = 12
LINES = (
    f"PartitionName=again Nodes=ALL PriorityTier=1 GraceTime={GRACE_S} PreemptMode=REQUEUE",
    f"PartitionName=never Nodes=ALL PriorityTier=1 GraceTime={GRACE_S} PreemptMode=CANCEL",
    "PartitionName=first Nodes=ALL PriorityTier=10",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    place = tmp_path_factory.mktemp("site") / "cluster"
    conf = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    with make_site(place, tmp_path_factory.mktemp("spank"), NODES, conf, LINES) as up:
        yield up


def train(site: Cluster, *options: str, srun: bool = False) -> Training:
    options = ("--ntasks-per-node=2", *options)
    job = Training(site, nodes=NODES, spares=0, options=options, srun=srun).submit()
    job.trains()
    return job


def preempt(site: Cluster) -> None:
    words = ("sbatch", "--partition=first", f"--nodes={NODES}", "--exclusive", "--output=/dev/null")
    site.run("ctl", *words, "--wrap", "true", user=USER, cwd="/shared")


def reason(job: Training) -> str:
    """Return what users are told of its end; the batch script is still there."""
    job.wait(lambda: job.outcome() is not None, "an outcome", 60.0)
    outcome = job.outcome()
    assert outcome is not None
    assert (outcome["state"], outcome["exit_code"], outcome["why"]) == ("stopped", 143, "cancelled")
    end = f"stopped: {outcome['reason']}"

    def ends() -> set[str]:
        return {e.text for e in job.ledger().events if (e.job, e.kind) == (job.run_name, "end")}

    job.wait(lambda: ends() == {end}, f"the ledgers have it: {end}")
    return str(outcome["reason"])


def goes_on(job: Training) -> None:
    """Its second start, from memory, to its end; without the two minutes that Slurm lets it wait first."""
    site, again = job.cluster, job.home / f"ckptless-{job.again}"
    before = job.newest()
    site.wait_idle()
    site.run("ctl", "scontrol", "update", f"jobid={job.job_id}", "starttime=now")
    job.wait(again.exists, "its second start", 200.0)
    job.hurry()
    job.wait(lambda: job.slurm("JobState") == "COMPLETED", "Slurm says COMPLETED")
    job.nothing_left()
    (start,) = {e.text for e in job.ledger().events if (e.job, e.kind) == (job.again, "start")}
    assert start in {
        f"step {step} from the memory of run {job.run_name}, kept on {NODES} nodes"
        for step in (before - 1, before, before + 1)
    }
    job.same_bits()


@pytest.mark.parametrize("srun", [False, True])
@pytest.mark.parametrize(
    ("partition", "state"),
    [("again", "PENDING"), pytest.param("never", "PREEMPTED", marks=pytest.mark.slow)],
)
def test_a_preempted_job_is_what_the_site_makes_of_it(
    site: Cluster, partition: str, state: str, *, srun: bool
) -> None:
    """Also as the program of srun, where nobody but the agents is there to stay."""
    job = train(site, f"--partition={partition}", srun=srun)
    preempt(site)
    assert reason(job) == "preempted by Slurm"
    # Nothing trains any more, and the script waits for Slurm's word.
    assert job.slurm("JobState") in ("RUNNING", "COMPLETING", state)
    job.wait(lambda: job.slurm("JobState") == state, f"Slurm says {state}", 90.0)
    job.nothing_left()
    job.wait(lambda: "Slurm preempts the job: waiting for it" in job.story(), "somebody says that he stays")
    if state == "PENDING":
        assert job.slurm("Restarts") == "1"
        assert [len(kept(site, node)) for node in site.plan.node_names] == [1, 1]
        goes_on(job)


@pytest.mark.slow  # other reasons are looked at in test_failures
def test_a_signal_that_is_the_users(site: Cluster) -> None:
    job = train(site)
    site.run("ctl", "scancel", "--signal=TERM", str(job.job_id), user=USER)
    assert reason(job) == "SIGTERM from the user (scancel --signal or sbatch --signal)"
    job.nothing_left()
