"""The timed record of a recovery."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.recovery.timeline import Timeline
from ckptless.daemon.protocol.records import PHASES


def test_each_phase_lasts_from_the_mark_before_it() -> None:
    timeline = Timeline(10.0)
    for phase, at in zip(PHASES, (10.5, 11.0, 13.0, 13.0, 14.0, 14.25, 15.0), strict=True):
        timeline.mark(phase, at)
    assert list(timeline.phases()) == list(PHASES)
    assert list(timeline.phases().values()) == [0.5, 0.5, 2.0, 0.0, 1.0, 0.25, 0.75]
    assert timeline.total_s(15.0) == 5.0


def test_only_the_first_mark_counts() -> None:
    timeline = Timeline(0.0)
    timeline.mark("stop", 1.0)
    timeline.mark("stop", 9.0)
    assert timeline.phases() == {"stop": 1.0}


def test_a_phase_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'lunch' is no phase"):
        Timeline(0.0).mark("lunch", 1.0)


@given(st.dictionaries(st.sampled_from(PHASES), st.floats(0, 100)))
def test_no_phase_is_negative_and_the_sum_is_the_recovery(marks: dict[str, float]) -> None:
    timeline = Timeline(50.0)
    for phase, at in marks.items():
        timeline.mark(phase, at)
    durations = timeline.phases()
    assert set(durations) == set(marks)
    assert all(seconds >= 0 for seconds in durations.values())
    assert sum(durations.values()) == pytest.approx(max([50.0, *marks.values()]) - 50.0)
