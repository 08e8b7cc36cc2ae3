"""Draws etc/grafana's dashboards from what a real Prometheus has of a job that is struck: `make dashboards`.

The job runs on real Slurm, in namespaces of this machine: a rank is killed, one raises, a node loses its
power, one becomes unwell, a daemon is killed, and at last a rank is slower than the others. `--again` draws
what was recorded before. Exit code 1: a query was refused or has found nothing, or an alert is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import urlencode

from tests.local.localrun import fault

from .cluster import requirements
from .cluster.api import Cluster
from .cluster.plan import CONTROLLER, NETWORK, Service
from .grafana import Span, choices, picture, questions, wrong
from .test_health import PACKAGE, lamp
from .training import PACKAGES, ROOT, YAML, Training, make_site

NODES, SPARES = 6, 2
STEP_S = 2.0
BOARDS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "etc/grafana").glob("*.json")}
RECORD = ROOT / "build" / "dashboards.json"
AT = "127.0.0.1:9090"
SITE = (
    f"{YAML}health: {{without: [kernel-log, host, nvml]}}\n"
    f"metrics: {{listen: '0.0.0.0:9821', allow: [{NETWORK}.0/24], jobs: true}}\n"
)
PROMETHEUS = {
    "global": {"scrape_interval": f"{STEP_S:g}s", "evaluation_interval": f"{STEP_S:g}s"},
    "rule_files": ["alerts.yaml"],
    "scrape_configs": [
        {
            "job_name": "ckptless",
            "static_configs": [{"targets": [f"node{number:02}:9821" for number in range(1, NODES + 1)]}],
        }
    ],
}
FIRED = 'count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[$__range]))'
EXPECTED = {"CkptlessDaemonDown", "CkptlessNodeUnwell", "CkptlessStragglers"}
DEADLINE_S = 400.0
ASK = """
import json, sys, urllib.error, urllib.request
found = {}
for path in sys.argv[2:]:
    try:
        said = urllib.request.urlopen(f"http://{sys.argv[1]}{path}", timeout=20)
    except urllib.error.HTTPError as error:
        said = error  # it says why
    found[path] = json.load(said)
print(json.dumps(found))
"""


def watched(place: Path) -> Cluster:
    """A cluster, still off, with a Prometheus on its controller; alerts wait a second for each minute."""
    rules = (ROOT / "etc/prometheus/alerts.yaml").read_text().replace("for: 1h", "for: 60m")
    files = {
        "alerts.yaml": re.sub(r"for: (\d+)m", r"for: \1s", rules),
        "prometheus.json": json.dumps(PROMETHEUS),
    }
    site = make_site(place / "cluster", place / "build", NODES, yaml=SITE, more={**PACKAGE, **files})
    words = (f"--config.file={PACKAGES}/prometheus.json", "--storage.tsdb.path=/var/prometheus")
    service = Service(
        name="prometheus", argv=("prometheus", *words, f"--web.listen-address={AT}"), where="ctl"
    )
    site.plan = dataclasses.replace(site.plan, services=(*site.plan.services, service))
    return site


def ask(site: Cluster, questions: dict[str, str]) -> dict[str, Any]:
    """Return what Prometheus answers."""
    said = json.loads(site.run(CONTROLLER, sys.executable, "-c", ASK, AT, *questions.values()).stdout)
    return {key: said[path] for key, path in questions.items()}


def chaos(site: Cluster, steps: int) -> None:
    """Have a job train, and be struck by everything, each so many steps after the other; it goes on."""
    faults = [
        fault("forward", "kill", 1, steps),
        fault("backward", "raise", 3, 2 * steps),
        fault("forward", "slow", 0, often=True, **{"from": 6 * steps}),
    ]
    job = Training(site, faults, nodes=NODES, spares=SPARES, steps=1_000_000).submit()
    strikes: list[Callable[[], object]] = [
        lambda: site.power_off("node03"),
        lambda: lamp(site, "node02", "link-down"),
        lambda: site.service_kill("node01", "ckptlessd"),
    ]
    for number, strike in enumerate(strikes, 3):
        reach(job, number * steps)
        strike()
    reach(job, 9 * steps)


def reach(job: Training, step: int) -> None:
    """Wait for it."""
    job.wait(lambda: job.newest() >= step, f"step {step}", DEADLINE_S)


def record(steps: int) -> dict[str, Any]:
    """Return all that Grafana would be told, of a run of its own."""
    with tempfile.TemporaryDirectory(prefix="ckptless-dashboards-") as place, watched(Path(place)) as site:
        begin = time.time()
        chaos(site, steps)
        span = Span(begin, time.time(), STEP_S)
        alerts = urlencode({"query": span.fill(FIRED, {}), "time": span.end})
        found: dict[str, Any] = {"span": span, **ask(site, {"alerts": f"/api/v1/query?{alerts}"})}
        for name, board in BOARDS.items():
            variables = {key: said["data"][-1] for key, said in ask(site, choices(board)).items()}
            found[name] = ask(site, questions(board, span, variables))
        return found


def fired(found: dict[str, Any]) -> set[str]:
    """The names of the alerts that did."""
    return {one["metric"]["alertname"] for one in found["alerts"]["data"]["result"]}


def missing() -> list[str]:
    """Return what stands in the way of a run, each in a few words."""
    return [*requirements.missing(), *([] if which("prometheus") else ["prometheus (package prometheus)"])]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help=f"draw what is in {RECORD}")
    parser.add_argument("--steps", type=int, default=80, help="of the job, from each strike to the next")
    args = parser.parse_args()
    if not args.again:
        if lacks := missing():
            sys.exit(f"dashboards: it takes {', '.join(lacks)}")
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record(args.steps)))
    found = json.loads(RECORD.read_text())
    span = Span(*found["span"])
    print(f"{span.end - span.begin:.0f} s; alerts that have fired: {', '.join(sorted(fired(found)))}")
    faults = [f"{name}: {text}" for name, board in BOARDS.items() for text in wrong(board, found[name])]
    faults += [f"{name} has not fired" for name in sorted(EXPECTED - fired(found))]
    if faults:
        sys.exit("\n".join(faults))
    for name, board in BOARDS.items():
        file = ROOT / f"docs/dashboard-{name}.png"
        picture(board, found[name], span).savefig(file, dpi=80, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
