"""Memory over a requeue, on real Slurm: the job goes on where it was, and nothing is on any disk."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.local.resized import newest, steps_seen, went_on

from .cluster.api import Cluster
from .conftest import require_slurm
from .test_elastic import STEPS, Elastic
from .training import USER, Training, kept, make_site

pytestmark = pytest.mark.timeout(500)

NODES = 5
AGAIN_S = 240.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    place = tmp_path_factory.mktemp("site") / "cluster"
    with make_site(place, tmp_path_factory.mktemp("spank"), NODES) as up:
        yield up


def nodes_that_keep(site: Cluster) -> list[str]:
    return [node for node in site.plan.node_names if kept(site, node)]


def events(job: Training, kind: str) -> list[tuple[str, str]]:
    """(run, text) of each."""
    return [(e.job, e.text) for e in job.ledger().events if e.kind == kind]


def where_its_time_went(site: Cluster, job: Training) -> None:
    """By a daemon's word to its owner, both starts together, with what it waited in Slurm's queue between."""
    done = site.run("node01", "ckptctl", "goodput", "--json", str(job.job_id), user=USER)
    (account,) = json.loads(done.stdout)["jobs"]
    seconds, slots = account["seconds"], account["slots"]
    assert account["job"] == str(job.job_id)
    assert sum(seconds.values()) == pytest.approx(account["wall_s"] * slots, rel=1e-3)
    # Two minutes, but for what the job's first start took to end.
    assert seconds["queue"] > 60 * slots
    assert seconds["training"] > 0
    assert (seconds["untold"], account["untold"]) == (0, 0)
    assert account["excess_s"] <= 0.001 * account["total_s"]
    told = site.run("node01", "ckptctl", "explain", "--json", f"{job.job_id}.1", user=USER)
    texts = [one["text"] for one in json.loads(told.stdout)["story"]]
    assert any(f"from the memory of run {job.job_id}" in text for text in texts), texts
    for words in (("goodput",), ("explain",), ("ledger", "export"), ("top", "--once")):
        refused = site.run("node01", "ckptctl", *words, str(job.job_id), user="other", check=False)
        assert (refused.returncode, str(job.job_id) in refused.stderr) == (4, True), refused.stderr


@pytest.mark.slow  # Slurm itself waits two minutes before it starts a job again
def test_a_requeued_job_goes_on_from_memory(site: Cluster) -> None:
    job = Training(site).submit()
    job.trains()
    site.run("ctl", "scontrol", "requeue", str(job.job_id), user=USER)
    job.wait(lambda: len(nodes_that_keep(site)) == NODES, "every node keeps its part", 60.0)
    job.nothing_left()
    before = job.newest()
    (mine,) = kept(site, "node01", USER)
    assert (mine["run"], mine["restarts"]) == (str(job.job_id), 0)
    assert kept(site, "node01", "other") == []
    # Nobody else gets it, another user or another job; and Slurm does not give it up.
    other = Training(site, user="other").submit()
    other.trains()
    site.run("ctl", "scancel", str(other.job_id), user="other")
    other.wait(lambda: other.slurm("JobState") == "CANCELLED", "Slurm has ended it", 60.0)
    other.nothing_left()
    assert not [run for run, _ in events(other, "memory-given")]

    again = job.home / f"ckptless-{job.job_id}.1"
    job.wait(again.exists, "its second start", AGAIN_S)
    job.hurry()
    job.wait((again / "outcome.json").exists, "its second end")
    job.nothing_left()
    assert json.loads((again / "outcome.json").read_text())["why"] == "done", job.story()
    (start,) = {text for run, text in events(job, "start") if run == f"{job.job_id}.1"}
    assert start in {
        f"step {step} from the memory of run {job.job_id}, kept on {NODES} nodes"
        for step in (before - 1, before, before + 1)
    }
    job.same_bits()
    # Of what was committed nothing was made again: at most the step that was under way.
    lines = (job.home / "out" / "loss-0.txt").read_text().splitlines()
    steps = [int(line.split()[0]) for line in lines]
    assert len(steps) - len(set(steps)) <= 1
    where_its_time_went(site, job)
    # What the cancelled job left is dropped as soon as Slurm has been asked.
    job.wait(lambda: not nodes_that_keep(site), "nothing is kept", 30.0)

    def dropped() -> set[str]:
        return {text for run, text in events(other, "memory-dropped") if run == str(other.job_id)}

    job.wait(lambda: dropped() == {"the job is over (CANCELLED)"}, "the ledgers have it")


@pytest.mark.slow  # as above
def test_a_requeued_job_goes_on_with_as_many_nodes_as_are_free(site: Cluster) -> None:
    """It asked for two to four nodes, had four, and finds three; two of these keep what it was."""
    site.restore()
    spec, options = "min-nodes=2,max-nodes=4", ("--nodes=2-4",)
    job = Elastic(site, nodes=4, steps=STEPS, spec=spec, options=options, name="fewer").submit()
    job.has(4)
    out = job.home / "out"
    job.wait(lambda: newest(out) >= 12, "some steps are made")
    for node in job.allocation()[2:]:
        site.run("ctl", "scontrol", "update", f"nodename={node}", "state=drain", "reason=x")
    site.run("ctl", "scontrol", "requeue", str(job.job_id), user=USER)
    job.wait(lambda: job.slurm("JobState") == "PENDING", "it waits", 60.0)
    before = steps_seen(out)
    job.wait(lambda: newest(out) >= max(one.step for one in before) + 8, "its second start trains", AGAIN_S)
    job.hurry()
    again = job.home / f"ckptless-{job.job_id}.1"
    job.wait((again / "outcome.json").exists, "its second end")
    job.nothing_left()
    (start,) = {text for run, text in events(job, "start") if run == f"{job.job_id}.1"}
    assert start.endswith("by 4 ranks"), start
    went_on(out, before, (4, 3), int(start.split()[1]))
