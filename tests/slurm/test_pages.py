"""Blocks of pages that are for Slurm, typed on a cluster by users and administrators."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.terminals import SLEEPS
from tests.reading import Reading, Say, blocks, holds, lacks

from .cluster.api import Cluster
from .conftest import require, require_slurm
from .training import USER, YAML, Training, make_site

NODES = 7
CONF = {
    "SchedulerParameters": "permit_job_expansion,batch_sched_delay=0,sched_interval=1,bf_interval=1",
    "PrologFlags": "",
}
LINES = ("PartitionName=big Nodes=ALL",)
FILE = "/etc/ckptless/ckptless.yaml"
DEADLINE_S = 90.0
# Trains until nobody holds it up any more: no page says what its own script does.
SCRIPT = """
import time
from pathlib import Path

import torch
import torch.distributed as dist
import ckptless
from ckptless.data import MappedLoader
from torch.utils.data import TensorDataset

def build():
    loader = MappedLoader(TensorDataset(torch.arange(40_000.0)), batch_size=8, workers=0)
    return ckptless.State(sum=torch.zeros(2), loader=loader)

def train(run):
    state = run.keep(build)
    for (x,) in run.batches(state.loader):
        total = torch.tensor([x.sum(), float(Path("slow").exists())])
        dist.all_reduce(total)
        state.sum += total
        run.commit()
        if total[1]:
            time.sleep(0.05)
        elif state.sum[0] > 5000:
            break

ckptless.run(train)
"""
pytestmark = pytest.mark.timeout(5 * DEADLINE_S)


def pages_yaml() -> str:
    """What docs/admin.md and docs/metrics.md have for ckptless.yaml, together."""
    admin, metrics = Reading("docs/admin.md"), Reading("docs/metrics.md")
    parts = [YAML, admin.block(2), metrics.block(1), metrics.block(2).removeprefix("metrics:\n")]
    return "".join(parts)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    place = tmp_path_factory.mktemp("site") / "cluster"
    with make_site(place, tmp_path_factory.mktemp("spank"), NODES, CONF, LINES, pages_yaml()) as up:
        yield up


@pytest.fixture(autouse=True)
def whole(site: Cluster) -> None:
    site.restore()


def eventually(what: Callable[[], object], why: str, story: Callable[[], str] = str) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < limit, f"not within {DEADLINE_S:.0f} s: {why}\n{story()}"
        time.sleep(0.2)


class Folder:
    """A folder that all nodes see, with a script in it, and those who type there."""

    def __init__(self, site: Cluster, name: str, script: str = SCRIPT) -> None:
        self.site, self.inside, self.home = site, f"/shared/{name}", site.shared / name
        site.run("ctl", "mkdir", self.inside, user=USER)
        (self.home / "train.py").write_text(script)

    def say(self, user: str = USER, node: str = "node01") -> Say:
        def say(command: str) -> subprocess.CompletedProcess[str]:
            return self.site.run(
                node, "bash", "-c", command, user=user, cwd=self.inside, check=False, timeout_s=DEADLINE_S,
                env={"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

        return say

    def submit(self, script: str, *words: str) -> str:
        """A batch script: the number of its job."""
        if "ckptless-run" not in script:
            script = f"#!/bin/bash\n{script}ckptless-run train.py\n"
        (self.home / "job.sh").write_text(script)
        done = self.site.run(
            "ctl", "sbatch", "--parsable", *words, "job.sh", user=USER, cwd=self.inside,
            env={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return done.stdout.strip()

    def story(self) -> str:
        found = [*self.home.glob("slurm-*.out"), *self.home.glob("ckptless-*/*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in found)

    def ended(self, job: str, code: int = 0) -> Path:
        """Wait for a job's end, which must be this; return its folder."""
        outcome = self.home / f"ckptless-{job}" / "outcome.json"
        eventually(outcome.exists, f"an outcome of job {job}", self.story)
        assert json.loads(outcome.read_text())["exit_code"] == code, self.story()
        return outcome.parent


def test_batch_scripts(site: Cluster) -> None:
    readme, quickstart, page = Reading("README.md"), Reading("docs/quickstart.md"), Reading("docs/slurm.md")
    with readme, quickstart, page:
        scripts = {"job": page.block(1), "elastic": page.block(2), "drawing": page.block(3)}
        assert readme.block(5) == scripts["job"].replace(" --lr 1e-3", ""), "the same, so it is run once"
        folders = {name: Folder(site, name) for name in scripts}
        jobs = {name: folders[name].submit(script) for name, script in scripts.items()}
        ends = {name: folders[name].ended(job) for name, job in jobs.items()}
        holds(ends["job"], page.block(4))
        quickstart.types(9, Folder(site, "tier-1").say())


def test_the_first_job_on_slurm(site: Cluster) -> None:
    script = blocks("docs/tutorials/first-job.md")[0]
    for old, new in SLEEPS.items():
        script = script.replace(old, new)
    folder, ids = Folder(site, "first", script), list[str]()
    (folder.home / "slow").touch()

    def say(command: str) -> subprocess.CompletedProcess[str]:
        """On a node of the job, whose number is not the page's."""
        done = folder.say()(re.sub(r"(status|drill) 1\b", rf"\1 {''.join(ids)}", command))
        ids.extend(re.findall(r"^Submitted batch job (\d+)", done.stdout))
        return done

    with Reading("docs/tutorials/first-job.md") as page:
        (folder.home / "job.sh").write_text(page.block(6))
        page.types(7, say)
        (folder.home / "slow").unlink()
        folder.ended("".join(ids))
        assert "rank 1 on node02" in folder.story()


def test_settings_of_a_site(site: Cluster) -> None:
    """The daemons have them; and what is forbidden to jobs is refused in one sentence."""
    admin, metrics, folder = Reading("docs/admin.md"), Reading("docs/metrics.md"), Folder(site, "settings")
    say = folder.say()
    with admin, metrics:
        told = say("ckptctl config show")
        assert told.returncode == 0, told.stderr
        assert "2GB/s" in admin.block(2)
        assert "10.99.0.0/24" in admin.block(2)
        assert re.search(r"bandwidth.* (2 ?GB/s|2000000000)", told.stdout), told.stdout
        assert re.search(r"interface.* 10\.99\.0\.0/24", told.stdout), told.stdout
        assert "9821" in metrics.block(1)
        ask = "import urllib.request as r; print(r.urlopen('http://node02:9821/metrics').read().decode())"
        assert "ckptless_build_info" in site.run("node01", sys.executable, "-c", ask).stdout
        name = Path(metrics.block(2).split()[2]).name
        eventually((site.var("node02") / name).exists, "the file for node_exporter")
        words = "partition main has no elastic jobs, as have big,long"
        forbids(site, admin.block(10), "min-nodes=1", words)
        forbids(site, admin.block(11), "draw-in=1", "draw-in")


def forbids(site: Cluster, text: str, wish: str, words: str) -> None:
    """With this in ckptless.yaml a job that wishes for that is refused with these words."""
    before = (site.etc / "ckptless/ckptless.yaml").read_text()
    site.write(FILE, YAML + text)
    try:
        assert site.run("node01", "ckptctl", "config", "check", user=USER).returncode == 0
        command = ("salloc", "--nodes=2", f"--ckptless={wish}", "ckptless-run", "train.py")
        done = site.run("ctl", *command, user=USER, cwd="/shared/settings", check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        assert re.search(f"^ckptless-run: error: .*{words}", done.stderr, re.MULTILINE), done.stderr
    finally:
        site.write(FILE, before)


def rank_1(job: Training) -> str:
    """The node that has it now."""
    rows = [g for g in job.ledger().generations if g.job == job.run_name]
    node, _ = max(rows, key=lambda g: g.generation).places[1]
    return f"node{node + 1:02d}"


def trains(job: Training, generation: int) -> None:
    """Until every rank has made a step in this generation."""
    job.wait(
        lambda: any(
            (e.job, e.generation) == (job.run_name, generation) and e.kind in ("trains", "recovered")
            for e in job.ledger().events
        ),
        f"generation {generation} trains",
    )


def drilled(asked: Say, command: str) -> None:
    """Have it done; for a moment after another drill it may not be."""
    said = list[str]()

    def taken() -> bool:
        done = asked(command)
        said.append(done.stdout + done.stderr)
        assert done.returncode == 0 or re.search("one is under way|it does not train", said[-1]), said
        return done.returncode == 0

    eventually(taken, command, lambda: "\n".join(said))


def test_a_job_that_its_administrators_take_nodes_from(site: Cluster) -> None:
    """One job, with drills and spares enough, for all that pages do to a job on Slurm."""
    if site.run("node02", "sh", "-c", "command -v nft", check=False).returncode:
        require("nft(8) is not installed")
    folder = Folder(site, "many", SCRIPT.replace("run(train)", "run(train, commit_every=20)"))
    (folder.home / "slow").touch()
    drills, admin, goodput = Reading("docs/drills.md"), Reading("docs/admin.md"), Reading("docs/goodput.md")
    say, number = folder.say("root"), folder.submit("", "--nodes=6", "--ckptless=spares=4")
    # At a terminal: it is asked whether that is meant.
    asked: Say = lambda line: say(f"echo y | script -qec {shlex.quote(line)} /dev/null")  # noqa: E731
    job = Training(site, name="many", job_id=int(number))
    with drills, admin, goodput:
        trains(job, 1)
        for generation, line in enumerate(drills.block(1, {"4711": number}).splitlines(), 1):
            command = line.partition("#")[0].replace("node02", rank_1(job))
            drilled(asked, command)
            # The second one is a pause that is shorter than a fault.
            trains(job, 2 if generation == 1 else generation)
        node = {"node02": rank_1(job)}
        admin.types(5, asked, {"4711": number, **node})
        trains(job, 5)
        admin.types(6, say, node)
        (folder.home / "evict-node").write_text(admin.block(7))
        done = say(f"bash evict-node {rank_1(job)} it smells of smoke")
        assert done.returncode == 0, done.stderr
        trains(job, 6)
        (folder.home / "slow").unlink()
        folder.ended(number)
        admin.types(9, say)
        for line in goodput.block(1, {"4711": number}).splitlines():
            done = say(line)
            assert done.returncode == 0, f"{line}: {done.stderr}"
        told = say("ckptctl goodput").stdout
        # Of a node that was cut off the last steps are not known, so the last line says "at least".
        assert not lacks(goodput.block(2).rpartition("goodput ")[0], told), told
        looks = say("ckptctl health")
        assert looks.returncode == 0, looks.stderr
        assert not lacks(admin.block(8).splitlines()[-3], looks.stdout), looks.stdout
