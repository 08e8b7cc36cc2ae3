"""A bench's arithmetic: stalls, steps done again, losses that differ; and its page says what was measured."""

import json
import random
from typing import Any

import pytest

from tests.bench import figures, report
from tests.bench.crash import Line, Outcome, compared, completions, kill

STEP_S = 0.1


def trained(ranks: int, steps: int, at: float = 0.0, first: int = 1) -> dict[int, list[Line]]:
    """Ranks that need the same time for each step, one of them a little later than the others."""
    return {
        rank: [
            (step, f"{step}.{rank}", at + (step - first + 1) * STEP_S + (0.01 if rank == 1 else 0))
            for step in range(first, first + steps)
        ]
        for rank in range(ranks)
    }


def later(one: dict[int, list[Line]], other: dict[int, list[Line]]) -> dict[int, list[Line]]:
    return {rank: one[rank] + other[rank] for rank in one}


def test_a_step_is_completed_by_the_last_rank() -> None:
    assert completions(trained(3, 4)) == pytest.approx([0.11, 0.21, 0.31, 0.41])


def test_a_step_that_is_done_again_was_completed_the_first_time() -> None:
    found = later(trained(2, 5), trained(2, 5, at=2.0, first=4))
    assert completions(found)[:5] == pytest.approx([0.11, 0.21, 0.31, 0.41, 0.51])
    assert completions(found)[5] == pytest.approx(2.31)


@pytest.mark.parametrize("stall_s", [0.05, 0.3, 7.0])
def test_what_a_kill_costs(stall_s: float) -> None:
    """Killed in the middle of step 6, and trained again from step 4 on, whose end comes so much later."""
    began = 0.5 + stall_s
    found = later(trained(2, 5), trained(2, 10, at=began, first=4))
    told = kill(found, completions(found), victim=0, at=0.55, step_s=STEP_S)
    assert told.redone == 2
    # Steps 4 and 5 are done again before 6 is done at last: two steps more.
    assert told.stall_s == pytest.approx(stall_s + 2 * STEP_S)
    assert told.back_s == pytest.approx(began + 3 * STEP_S - 0.55)


def test_others_that_go_on_without_the_killed_rank() -> None:
    alone = {0: trained(1, 5)[0], 1: trained(1, 50)[0]}
    found = {0: alone[0] + [(step, "", 0.1 * step) for step in range(40, 51)], 1: alone[1]}
    told = kill(found, completions(found), victim=0, at=0.55, step_s=STEP_S)
    assert told.stall_s == pytest.approx(0.0, abs=1e-6)
    assert told.back_s == pytest.approx(4.0 - 0.55)


def test_losses_are_compared_where_both_have_them() -> None:
    clean = trained(2, 5)
    found = later(trained(2, 5), {0: [(5, "other", 1.0), (6, "new", 1.1)], 1: [(5, "5.1", 1.0)]})
    told = compared(Outcome([], STEP_S, 0, 0), found, clean)
    assert (told.losses, told.differ) == (12, 1)


def test_a_quantile_is_one_of_the_values() -> None:
    values = [random.Random(1).random() for _ in range(101)]
    assert figures.quantile(values, 0.5) == sorted(values)[50]
    assert figures.quantile(values, 0.99) == sorted(values)[99]
    assert figures.quantile([3.0], 0.99) == 3.0


def test_the_page_shows_what_was_measured() -> None:
    text = report.PAGE.read_text()
    assert report.page(text) == text, "run: python -m tests.bench.report"


def test_what_does_not_go_on_is_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"ranks": 4, "layout": "ddp", "size": "toy", "every": 1}
    ours: dict[str, Any] = {
        "system": "ckptless",
        "case": case,
        "load": 1.0,
        "kills": [{"stall_s": 0.2, "back_s": 0.25, "redone": 1}],
        "step_s": 0.03,
        "losses": 10,
        "differ": 0,
        "stuck": "",
    }
    stuck = {**ours, "system": "torchrun", "kills": [], "stuck": "its logs"}
    slow = {**ours, "system": "torchft", "kills": [{"stall_s": 5.0, "back_s": 6.0, "redone": 0}]}
    monkeypatch.setattr(report, "measured", lambda part: json.loads(json.dumps([ours, stuck, slow])))
    lines = report.crash().splitlines()
    assert "| torchrun + DCP, as it is | 0 | did not go on |  |  |  |  |  |" in lines
    assert any(
        line.startswith("| torchft 0.2.0, as it is | 1 | 5.00 | 5.00 | 25 | 6.00 | 0 | other")
        for line in lines
    )
