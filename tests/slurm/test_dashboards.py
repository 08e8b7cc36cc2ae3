"""Each panel of the dashboards has something to show of a job that is struck; alerts fire that should."""

from __future__ import annotations

import os

import pytest

from .conftest import require_slurm
from .dashboards import BOARDS, EXPECTED, fired, missing, record
from .grafana import Span, picture, series, wrong

STEPS = 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_query_is_answered() -> None:
    require_slurm()
    if lacks := missing():
        reason = f"no Prometheus here, it takes {', '.join(lacks)}"
        pytest.fail(reason) if os.environ.get("CKPTLESS_REQUIRE_PROMTOOL") == "1" else pytest.skip(reason)
    found = record(STEPS)
    span = Span(*found["span"])
    for name, board in BOARDS.items():
        assert wrong(board, found[name]) == []
        assert picture(board, found[name], span).axes
    panels = {panel["title"]: panel for panel in BOARDS["cluster"]["panels"]}
    # The first of each kind, and of each rung, too.
    faults = series(panels["Faults"], found["cluster"], span)
    assert {"died", "raised", "node-lost"} <= {one.name for one in faults if max(one.values) > 0}
    recoveries = series(panels["How long recoveries take, by rung"], found["cluster"], span)
    assert {"in-process, half", "process, half", "spare, half"} <= {one.name for one in recoveries}
    # In so few steps nobody is slow for long.
    assert fired(found) >= EXPECTED - {"CkptlessStragglers"}
