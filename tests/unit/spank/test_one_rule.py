"""What a run may ask for: the plugin, slurmctld and ckptless-run refuse the same, in the same words."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from ckptless.daemon.launch.main import command
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.elastic import check_allowed, sizes
from ckptless.daemon.settings.options import RUN_ROWS, ElasticSettings, RunOptions, check_fits

from .native import Parsers


def here(spares: int, nodes: int) -> str:
    """Return what ckptless-run says; empty: nothing."""
    try:
        check_fits(spares, nodes)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("spares", "nodes"), [(0, 1), (1, 1), (1, 2), (2, 2), (3, 4), (4, 3), (1024, 1024)])
def test_spares_of_so_many_nodes(parsers: Parsers, spares: int, nodes: int) -> None:
    verdict, *said = parsers.ask("fits", f"spares={spares}", str(nodes))
    assert here(spares, nodes) == ("" if verdict == "ok" else said[0])


def elastic_here(asked: dict[str, Any], nodes: int, spares: int) -> str:
    """The same of sizes. A step alone is for ckptless-run, whose own options may have the rest."""
    try:
        check_fits(spares, nodes)
        sizes(RunOptions(**asked), nodes - spares, spares)
    except UsageError as error:
        return "" if "is for an elastic job" in str(error) else str(error)
    return ""


def test_sizes_of_so_many_nodes(parsers: Parsers) -> None:
    draw = random.Random(7)
    rows = []
    for _ in range(20_000):
        words = draw.choice((["min_nodes", "max_nodes", "step"],) * 9 + (["sizes", draw.choice(RANGE)],) * 2)
        asked: dict[str, Any] = {word: draw.randint(1, 9) for word in words if draw.random() < 0.6}
        if "sizes" in words:
            asked["sizes"] = tuple(sorted(draw.sample(range(1, 10), draw.randint(1, 5))))
        if draw.random() < 0.4:
            asked["draw_in"] = draw.randint(0, 4)
        rows.append((asked, draw.randint(1, 12), draw.randint(0, 4)))
    rows.append(({"min_nodes": 1}, 4096, 0))
    rows.append(({"min_nodes": 1}, 4097, 0))
    rows.append(({"max_nodes": 1025, "draw_in": 1024}, 1, 0))
    rows.append(({"max_nodes": 1026, "draw_in": 1024}, 1, 0))
    answers = parsers.ask_all(
        [("fits", f"spares={spares},{spec(asked)}".strip(","), str(nodes)) for asked, nodes, spares in rows]
    )
    seen, drawn = set(), False
    for (asked, nodes, spares), (verdict, *said) in zip(rows, answers, strict=True):
        here_too = elastic_here(asked, nodes, spares)
        assert here_too == ("" if verdict == "ok" else said[0]), (asked, nodes, spares)
        drawn |= not here_too and max(asked.get("sizes", (asked.get("max_nodes", 0),))) > nodes
        seen.add(re.sub(r"\d+(:\d+)*|nodes?|spares?", "", here_too)[:40])
    assert len(seen) >= 10
    assert drawn


RANGE = "min_nodes", "max_nodes", "step"


def spec(asked: dict[str, Any]) -> str:
    text = {name: ":".join(map(str, said)) if name == "sizes" else said for name, said in asked.items()}
    return ",".join(f"{name.replace('_', '-')}={said}" for name, said in text.items())


@pytest.mark.parametrize(
    ("elastic", "partitions", "allowed"),
    [
        (ElasticSettings(), "gpu", True),
        (ElasticSettings(allow=False), "gpu", False),
        (ElasticSettings(allow=False), None, False),
        (ElasticSettings(partitions=("gpu", "big")), "gpu", True),
        (ElasticSettings(partitions=("gpu", "big")), "big", True),
        (ElasticSettings(partitions=("gpu", "big")), "bi", False),
        (ElasticSettings(partitions=("gpu", "big")), "bigger", False),
        (ElasticSettings(partitions=("gpu", "big")), None, True),  # Slurm's default: not known yet
    ],
)
def test_where_jobs_may_be_elastic(
    parsers: Parsers, elastic: ElasticSettings, partitions: str | None, allowed: bool
) -> None:
    argument = ",".join(elastic.partitions) if elastic.allow else "no"
    verdict, *said = parsers.ask("allowed", f"elastic={argument}" if argument else "", partitions or "NULL")
    assert verdict == ("ok" if allowed else "refused")
    if allowed:
        check_allowed(elastic, partitions or "", "")
    else:
        with pytest.raises(UsageError, match=f"^{re.escape(said[0])}$"):
            check_allowed(elastic, partitions or "", "")


def test_all_partitions_of_a_job_must_be_such(parsers: Parsers) -> None:
    assert parsers.ask("allowed", "elastic=a,b", "b,a") == ["ok"]
    verdict, said = parsers.ask("allowed", "elastic=a,b", "a,c,b")
    assert (verdict, said.partition(";")[0]) == ("refused", "partition c has no elastic jobs, as have a,b")


@pytest.mark.parametrize(
    ("key", "option", "low", "high"),
    [
        (row.option.spec, row.flags[-1], row.option.low, row.option.high)
        for row in RUN_ROWS
        if row.option.spec and row.option.plain
    ],
)
def test_ranges(parsers: Parsers, key: str, option: str, low: float, high: float) -> None:
    (range_,) = (one.type for one in command.params if option in one.opts)
    assert (range_.min, range_.max) == (low, high)  # type: ignore[attr-defined]  # click.IntRange, FloatRange
    for value, verdict in ((low, "ok"), (low - 1, "refused"), (high, "ok"), (high + 1, "refused")):
        assert parsers.ask("spec", f"{key}={value:.0f}")[0] == verdict, value
