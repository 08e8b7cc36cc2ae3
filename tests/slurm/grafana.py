"""What Grafana asks for a dashboard, and a picture of what it shows: its grid, titles, units and legends.

As much of Grafana as the dashboards of etc/grafana use: stat, timeseries and bargauge, with its defaults.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, log2
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlencode

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, MultipleLocator

Board: TypeAlias = Mapping[str, Any]
# What Prometheus has said, by the panel's number and the target's letter.
Answers: TypeAlias = Mapping[str, Any]

COLUMNS, COLUMN_IN, ROW_IN, HEAD_IN, GAP_IN = 24, 0.5, 0.36, 0.45, 0.04
GROUND, EDGE, INK, GRID = "#f4f5f5", "#d8dade", "#24292e", "#e4e6e8"
COLOURS = ("#56a64b", "#f2cc0c", "#3274d9", "#ff780a", "#e02f44", "#8f3bb8", "#37872d", "#b877d9", "#96d98d")


class Span(NamedTuple):
    """The time that is looked at, as Unix time; each `step_s` a value is asked for, and was scraped."""

    begin: float
    end: float
    step_s: float

    def fill(self, query: str, variables: Mapping[str, str]) -> str:
        """Return a query with Grafana's variables, and the dashboard's own, as it sends it."""
        # As Grafana takes it where a value is asked for as often as there is a new one.
        own = {"__rate_interval": f"{4 * self.step_s:g}s", "__range": f"{self.end - self.begin:.0f}s"}
        return re.sub(r"\$(\w+)", lambda name: {**own, **variables}[name[1]], query)


def targets(board: Board) -> Iterator[tuple[str, Any, Any]]:
    """Yield each target of each panel, with the key of its answer."""
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield f"{panel['id']}{target['refId']}", panel, target


def choices(board: Board) -> dict[str, str]:
    """Return what Prometheus is asked for the values of the dashboard's variables, by their names."""
    found = {}
    for one in board["templating"]["list"]:
        if of := re.fullmatch(r"label_values\((\w+), (\w+)\)", one.get("definition", "")):
            found[one["name"]] = f"/api/v1/label/{of[2]}/values?{urlencode({'match[]': of[1]})}"
    return found


def questions(board: Board, span: Span, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what Prometheus is asked for all panels."""
    found = {}
    for key, _, target in targets(board):
        query = {"query": span.fill(target["expr"], variables)}
        if target.get("instant"):
            found[key] = f"/api/v1/query?{urlencode({**query, 'time': span.end})}"
        else:
            times = {"start": span.begin, "end": span.end, "step": span.step_s}
            found[key] = f"/api/v1/query_range?{urlencode({**query, **times})}"
    return found


def wrong(board: Board, answers: Answers) -> list[str]:
    """Name the targets whose query was refused, or has found nothing."""
    found = []
    for key, panel, target in targets(board):
        said = answers[key]
        if said["status"] != "success":
            found.append(f"{panel['title']}: {said['error']}: {target['expr']}")
        elif all(text == "NaN" for one in said["data"]["result"] for _, text in _values(one)):
            found.append(f"{panel['title']}: nothing is found by {target['expr']}")
    return found


def _values(one: Any) -> list[tuple[float, str]]:
    return one.get("values") or [one["value"]]


class Series(NamedTuple):
    """A line, or its last value alone."""

    name: str
    times: list[float]
    values: list[float]


def series(panel: Any, answers: Answers, span: Span) -> list[Series]:
    """Return what a panel shows; where a value is missing there is a gap."""
    found = []
    for target in panel["targets"]:
        for one in answers[f"{panel['id']}{target['refId']}"]["data"]["result"]:
            name = target["legendFormat"]
            for label, value in one["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            times: list[float] = []
            values: list[float] = []
            for at, text in _values(one):
                if times and at - times[-1] > 1.5 * span.step_s:
                    times.append(at)
                    values.append(float("nan"))
                times.append(at)
                values.append(float(text))
            found.append(Series(name, times, values))
    return found


def shown(value: float, unit: str) -> str:
    """Return a value in one of Grafana's units."""
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    scales: dict[str, Sequence[tuple[float, str]]] = {
        "bytes": ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")),
        "s": ((60, " mins"), (1, " s"), (1e-3, " ms"), (1e-6, " µs")),
        "short": ((1e6, " Mil"), (1e3, " K")),
    }
    for least, word in scales.get(unit, ()):
        if abs(value) >= least:
            return f"{value / least:.3g}{word}"
    return f"{value:.10g}" if unit == "none" else f"{value:.3g}"


# ------------------------------------------------------------------------------------------- drawing


def picture(board: Board, answers: Answers, span: Span) -> Figure:
    """Draw all panels where the dashboard has them."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    width, height = COLUMNS * COLUMN_IN, rows * ROW_IN + HEAD_IN
    figure = Figure(figsize=(width, height), facecolor=GROUND)
    when = " to ".join(map(_clock, (span.begin, span.end)))
    for text, x, side in ((board["title"], 0.1, "left"), (f"{when} UTC", width - 0.1, "right")):
        figure.text(x / width, 1 - HEAD_IN / 2 / height, text, ha=side, va="center", color=INK)
    for panel in board["panels"]:
        at, unit = panel["gridPos"], panel["fieldConfig"]["defaults"]["unit"]
        found = series(panel, answers, span)
        x, y = at["x"] * COLUMN_IN + GAP_IN, height - HEAD_IN - (at["y"] + at["h"]) * ROW_IN + GAP_IN
        w, h = at["w"] * COLUMN_IN - 2 * GAP_IN, at["h"] * ROW_IN - 2 * GAP_IN
        look: dict[str, Any] = {"facecolor": "white", "edgecolor": EDGE, "zorder": -1}
        figure.add_artist(Rectangle((x / width, y / height), w / width, h / height, **look))
        figure.text(
            (x + 0.1) / width, (y + h - 0.08) / height, panel["title"], va="top", fontsize=8, color=INK
        )
        lines = ceil(len(found) / (at["w"] // 2)) if panel["type"] == "timeseries" else 0
        left, low = {"stat": (0.1, 0.1), "bargauge": (1.35, 0.15), "timeseries": (0.6, 0.45 + 0.15 * lines)}[
            panel["type"]
        ]
        inner = (x + left) / width, (y + low) / height, (w - left - 0.15) / width, (h - low - 0.4) / height
        axes = figure.add_axes(inner)
        DRAWN[panel["type"]](axes, found, unit)
        if lines:
            axes.set_xlim(span.begin, span.end)
            axes.xaxis.set_major_locator(MultipleLocator(30 * ceil((span.end - span.begin) / 180)))
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=at["w"] // 2, **LEGEND)
    return figure


LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 6.5, "handlelength": 1, "columnspacing": 1}


def _clock(at: float, _position: object = None) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at))


def _stat(axes: Axes, found: Sequence[Series], unit: str) -> None:
    axes.set_axis_off()
    for number, one in enumerate(found):
        x, text = (number + 0.5) / len(found), shown(one.values[-1], unit)
        axes.text(x, 0.4, text, ha="center", va="center", fontsize=20, color=COLOURS[0])
        axes.text(x, 0.95, one.name, ha="center", va="center", fontsize=7, color=INK)


def _lines(axes: Axes, found: Sequence[Series], unit: str) -> None:
    for number, one in enumerate(found):
        axes.plot(one.times, one.values, color=COLOURS[number % len(COLOURS)], linewidth=1.1, label=one.name)
    top = max((value for one in found for value in one.values if value == value), default=0) or 1.0
    axes.set_ylim(0, 1.1 * top)
    axes.xaxis.set_major_formatter(_clock)
    even = MultipleLocator(2 ** ceil(log2(top / 4)))
    axes.yaxis.set_major_locator(even if unit == "bytes" else MaxNLocator(4, steps=(1, 2, 2.5, 5, 10)))
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, unit))
    axes.tick_params(labelsize=6.5, length=0, colors=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.spines[:].set_visible(False)


def _bars(axes: Axes, found: Sequence[Series], unit: str) -> None:
    values = [one.values[-1] for one in found]
    axes.barh([one.name for one in found], values, height=0.7, color=COLOURS[0])
    for number, value in enumerate(values):
        axes.text(value, number, f" {shown(value, unit)}", va="center", fontsize=7.5, color=INK)
    axes.set_xlim(0, 1.2 * max(values, default=1))
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(labelsize=7.5, length=0, colors=INK)
    axes.spines[:].set_visible(False)


DRAWN: Mapping[str, Callable[[Axes, Sequence[Series], str], None]] = {
    "stat": _stat,
    "timeseries": _lines,
    "bargauge": _bars,
}
