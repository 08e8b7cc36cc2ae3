"""Elastic jobs on real Slurm: nodes are drawn in and lost, and the job goes on with as many as there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.slurm.hostlist import expand

from .cluster.api import Cluster
from .conftest import require_slurm
from .training import ROOT, YAML, Training, make_site

NODES = 5
SCRIPT = ROOT / "tests/local/recut_script.py"
CONF = {
    "SchedulerParameters": "permit_job_expansion,batch_sched_delay=0,sched_interval=1,bf_interval=1",
    # With Alloc, steps on nodes that are added fail with Slurm 24.11 or newer.
    "PrologFlags": "",
}
SAMPLES, BATCH = 60, 12
# It ends when it is told to.
STEPS = 100_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    place = tmp_path_factory.mktemp("site") / "cluster"
    with make_site(place, tmp_path_factory.mktemp("spank"), NODES, CONF) as up:
        yield up


@pytest.fixture(autouse=True)
def whole(site: Cluster) -> None:
    site.restore()


@dataclass
class Elastic(Training):
    """A job of `recut_script.py`, which notes the samples of each step."""

    spec: str = ""
    kind: str = "ddp"

    def submit(self) -> Elastic:
        inside = f"/shared/{self.name}"
        self.cluster.run("ctl", "mkdir", inside, user=self.user)
        script = f"#!/bin/bash\nckptless-run {SCRIPT} {self.steps} {inside}/out {self.kind}\n"
        (self.home / "job.sh").write_text(script)
        words = ["sbatch", "--parsable", f"--ckptless={self.spec}", f"--nodes={self.nodes}", *self.options]
        env = {"RECUT_SLEEP_S": "0.1", "OMP_NUM_THREADS": "1"}
        done = self.cluster.run("ctl", *words, "job.sh", user=self.user, env=env, cwd=inside)
        self.job_id = int(done.stdout)
        return self

    def hurry(self) -> None:
        """Have it end at the next step."""
        (self.home / "out" / "end").touch()

    def seen(self) -> dict[int, list[Any]]:
        """Return each rank's note of each step: samples, loss, digest of the state after it, generation."""
        found: dict[int, list[Any]] = {}
        for path in sorted((self.home / "out").glob("seen-*.txt")):
            for line in path.read_text().splitlines():
                step, *rest = json.loads(line)
                found.setdefault(step, []).append(rest)
        return found

    def world(self) -> int:
        """The ranks that the newest generation has, and that have made a step in it."""
        rows = [g for g in self.ledger().generations if g.job == self.run_name]
        done = {r.generation for r in self.ledger().recoveries if r.outcome == "recovered"} | {1}
        newest = max(rows, key=lambda g: g.generation, default=None)
        return len(newest.places) if newest is not None and newest.generation in done else 0

    def allocation(self) -> tuple[str, ...]:
        """The nodes that it has for Slurm."""
        return expand(self.slurm("NodeList"))

    def pid(self, rank: int) -> int | None:
        """The process of a rank."""
        found = {slot.rank: slot.pid for slot in self.ledger().slots if slot.job == self.run_name}
        return found.get(rank)

    def has(self, ranks: int) -> None:
        """Until it trains on so many."""
        self.wait(lambda: self.world() == ranks, f"it trains on {ranks} ranks")

    def every_sample_once(self) -> None:
        """In each step the same global batch, whoever had which part of it, and one state of all ranks.

        A step that nobody had committed is done again, by another number of ranks perhaps: with the same
        samples, and with sums in another order, so with other last bits.
        """
        epoch: list[int] = []
        for step, ranks in sorted(self.seen().items()):
            tries: dict[int, list[Any]] = {}
            for rank in ranks:
                tries.setdefault(rank[3], []).append(rank)
            for mine in tries.values():
                assert len({digest for _, _, digest, *_ in mine}) == 1, (step, ranks)
            parts = [sample for numbers, *_ in tries[max(tries)] for sample in numbers]
            samples = sorted(set(parts))
            assert len(samples) == len(parts) == BATCH, (step, ranks)
            assert {sample for numbers, *_ in ranks for sample in numbers} == set(samples), (step, ranks)
            epoch += samples
            if len(epoch) == SAMPLES:
                assert sorted(epoch) == list(range(SAMPLES)), step
                epoch = []


def test_a_job_grows_on_idle_nodes_and_shrinks_when_one_is_lost(site: Cluster, tmp_path: Path) -> None:
    spec = "min-nodes=1,max-nodes=4,draw-in=4,scale-up-after=1"
    job = Elastic(site, nodes=2, steps=STEPS, spec=spec).submit()
    job.has(4)
    assert job.slurm("NumNodes") == "4"
    site.power_off("node02")
    # The fifth node comes in its place: a job that has fewer than it may grows again.
    job.wait(lambda: "node05" in job.allocation(), "another node is drawn in")
    job.has(4)
    job.ended()
    job.every_sample_once()


def test_a_job_of_one_size_waits_for_a_node(site: Cluster) -> None:
    # Three: of two, the other one would have to hear Slurm's word first.
    job = Elastic(site, nodes=3, steps=STEPS, spec="draw-in=2,draw-in-patience=30", kind="fsdp").submit()
    job.has(3)
    site.power_off("node02")
    job.wait(lambda: any(r.rung == "spare" for r in job.ledger().recoveries), "another node has its rank")
    job.ended()
    job.every_sample_once()


def test_nodes_are_given_back_and_come_again(site: Cluster) -> None:
    """Another job has them meanwhile; the processes on the first node are the same all the time."""
    spec = "min-nodes=2,max-nodes=4,draw-in=8,scale-up-after=1"
    job = Elastic(site, nodes=4, steps=STEPS, spec=spec, kind="fsdp").submit()
    job.has(4)
    job.wait(lambda: job.pid(0) is not None, "the ledgers have the first rank's process")
    first = job.pid(0)
    words = ("ckptctl", "resize", str(job.job_id), "--nodes", "2", "--give-back")
    site.run("node01", *words, user=job.user)
    job.has(2)
    job.wait(lambda: len(job.allocation()) == 2, "Slurm has two nodes again")
    done = site.run(
        "ctl", "sbatch", "--parsable", "-N3", "--exclusive", "--wrap", "srun -N3 sleep 2", user="tester"
    )
    other = int(done.stdout)

    def is_done() -> bool:
        return "JobState=COMPLETED" in site.run("ctl", "scontrol", "-o", "show", "job", str(other)).stdout

    job.wait(is_done, "another job has had them")
    site.run("node01", "ckptctl", "resize", str(job.job_id), "--nodes", "max", user=job.user)
    job.has(4)
    assert job.pid(0) == first
    job.ended()
    job.every_sample_once()


def test_a_job_gives_way_to_one_of_higher_priority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It starts on nodes that the elastic job has, which has them again; and leaves those to be serviced."""
    require_slurm()
    conf = {**CONF, "PriorityType": "priority/basic"}
    yaml = f"{YAML}elastic: {{give_way: true, leave_drained: true}}\n"
    place = tmp_path_factory.mktemp("site") / "cluster"
    with make_site(place, tmp_path_factory.mktemp("spank"), 4, conf, yaml=yaml) as site:
        site.restore()
        spec = "min-nodes=2,max-nodes=4,draw-in=8,scale-up-after=1"
        job = Elastic(site, nodes=4, steps=STEPS, spec=spec).submit()
        job.has(4)
        site.run("ctl", "scontrol", "update", f"jobid={job.job_id}", "nice=1000")
        words = ("sbatch", "--parsable", "-N2", "--exclusive", "--wrap", "srun -N2 sleep 3")
        done = site.run("ctl", *words, user="other")
        other = int(done.stdout)

        def is_over() -> bool:
            return "JobState=COMPLETED" in site.run("ctl", "scontrol", "-o", "show", "job", str(other)).stdout

        job.wait(is_over, "the other job has had two nodes")
        job.has(4)
        assert [e.kind for e in job.ledger().events if e.kind == "gives-way"] == ["gives-way"] * 2
        site.run("ctl", "scontrol", "update", "nodename=node02", "state=drain", "reason=fan")
        job.has(3)
        left = ("pgrep", "-u", job.user)
        job.wait(lambda: not site.run("node02", *left, check=False).stdout, "it has left the drained node")
        fans = ("reservationname=fans", "starttime=now", "duration=60", "nodes=node03", "users=root")
        site.run("ctl", "scontrol", "create", *fans, "flags=maint,ignore_jobs")
        job.has(2)
        job.wait(lambda: not site.run("node03", *left, check=False).stdout, "it has left the reserved node")
        job.ended()
        job.every_sample_once()
