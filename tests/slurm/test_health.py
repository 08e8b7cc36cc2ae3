"""A node that is not well, on real Slurm: it is drained and left, and a probe that lies takes out few."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.local.localrun import fault

from .cluster.api import Cluster
from .conftest import require_slurm
from .training import YAML, Training, make_site

NODES = 5
# A probe of the site's own, which says what somebody writes down on its node.
PROBE = """
from pathlib import Path
from ckptless.daemon.ckptlessd.health.probe import Finding

LAMP = Path("/var/lamp")

class Lamp:
    interval_s, deadline_s = 1.0, 5.0
    def missing(self): return ""
    def close(self): pass
    def look(self):
        codes = LAMP.read_text().split() if LAMP.exists() else []
        return [Finding(code=code, where="GPU 0", evidence="the lamp is red") for code in codes]
"""
PACKAGE = {
    "lamp.py": PROBE,
    "lamp-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: lamp\nVersion: 1.0\n",
    "lamp-1.0.dist-info/entry_points.txt": "[ckptless.health]\nlamp = lamp:Lamp\n",
}
HEALTH = (
    "health: {most_per_hour: 2, without: [kernel-log, host, nvml], commands: {check: /etc/ckptless/check}}\n"
)


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    place = tmp_path_factory.mktemp("site") / "cluster"
    spank = tmp_path_factory.mktemp("spank")
    with make_site(place, spank, NODES, yaml=YAML + HEALTH, more=PACKAGE) as up:
        # One of its own for each test: what is not well stays so until a boot.
        up.restore()
        yield up


def lamp(site: Cluster, node: str, *codes: str) -> None:
    (site.var(node) / "lamp").write_text(" ".join(codes))


def drained(site: Cluster) -> dict[str, str]:
    """Reasons by node, of those that are drained."""
    lines = site.run("ctl", "sinfo", "-h", "-N", "-t", "drain", "-o", "%N|%E").stdout.splitlines()
    return dict(line.split("|", 1) for line in lines)


def health(site: Cluster, node: str, *more: str, user: str = "root") -> tuple[int, dict[str, Any]]:
    done = site.run(node, "ckptctl", "--json", "health", *more, user=user, check=False)
    return done.returncode, json.loads(done.stdout)


def told(job: Training, kind: str) -> list[str]:
    events = [e for e in job.ledger().events if e.job == job.run_name and e.kind == kind]
    return [e.text for e in sorted(events, key=lambda e: e.at_s)]


def test_ranks_leave_a_node_that_is_degraded_and_no_step_is_lost(site: Cluster) -> None:
    job = Training(site, steps=150).submit()
    job.trains()
    lamp(site, "node02", "link-down")
    job.wait(lambda: "node02" in drained(site), "it is drained")
    assert drained(site)["node02"].startswith("ckptless: health lamp: link-down (GPU 0): a network link")
    job.trains(2)
    job.wait(lambda: told(job, "evicted"), "its node is out")
    (text,) = told(job, "leaves")
    why = r"unwell \(lamp: link-down \(GPU 0\): .*\)"
    assert re.fullmatch(rf"its ranks leave node-1, which is {why}; where they go there is step \d+", text)
    # Nothing is lost by it, not even to a fault's answer.
    assert [f for f in job.ledger().faults if f.job == job.run_name] == []
    assert {(r.rung, r.outcome) for r in job.ledger().recoveries} == {("spare", "recovered")}
    # By root everything, by others not what was read.
    code, said = health(site, "node02", "--exit-code")
    assert (code, said["well"]) == (1, False)
    (verdict,) = said["verdicts"]
    assert (verdict["probe"], verdict["code"], verdict["action"]) == ("lamp", "link-down", "move")
    assert verdict["evidence"] == "the lamp is red"
    assert verdict["done"] == "drained, and jobs leave it for a spare, where they have one"
    _, other = health(site, "node02", user="other")
    assert other["verdicts"][0]["evidence"] == ""
    assert health(site, "node03", "--exit-code")[0] == 0
    states = {one["name"]: one["state"] for one in said["probes"]}
    assert (states["lamp"], states["disk"], states["command-check"]) == ("looks", "looks", "off")
    assert "kernel-log" not in states
    job.ended()
    job.same_bits()


def test_the_others_train_while_a_spare_builds_for_the_rank_that_it_gets(site: Cluster) -> None:
    job = Training(site, [fault("build", "hold", 1, often=True)], steps=150).submit()
    job.trains()
    hold = job.home / "out" / "hold"
    hold.touch()
    lamp(site, "node02", "link-down")
    job.wait(lambda: told(job, "prepares"), "a spare builds")
    assert told(job, "prepares") == ["node-4 builds for rank 1 before it leaves node-1"]
    # For as long as it takes, and nobody waits for it.
    at = job.newest()
    job.wait(lambda: job.newest() >= at + 20, "the others train")
    assert job.result().generations == {1}
    assert told(job, "leaves") == []
    hold.unlink()
    job.wait(lambda: told(job, "evicted"), "its node is out")
    assert job.result().generations == {1, 2}
    assert [f for f in job.ledger().faults if f.job == job.run_name] == []
    job.ended()
    job.same_bits()


@pytest.mark.slow
def test_ranks_leave_a_node_that_stays_slow(tmp_path: Path) -> None:
    require_slurm()
    policy = "health: {move_stragglers: 2}\n"
    with make_site(tmp_path / "cluster", tmp_path, NODES, yaml=YAML + policy) as site:
        job = Training(site, steps=250).submit()
        job.trains()
        (job.home / "slow-node02").touch()
        job.wait(lambda: told(job, "leaves"), "its node is left")
        (named,) = told(job, "straggler")
        assert named.startswith("rank 1 on node-1: ")
        (text,) = told(job, "leaves")
        why = r"unwell \(rank 1 holds up the others: \+\d+ %, compute\)"
        assert re.fullmatch(rf"its ranks leave node-1, which is {why}; where they go there is step \d+", text)
        job.trains(2)
        assert [f for f in job.ledger().faults if f.job == job.run_name] == []
        job.ended()
        job.same_bits()


def test_a_probe_that_lies_on_all_nodes_empties_no_cluster_and_ends_no_job(site: Cluster) -> None:
    job = Training(site, steps=150).submit()
    job.trains()
    nodes = [f"node{number:02}" for number in range(1, NODES + 1)]
    for node in nodes:
        lamp(site, node, "xid-79")

    def is_held(node: str) -> bool:
        return any("most_per_hour" in one["done"] for one in health(site, node)[1]["verdicts"])

    def held() -> list[str]:
        return [node for node in nodes if is_held(node)]

    job.wait(lambda: len(held()) == NODES - 2, "the breaker holds on all nodes but two")
    job.wait(lambda: len(drained(site)) == 2, "two are drained")
    assert not set(held()) & set(drained(site))
    # The last one is the spare: where it is one of the two, no rank has anywhere to go, and all stay.
    if nodes[-1] not in drained(site):
        job.trains(2)
    # One spare: of the two that may be left one stays, and the job's story says why.
    lost = [f for f in job.ledger().faults if f.job == job.run_name and f.kind == "node-lost"]
    assert len({fault.node for fault in lost}) <= 1
    job.ended()
    job.same_bits()


def test_verdicts_outlast_their_daemon(site: Cluster) -> None:
    waiting = Training(site)  # for its clock and its patience alone

    def known(what: str) -> list[str]:
        """The verdicts of node04's daemon, where it is up."""
        done = site.run("node04", "ckptctl", "--json", "health", check=False)
        return [one[what] for one in json.loads(done.stdout)["verdicts"]] if done.returncode == 0 else []

    lamp(site, "node04", "xid-62", "clock")
    waiting.wait(lambda: "drained, and jobs leave it" in known("done"), "it is drained")
    lamp(site, "node04")
    site.service_stop("node04", "ckptlessd")
    site.service_start("node04", "ckptlessd")
    waiting.wait(lambda: "xid-62" in known("code"), "the daemon knows it again")
    text = site.run("node04", "ckptctl", "health").stdout
    assert text.startswith("node04 is not well; at most done for a finding: evict\n")
    row = r"^\S+.* lamp +xid-62 +GPU 0 +\d+ +evict +drained, and jobs leave it +the lamp is red$"
    assert re.search(row, text, re.MULTILINE)


def test_what_slurm_says_of_a_node_is_told_and_acted_upon_only_once(site: Cluster) -> None:
    """Drained by hand, about to fail, down: notes; and the node that is down is lost once."""
    job = Training(site, steps=150).submit()
    job.trains()
    orders = {"node02": "drain", "node03": "fail", "node04": "down"}
    for node, state in orders.items():
        site.run("ctl", "scontrol", "update", f"nodename={node}", f"state={state}", "reason=by hand")

    def said(node: str) -> dict[str, tuple[str, str, str]]:
        """Code to action, evidence and what was done; by a look that its daemon begins with."""
        site.service_stop(node, "ckptlessd")
        site.service_start(node, "ckptlessd")
        found: dict[str, tuple[str, str, str]] = {}

        def has_looked() -> bool:
            done = site.run(node, "ckptctl", "--json", "health", check=False)
            answer = json.loads(done.stdout) if done.returncode == 0 else {"probes": ()}
            if not any(one["name"] == "slurm" and one["looks"] for one in answer["probes"]):
                return False
            found.update(
                {one["code"]: (one["action"], one["evidence"], one["done"]) for one in answer["verdicts"]}
            )
            return True

        job.wait(has_looked, f"the daemon of {node} has asked Slurm")
        return {code: told for code, told in found.items() if code.startswith("slurm-")}

    assert said("node01") == {}
    drained = said("node02")
    assert set(drained) == {"slurm-drained"}
    action, evidence, done = drained["slurm-drained"]
    assert (action, done) == ("note", "")
    assert re.fullmatch(r"\w+\+DRAIN: by hand", evidence)
    assert said("node03")["slurm-fail"][1].endswith(": by hand")
    assert said("node04")["slurm-down"][1].endswith(": by hand")
    # Whoever drains by this is not told that ckptless would: there would be no end to it.
    assert health(site, "node02", "--exit-code")[0] == 0
    reasons = site.run("ctl", "sinfo", "-h", "-N", "-o", "%N|%E").stdout.splitlines()
    assert not [line for line in reasons if "ckptless" in line], reasons
    assert told(job, "leaves") == told(job, "evicted") == []
    assert {one.node for one in job.ledger().faults if one.kind == "node-lost"} == {3}
    job.ended()
    job.same_bits()
