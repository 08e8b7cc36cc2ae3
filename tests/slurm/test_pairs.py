"""`ckptless-doctor --pairs` on real Slurm: a slow line, and a way that is shut, are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptless.doctor.pairing import TOKEN

from .cluster.api import Cluster
from .conftest import require
from .test_cluster import eventually

DEADLINE_S = 90.0
# Of all nodes but a slow one: what any machine can do, so that a busy one makes no pair slow.
USUAL, SLOW = "160mbit", "24mbit"


@pytest.fixture
def shaped(cluster: Cluster) -> Iterator[Cluster]:
    """The nodes' lines are of one speed."""
    if shutil.which("tc", path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
        require("no tc here, which shapes lines (iproute2)")
    for node in cluster.plan.node_names:
        shape(cluster, node, USUAL)
    yield cluster
    for node in cluster.plan.node_names:
        cluster.run(node, "tc", "qdisc", "del", "dev", "eth0", "root")


def shape(cluster: Cluster, node: str, rate: str) -> None:
    rule = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
    cluster.run(node, "tc", "qdisc", "replace", "dev", "eth0", *rule)


def tried(cluster: Cluster, *words: str, first: str = "") -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code and findings of an allocation of four nodes, in which something is done `first`."""
    doctor = " ".join(("ckptless-doctor", "--pairs", "--json", "--mib=2", *words))
    line = ("salloc", "--quiet", "--nodes=4", "bash", "-c", f"{first}\n{doctor}")
    done = cluster.run("ctl", *line, user="tester", timeout_s=DEADLINE_S, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["findings"]
    return done.returncode, {one["about"]: (one["grade"], one["text"]) for one in found}


def test_a_slow_line_is_named(shaped: Cluster) -> None:
    code, found = tried(shaped, "--all", "--interface=eth0")
    assert (code, [*found]) == (0, ["pairs"]), found
    assert found["pairs"][1].startswith("6 of 6 are in order")
    shape(shaped, "node03", SLOW)
    code, found = tried(shaped)
    assert (code, [*found]) == (1, ["pairs", "node03"]), found
    assert found["node03"][0] == "limited"


def test_a_way_that_is_shut_is_named(shaped: Cluster) -> None:
    shaped.block("node02", "node03")
    try:
        code, found = tried(shaped, "--all", "--time-limit=40")
    finally:
        shaped.unblock("node02", "node03")
    assert (code, [*found]) == (2, ["pairs", "link node02 - node03"]), found
    assert found["pairs"][1].startswith("5 of 6 are in order")


def test_a_node_that_slurm_cannot_start_on_is_named(cluster: Cluster) -> None:
    try:
        wait = "touch /shared/pairs-begun; until test -e /shared/pairs-broken; do sleep 0.1; done"
        with ThreadPoolExecutor(1) as pool:
            over = pool.submit(tried, cluster, "--time-limit=40", first=wait)
            eventually((cluster.shared / "pairs-begun").exists)
            cluster.service_stop("node03", "slurmd")
            (cluster.shared / "pairs-broken").touch()
            code, found = over.result(DEADLINE_S)
    finally:
        cluster.service_start("node03", "slurmd")
    assert code == 2, found
    assert found["node03"] == ("broken", "it has not come")
    assert found["pairs"][0] == "fine"


def test_it_may_be_started_by_srun_with_a_token(cluster: Cluster) -> None:
    line = ("srun", "--nodes=2", "--ntasks-per-node=1", "ckptless-doctor", "--pairs", "--mib=1")
    done = cluster.run("ctl", *line, user="tester", timeout_s=DEADLINE_S, check=False)
    assert f"{TOKEN} is not set: run ckptless-doctor --pairs without srun" in done.stderr
    env = {TOKEN: "0123456789abcdef"}
    done = cluster.run("ctl", *line, user="tester", env=env, timeout_s=DEADLINE_S, check=False)
    assert "pairs: " in done.stdout, done.stderr
    assert done.stdout.count("pairs: ") == 1
