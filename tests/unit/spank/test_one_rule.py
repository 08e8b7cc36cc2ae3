"""What a run may ask for: the plugin, slurmctld and ckptless-run refuse the same, in the same words."""

from __future__ import annotations

import re

import pytest
from native import SPANK, Parsers

from ckptless.daemon.api.errors import UsageError
from ckptless.daemon.launch import bounds
from ckptless.daemon.launch.main import command


def here(spares: int, nodes: int) -> str:
    """What ckptless-run says; empty: nothing."""
    try:
        bounds.check_fits(spares, nodes)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("spares", "nodes"), [(0, 1), (1, 1), (1, 2), (2, 2), (3, 4), (4, 3), (1024, 1024)])
def test_spares_of_so_many_nodes(parsers: Parsers, spares: int, nodes: int) -> None:
    verdict, *said = parsers.ask("fits", f"spares={spares}", str(nodes))
    assert here(spares, nodes) == ("" if verdict == "ok" else said[0])


def test_a_heterogeneous_job() -> None:
    found = re.search(r"#define CKPTLESS_NO_HET((?:.*\\\n)*.*\n)", (SPANK / "options.h").read_text())
    assert found is not None
    assert "".join(re.findall(r'"([^"]*)"', found[1])) == bounds.NO_HET


@pytest.mark.parametrize(
    ("key", "option", "low", "high"),
    [
        ("spares", "--spares", 0, bounds.MAX_SPARES),
        ("replicas", "--replicas", 1, bounds.MAX_COPIES),
        ("max-stall", "--max-stall", bounds.MIN_STALL_S, bounds.MAX_STALL_S),
    ],
)
def test_ranges(parsers: Parsers, key: str, option: str, low: float, high: float) -> None:
    (range_,) = (one.type for one in command.params if option in one.opts)
    assert (range_.min, range_.max) == (low, high)  # type: ignore[attr-defined]  # click.IntRange, FloatRange
    for value, verdict in ((low, "ok"), (low - 1, "refused"), (high, "ok"), (high + 1, "refused")):
        assert parsers.ask("spec", f"{key}={value:.0f}")[0] == verdict, value
