"""Metrics of a real cluster: what Prometheus gets of a job that loses a node, and what others get."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptless.daemon.protocol.records import PHASES, RecoveryRecord

from .cluster.api import Cluster
from .cluster.plan import NETWORK
from .conftest import require_slurm
from .training import YAML, Training, make_site

NODES = 5
NODE_NAMES = [f"node{number:02d}" for number in range(1, NODES + 1)]
PORT = 9821
TEXTFILE = "/var/ckptless.prom"
# Nobody but node01, which plays Prometheus here.
METRICS = "metrics: {{listen: '0.0.0.0:{port}', allow: [{allowed}], textfile: {textfile}, jobs: true}}\n"
ASK = """
import json, sys, urllib.request
found = []
for at in sys.argv[2:]:
    try:
        found.append(urllib.request.urlopen(f"http://{at}:{sys.argv[1]}/metrics", timeout=5).read().decode())
    except OSError as error:
        found.append(None)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_slurm()
    place, spank = tmp_path_factory.mktemp("site") / "cluster", tmp_path_factory.mktemp("spank")
    metrics = METRICS.format(port=PORT, allowed=f"{NETWORK}.11", textfile=TEXTFILE)
    with make_site(place, spank, NODES, yaml=YAML + metrics) as up:
        yield up


def scrape(site: Cluster, node: str, *of: str, user: str = "root") -> list[str | None]:
    """What a process on a node is told by others; None by those that are off, or tell it nothing."""
    done = site.run(node, sys.executable, "-c", ASK, str(PORT), *of, user=user)
    return [*json.loads(done.stdout)]


def sums(texts: list[str | None]) -> Counter[tuple[str, ...]]:
    """What sum() says of all nodes, by the name and the values of labels, in the order of their names."""
    found: Counter[tuple[str, ...]] = Counter()
    for text in filter(None, texts):
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                found[(one.name, *one.labels.values())] += one.value  # type: ignore[assignment]
    return found


def of_all(site: Cluster) -> Counter[tuple[str, ...]]:
    return sums(scrape(site, "node01", *NODE_NAMES))


def test_a_job_that_loses_a_node(site: Cluster) -> None:
    job = Training(site, steps=400).submit()
    job.trains()
    # Its ranks have made steps; daemons hear of it later, first the leader, then all others from it.
    job.wait(
        lambda: of_all(site)[("ckptless_node_jobs", "running")] == NODES, "all nodes know that it trains"
    )
    before = of_all(site)
    assert before[("ckptless_jobs", "running")] == 1
    assert before[("ckptless_ranks",)] == before[("ckptless_job_ranks", str(job.job_id))] == NODES - 1
    assert before[("ckptless_spare_nodes",)] == 1
    assert before[("ckptless_recoveries_total", "recovered")] == 0
    site.power_off("node03")
    job.trains(2)
    job.wait(lambda: recovered(job), "its ledgers have the recovery")
    (row,) = recovered(job)
    found = of_all(site)
    assert found[("ckptless_recoveries_total", "recovered")] == 1, "it is counted once"
    assert found[("ckptless_recovery_duration_seconds_count", "spare")] == 1
    took_s = found[("ckptless_recovery_duration_seconds_sum", "spare")]
    assert took_s == pytest.approx(sum(row.phases.values()))
    for phase in PHASES:
        told_s = found[("ckptless_recovery_phase_duration_seconds_sum", phase, "spare")]
        assert told_s == pytest.approx(row.phases[phase])
    faults = Counter((f.kind, f.source or "") for f in job.ledger().faults if f.job == job.run_name)
    assert "node-lost" in {kind for kind, _ in faults}
    told = {key[1:]: count for key, count in found.items() if key[0] == "ckptless_faults_total"}
    assert {key: count for key, count in told.items() if count} == faults
    assert told.keys() > faults.keys(), "what has not come yet is there, too"
    assert found[("ckptless_lost_nodes",)] == found[("ckptless_job_lost_nodes", str(job.job_id))] == 1
    assert found[("ckptless_spare_nodes",)] == 0
    assert found[("ckptless_job_generation", str(job.job_id))] == 2
    assert found[("ckptless_steps_total",)] > 0
    job.ended()
    job.same_bits()
    job.wait(lambda: of_all(site)[("ckptless_jobs_ended_total", "done")] == 1, "its end is counted once")
    site.restore()


def recovered(job: Training) -> list[RecoveryRecord]:
    return [r for r in job.ledger().recoveries if r.job == job.run_name and r.outcome == "recovered"]


def test_who_gets_what(site: Cluster) -> None:
    site.restore()
    (text,) = scrape(site, "node01", "node02", user="other")
    assert text is not None
    assert "ckptless_build_info" in text
    assert scrape(site, "node04", "node02", "node03") == [None, None]
    # Processes of a node itself, whoever's they are, at its loopback address.
    (text,) = scrape(site, "node04", "127.0.0.1", user="other")
    assert text is not None
    assert "ckptless_build_info" in text
    assert len(text) < 100_000
    path = site.var("node04") / TEXTFILE.removeprefix("/var/")
    assert "ckptless_build_info" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
