"""How the control plane's figures grow from 16 to 12,500 nodes of 8 ranks: `python -m tests.bench.scale`.

It measures nothing: it prints what `make scale` has written, docs/scale*.json. Times of recoveries are
virtual, CPU times the best of a few tries on that machine. Growth is told against N log N for what all nodes
do together, and for the leader, and against log N for any other node.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .figures import table

DOCS = Path(__file__).parents[2] / "docs"
FILES = ("scale", "scale_parts", "scale_memory")
Sizes: TypeAlias = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A figure: where it stands, how it is shown, and who has it: "all", "leader" or "other"."""

    what: str
    of: str
    file: str
    path: tuple[str, ...]
    unit: str = ""
    # What a daemon has before there is a job, which is not the job's.
    less: str = ""

    def value(self, row: Mapping[str, Any]) -> float:
        """Return the figure of one size."""
        found: Any = row
        for name in self.path:
            found = found[name]
        return float(found) - (float(row[self.less]) if self.less else 0.0)


FIGURES = (
    Figure("an agent lost, until all train again", "other", "scale", ("agent_lost_s",), "s"),
    Figure("a node dark, until all train again", "other", "scale", ("dark_s",), "s"),
    Figure("messages, half of the daemons at most, agent lost", "other", "scale", ("agent_lost", "median")),
    Figure("messages, the busiest but the leader, agent lost", "other", "scale", ("agent_lost", "most")),
    Figure(
        "bytes, half of the daemons at most, agent lost",
        "other",
        "scale",
        ("agent_lost", "median_nbytes"),
        "B",
    ),
    Figure(
        "bytes, the busiest but the leader, agent lost", "other", "scale", ("agent_lost", "most_nbytes"), "B"
    ),
    Figure(
        "bytes a second in peace, half of the daemons at most",
        "other",
        "scale",
        ("peace", "median_nbytes"),
        "B",
    ),
    Figure(
        "bytes a second in peace, the busiest but the leader", "other", "scale", ("peace", "most_nbytes"), "B"
    ),
    Figure("unpack and verify the decree", "other", "scale_parts", ("unpack_s",), "s"),
    Figure("an agent: which copies it makes again", "other", "scale_parts", ("remakes_s",), "s"),
    Figure("the decree on the wire", "other", "scale_parts", ("decree_nbytes",), "B"),
    Figure("an agent's report at a recovery", "other", "scale_parts", ("frozen_nbytes",), "B"),
    Figure("memory of a daemon for the job", "other", "scale_memory", ("other_nbytes",), "B", "bare_nbytes"),
    Figure("a voter: its row in the ledger", "other", "scale_parts", ("row_nbytes",), "B"),
    Figure("messages, agent lost", "leader", "scale", ("agent_lost", "leader")),
    Figure("bytes, agent lost", "leader", "scale", ("agent_lost", "leader_nbytes"), "B"),
    Figure("a report of an agent", "leader", "scale_parts", ("report_s",), "s"),
    Figure("a tick, after a report of each", "leader", "scale_parts", ("tick_s",), "s"),
    Figure("how far all are, counted anew", "leader", "scale_parts", ("tally_s",), "s"),
    Figure("the plan after one lost node", "leader", "scale_parts", ("plan_s",), "s"),
    Figure("the decree, packed", "leader", "scale_parts", ("pack_s",), "s"),
    Figure(
        "memory of the leader for the job", "leader", "scale_memory", ("leader_nbytes",), "B", "bare_nbytes"
    ),
    Figure("CPU of all daemons, all three stories", "all", "scale", ("cpu_s",), "s"),
)
# A figure may be measured by so much worse than it is.
NOISE = 1.15
# Fewer nodes all know each other.
FROM = 256


def measured() -> dict[str, Sizes]:
    """By file, and by number of nodes."""
    return {
        name: {row["nodes"]: row for row in json.loads((DOCS / f"{name}.json").read_text())} for name in FILES
    }


def shown(value: float, unit: str) -> str:
    """With three digits and the unit that fits."""
    if unit == "s":
        return (
            f"{value:.3g} s"
            if value >= 1
            else f"{value * 1e3:.3g} ms"
            if value >= 1e-3
            else f"{value * 1e6:.3g} us"
        )
    if unit == "B":
        power, name = next(
            (p, n) for p, n in ((9, "GB"), (6, "MB"), (3, "kB"), (0, "B")) if value >= 10**p or not p
        )
        return f"{value / 10**power:.3g} {name}"
    return f"{value:.0f}"


def bound(of: str, small: int, large: int) -> float:
    """How many times as much it may be with more nodes: N log N in all and at the leader, else log N."""
    grown = math.log(large) / math.log(small)
    return grown if of == "other" else grown * large / small


def rows(found: Mapping[str, Sizes], sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """A row for each figure: its values, and its growth over the last steps of the sizes."""
    for figure in FIGURES:
        values = {n: figure.value(row) for n, row in found[figure.file].items()}
        cells = [shown(values[n], figure.unit) if n in values else "" for n in sizes]
        yield (figure.of, figure.what, *cells, *growth(figure, values))


def growth(figure: Figure, values: Mapping[int, float]) -> tuple[str, str, str]:
    """From 256 nodes to the most that it was measured at: times as much, what is allowed, and the verdict."""
    known = sorted(values)
    small, large = next(n for n in known if n >= FROM), known[-1]
    times, allowed = values[large] / values[small], bound(figure.of, small, large)
    verdict = "**faster**" if times > allowed * NOISE else "no"
    return f"{times:.3g} ({small:,} to {large:,})", f"{allowed:.3g}", verdict


def told() -> str:
    """Return the table."""
    found = measured()
    sizes = sorted(set().union(*(of for of in found.values())))
    heads = [f"{n:,} nodes" for n in sizes]
    columns = ("who", "figure", *heads, "times as much", "allowed", "grows faster")
    return table(columns, rows(found, sizes))


if __name__ == "__main__":
    print(told())
