"""What a run may ask for: the plugin, slurmctld and ckptless-run refuse the same, in the same words."""

from __future__ import annotations

import pytest

from ckptless.daemon.launch.main import command
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.options import RUN_ROWS, check_fits

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
