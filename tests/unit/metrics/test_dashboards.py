"""What Grafana would ask for our dashboards, and the picture of a small one, of recorded answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from tests.slurm.dashboards import BOARDS
from tests.slurm.grafana import COLOURS, Span, choices, picture, questions, series, shown, wrong

SPAN = Span(1000.0, 1060.0, 2.0)
# Of Prometheus 2.42: a value each 2 s, and none while the daemon was away; and what it says of a mistake.
LINES = json.loads(
    '{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"stage":"running"},'
    '"values":[[1000,"1"],[1002,"1"],[1010,"0"]]},{"metric":{"stage":"restoring"},"values":[[1010,"1"],[1012,"1"]]}]}}'
)
VALUE = json.loads(
    '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1060,"1234"]}]}}'
)
NOTHING = json.loads('{"status":"success","data":{"resultType":"vector","result":[]}}')
NO_NUMBER = json.loads(
    '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1060,"NaN"]}]}}'
)
REFUSED = json.loads(
    '{"status":"error","errorType":"bad_data","error":"invalid parameter \\"query\\": 1:5: parse error"}'
)


def panel(number: int, kind: str, unit: str, expr: str, legend: str) -> dict[str, Any]:
    return {
        "id": number,
        "type": kind,
        "title": f"A {kind}",
        "gridPos": {"x": 8 * number - 8, "y": 0, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}},
        "targets": [{"refId": "A", "expr": expr, "legendFormat": legend, "instant": kind == "stat"}],
    }


BOARD = {
    "title": "small",
    "panels": [
        panel(1, "stat", "none", 'a{run="$run"}', ""),
        panel(2, "timeseries", "short", "sum by (stage) (rate(b[$__rate_interval]))", "{{stage}}"),
        panel(3, "bargauge", "s", "sum by (stage) (increase(c[$__range]))", "{{stage}}, half"),
    ],
}


def test_queries_are_filled_in_as_grafana_does() -> None:
    asked = {key: urlsplit(path) for key, path in questions(BOARD, SPAN, {"run": "4711"}).items()}
    assert {key: (one.path, parse_qs(one.query)["query"]) for key, one in asked.items()} == {
        "1A": ("/api/v1/query", ['a{run="4711"}']),
        "2A": ("/api/v1/query_range", ["sum by (stage) (rate(b[8s]))"]),
        "3A": ("/api/v1/query_range", ["sum by (stage) (increase(c[60s]))"]),
    }
    assert parse_qs(asked["1A"].query)["time"] == ["1060.0"]
    assert [parse_qs(asked["2A"].query)[one] for one in ("start", "end", "step")] == [
        ["1000.0"],
        ["1060.0"],
        ["2.0"],
    ]


@pytest.mark.parametrize("name", BOARDS)
def test_of_our_dashboards_every_variable_is_known(name: str) -> None:
    board = BOARDS[name]
    asked = choices(board)
    assert (asked == {}) == (name == "cluster")
    found = questions(board, SPAN, dict.fromkeys(asked, "4711"))
    assert len(found) == sum(len(one["targets"]) for one in board["panels"])
    assert not any("%24" in path for path in found.values())


def test_what_is_refused_or_finds_nothing_is_named() -> None:
    assert wrong(BOARD, {"1A": VALUE, "2A": LINES, "3A": LINES}) == []
    refused, nothing = wrong(BOARD, {"1A": REFUSED, "2A": LINES, "3A": NOTHING})
    assert refused == 'A stat: invalid parameter "query": 1:5: parse error: a{run="$run"}'
    assert nothing.startswith("A bargauge: nothing is found by sum by (stage)")
    assert len(wrong(BOARD, {"1A": NO_NUMBER, "2A": LINES, "3A": LINES})) == 1


def test_where_values_are_missing_the_line_has_a_gap() -> None:
    first, second = series(BOARD["panels"][1], {"2A": LINES}, SPAN)
    assert (first.name, first.times) == ("running", [1000, 1002, 1010, 1010])
    assert str(first.values) == "[1.0, 1.0, nan, 0.0]"
    assert second == ("restoring", [1010, 1012], [1.0, 1.0])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        *((0, "short", "0"), (12, "short", "12"), (1234, "short", "1.23 K"), (2.5e6, "short", "2.5 Mil")),
        *((1234567, "none", "1234567"), (0, "s", "0"), (0.0421, "s", "42.1 ms"), (5e-5, "s", "50 µs")),
        *((2.5, "s", "2.5 s"), (90, "s", "1.5 mins"), (0, "bytes", "0"), (3 << 20, "bytes", "3 MiB")),
        *((512, "bytes", "512 B"), (0.0123, "percentunit", "1.23%"), (1, "bool_yes_no", "Yes")),
    ],
)
def test_units_are_grafanas(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_the_picture_has_titles_legends_and_values(tmp_path: Path) -> None:
    figure = picture(BOARD, {"1A": VALUE, "2A": LINES, "3A": LINES}, SPAN)
    figure.savefig(tmp_path / "small.png", dpi=80)
    pixels = (imread(tmp_path / "small.png")[..., :3] * 255).round()
    for number, colour in enumerate(COLOURS[:2]):
        assert (pixels == tuple(bytes.fromhex(colour[1:]))).all(axis=-1).any(), f"line {number} is hidden"
    found = {one.get_text().strip() for one in figure.findobj(Text)}
    assert {
        "small",
        "A stat",
        "A timeseries",
        "A bargauge",
        "1234",
        "running",
        "restoring, half",
        "1 s",
    } <= found
    assert "00:16:40 to 00:17:40 UTC" in found
