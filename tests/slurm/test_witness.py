"""slurmctld's casting vote between two halves of a job, where it gives nodes back by itself.

`test_witness.py RUN THEIRS OURS` asks for it, on a node of the cluster: the names of a half are one word.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.clock import Clock
from ckptless.daemon.ckptlessd.slurm_cluster import SlurmCluster
from ckptless.daemon.slurm.cached import CachedSlurm
from ckptless.daemon.slurm.commands import Commands

from .cluster.api import Cluster
from .cluster.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
USER = "tester"


async def word(run: str, theirs: str, ours: str) -> bool:
    """Return what the half `ours` hears of the other one."""
    edge = SlurmCluster(CachedSlurm(Commands(), Clock()), ours.split()[0], 1, "down")
    try:
        return await edge._are_down(run, theirs.split(), ours.split())
    finally:
        await edge.aclose()


def ask(site: Cluster, run: str, theirs: str, ours: str) -> bool:
    done = site.run(ours.split()[0], sys.executable, "-m", __name__, run, theirs, ours, cwd=str(ROOT))
    return done.stdout.strip() == "True"


def states(site: Cluster, names: str) -> str:
    """The state that all of these are in, and why; one that is to register again has a star."""
    found = site.run("ctl", "sinfo", "-h", "-n", names.replace(" ", ","), "-o", "%T %E").stdout
    return "\n".join({line.replace("*", "") for line in found.splitlines()})


@pytest.fixture(scope="module", params=["1", "2"], ids=["ReturnToService=1", "ReturnToService=2"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from .conftest import ROOTFS, require_slurm  # what a node asks with has no pytest of these

    require_slurm()
    # slurmctld asks all nodes each two seconds, and those that answer are up again.
    conf = {"ReturnToService": request.param, "SlurmdTimeout": "6"}
    place = tmp_path_factory.mktemp("site") / "cluster"
    with Cluster(place, Plan(nodes=4, conf=conf, rootfs=ROOTFS), ckptless=True) as up:
        yield up


def test_one_half_is_told_yes_however_late_the_other_one_asks(site: Cluster) -> None:
    words = ("sbatch", "--parsable", "-N4", "--no-kill", "--output=/dev/null", "--wrap=sleep 300")
    run = site.run("ctl", *words, user=USER, cwd="/shared").stdout.strip()
    site.run("ctl", "bash", "-c", f"until squeue -h -j {run} -t R | grep -q .; do sleep 0.1; done")
    ours, theirs = "node01 node02", "node03 node04"
    assert ask(site, run, theirs, ours)
    if site.plan.conf["ReturnToService"] == "2":
        site.wait_state("node03", "drained")
        site.wait_state("node04", "drained")
    assert not ask(site, run, ours, theirs)
    # The second half has done the first one no harm, which hears the same where the word was lost.
    assert states(site, ours) == "mixed none"
    # Nor does it where it had marked the first half in the same moment: that is taken back.
    reason = f"ckptless: job {run}: silent, as is half of its nodes"
    for node in ours.split():
        site.run("ctl", "scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")
    assert states(site, ours) == f"draining {reason}"
    assert not ask(site, run, ours, theirs)
    assert states(site, ours) == "mixed none"
    assert ask(site, run, theirs, ours)
    assert states(site, theirs).endswith(reason)


if __name__ == "__main__":
    print(asyncio.run(word(*sys.argv[1:4])))
