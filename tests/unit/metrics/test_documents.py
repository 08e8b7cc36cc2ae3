"""The page, dashboards and alerts: they name metrics that there are, and promtool finds no fault with any."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptless.daemon.ckptlessd.metrics.catalog import METRICS, OF_PROCESS
from ckptless.daemon.ckptlessd.metrics.exposition import encode, families
from ckptless.daemon.ckptlessd.metrics.readings import readings
from tests.reading import blocks

from .jobs import facts, health, job, lived

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "etc" / "prometheus" / "alerts.yaml"
BOARDS = sorted((ROOT / "etc" / "grafana").glob("*.json"))
# What queries may name: samples, by their suffixes too.
SAMPLES = {
    name: one
    for one in METRICS
    for name in (
        (f"{one.name}_bucket", f"{one.name}_sum", f"{one.name}_count")
        if one.kind == "histogram"
        else (one.series,)
    )
}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries(board: Path) -> Iterator[str]:
    read = json.loads(board.read_text())
    for panel in read["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in read["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


ALL = [*(query for board in BOARDS for query in queries(board)), *(rule["expr"] for rule in alerts())]


def promtool(*words: str, said: str = "") -> str:
    if shutil.which("promtool") is None:
        reason = "promtool is not installed (Debian: prometheus)"
        if os.environ.get("CKPTLESS_REQUIRE_PROMTOOL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(
        ["promtool", *words], input=said, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---------------------------------------------------------------------------------------- the page


def test_the_tables_of_the_page_are_up_to_date() -> None:
    """Else: make options."""
    assert runpy.run_path(str(ROOT / "docs" / "metrics.py"))["text"]() == PAGE.read_text()


def test_every_metric_is_on_the_page() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \|", PAGE.read_text())
    assert rows == [one.series for one in METRICS]


def test_what_the_library_says_of_the_process_is_on_the_page() -> None:
    text = encode(families({}), open_metrics=False).decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith(OF_PROCESS) for name in names)
    words = re.findall(r"`(\w+)`", PAGE.read_text())
    assert all(name in words or name.removeprefix(OF_PROCESS) in words for name in names)


# ------------------------------------------------------------------------------ alerts and dashboards


@pytest.mark.parametrize("query", ALL)
def test_a_query_names_what_there_is(query: str) -> None:
    for name, selector in re.findall(r"\b(ckptless_\w+)(?:{([^}]*)})?", query):
        if not name.startswith(OF_PROCESS):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!=|=)", selector))
            assert labels <= {*SAMPLES[name].labels, "le"}, (name, labels)
    grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
    known = {label for one in METRICS for label in one.labels}
    assert grouped <= known | {"le", "instance"}


def test_labels_of_alerts_are_of_their_metrics() -> None:
    for rule in alerts():
        names = set(re.findall(r"\bckptless_\w+", rule["expr"]))
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        given = {"instance"}.union(*(SAMPLES[name].labels for name in names))
        assert used <= given, rule["alert"]


def test_words_in_queries_are_words_of_the_metrics() -> None:
    """A stage, or an outcome, that does not exist would never be found."""
    values = readings(facts(("1", job()), tally=lived(), report=health()), {}, per_job=True)
    looked_at = 0
    for name, selector in re.findall(r"\b(ckptless_\w+){([^}]*)}", " ".join(ALL)):
        one = SAMPLES[name]
        for label, words in re.findall(r'(\w+)=~?"([^"$]*)"', selector):
            if label != "le":
                found = {key[one.labels.index(label)] for key in values[one.name]}
                assert set(words.split("|")) <= found, (name, label, words)
                looked_at += 1
    assert looked_at > 5


def test_each_alert_has_its_section() -> None:
    headings = re.findall(r"(?m)^### (\w+)$", PAGE.read_text().partition("\n## Alerts\n")[2])
    assert sorted(headings) == sorted(rule["alert"] for rule in alerts())
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/metrics.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_whole(board: Path) -> None:
    read = json.loads(board.read_text())
    assert read["uid"] == f"ckptless-{board.stem}"
    panels = read["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"]) if at["x"] + x < 24
        }
        assert len(cells) == at["w"] * at["h"]
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${source}"
    assert len(BOARDS) == 2


# ----------------------------------------------------------------------------------------- promtool


def test_promtool_finds_no_fault_with_names_and_units() -> None:
    given = facts(("4711", job()), tally=lived(), report=health())
    text = encode(families(readings(given, {}, per_job=True)), open_metrics=False)
    assert promtool("check", "metrics", said=text.decode()) == ""


def test_promtool_finds_no_fault_with_the_alerts() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", "--lint-fatal", str(ALERTS))


def test_promtool_finds_no_fault_with_the_page(tmp_path: Path) -> None:
    """What docs/metrics.md has for Prometheus, with the alerts beside it."""
    (text,) = (text for text in blocks("docs/metrics.md") if text.startswith("scrape_configs:"))
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(ALERTS, tmp_path)
    assert f"{len(alerts())} rules found" in promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_alerts_fire_for_what_they_are_there_for_alone() -> None:
    cases = Path(__file__).with_name("alerts_test.yaml")
    assert f"exp_samples: [{{value: {len(alerts())}}}]" in cases.read_text(), "each is to fire"
    assert "SUCCESS" in promtool("test", "rules", str(cases))
