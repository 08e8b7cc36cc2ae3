"""How often a job commits: within its budget, soon, without swinging, and never too seldom."""

import itertools
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.commit.cadence import (
    FIRST_COMMITS,
    MAX_STEPS,
    WARM_UP,
    Cadence,
    Costs,
    Meter,
    Plan,
    Tuner,
    checked,
    first_plan,
    together,
)
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups

BUDGET = 0.01

durations = st.floats(1e-6, 10.0)


def intervals(costs: Callable[[int, int], Costs], plans: int, budget: float = BUDGET) -> list[int]:
    """What is chosen, plan by plan, of costs that may depend on the number of the plan and its interval."""
    tuner, plan, found = Tuner(budget), first_plan(0), []
    for number in range(plans):
        plan = tuner.next(plan, costs(number, plan.every))
        found.append(plan.every)
    return found


def changes(found: list[int]) -> int:
    return sum(one != other for one, other in itertools.pairwise(found))


def test_plans_say_which_steps_and_follow_each_other() -> None:
    plan = Plan(after=8, every=5, commits=3)
    assert [step for step in range(9, 24) if plan.is_due(step)] == [13, 18, 23]
    assert plan.end == 23
    following = Tuner(BUDGET).next(plan, Costs(commit_s=0.001, step_s=1.0))
    assert following.after == 23


def test_a_cheap_commit_is_made_at_every_step() -> None:
    assert set(intervals(lambda _n, _k: Costs(0.001, 0.2), 50)) == {1}


def test_a_dear_one_as_often_as_the_budget_allows() -> None:
    costs = Costs(commit_s=0.05, step_s=0.5)
    found = intervals(lambda _n, _k: costs, 50)
    assert changes(found) == 0
    assert BUDGET / 2 < costs.share(found[-1]) <= BUDGET


@given(durations, durations, st.floats(0.001, 0.5))
def test_whatever_it_costs_it_settles_within_the_budget_or_at_the_bound(
    commit_s: float, step_s: float, budget: float
) -> None:
    costs = Costs(commit_s, step_s)
    found = intervals(lambda _n, _k: costs, 30, budget)
    assert changes(found) == 0
    assert 1 <= found[-1] <= MAX_STEPS
    assert costs.share(found[-1]) <= budget * (1 + 1e-9) or found[-1] == MAX_STEPS


@given(st.lists(st.tuples(durations, durations), min_size=1, max_size=40))
def test_no_costs_make_it_commit_too_seldom_or_plan_for_ever(costs: list[tuple[float, float]]) -> None:
    tuner, plan = Tuner(BUDGET), first_plan(0)
    for commit_s, step_s in costs:
        before, plan = plan, tuner.next(plan, Costs(commit_s, step_s))
        assert plan.after == before.after + before.every * before.commits
        assert 1 <= plan.every <= MAX_STEPS
        assert 2 <= plan.commits <= 1000


def test_noise_does_not_move_it() -> None:
    wave = (1.0, 1.15, 0.9, 1.1, 0.85)
    found = intervals(lambda n, _k: Costs(0.05 * wave[n % 5], 0.5 * wave[(n * 2) % 5]), 200)
    assert changes(found[5:]) <= 1


def test_it_reacts_to_a_change_in_either_direction() -> None:
    def costs(number: int, _every: int) -> Costs:
        return Costs(0.05 if 20 <= number < 40 else 0.0005, 0.1)

    found = intervals(costs, 100)
    assert found[19] == 1
    assert costs(25, 0).share(found[25]) <= BUDGET
    assert found[-1] == 1
    # Down again by halves, and never past what it needs.
    assert all(later <= now for now, later in itertools.pairwise(found[44:]))


def test_copies_that_are_waited_for_do_not_make_it_swing() -> None:
    # Sending takes 2 s: with fewer than 20 steps in between, a commit waits for that of the one before.
    def costs(_number: int, every: int) -> Costs:
        return Costs(0.002 + max(0.0, 2.0 - every * 0.1), 0.1)

    found = intervals(costs, 1000)
    assert changes(found[:500]) <= 40
    # Less and less often it is tried whether it could be shorter.
    assert changes(found[500:]) < changes(found[:500])
    assert sum(costs(0, every).share(every) <= BUDGET for every in found[500:]) > 450


def test_nothing_measured_changes_nothing() -> None:
    assert Tuner(BUDGET).next(Plan(after=0, every=7, commits=3), None) == Plan(21, 7, FIRST_COMMITS)


def test_of_ranks_that_wait_for_each_other_the_slowest_commit_counts() -> None:
    # Rank 0 writes nothing; it waits for the rank that does, in the next step's collective.
    mine = Costs(commit_s=0.001, step_s=0.109)
    found = together(mine, [Costs(0.01, 0.1), Costs(0.002, 0.108)], every=1)
    assert found.commit_s == 0.01
    assert found.step_s == pytest.approx(0.1)
    assert together(mine, [Costs(1.0, 0.1)], every=1).step_s == 0.0


def test_the_meter_counts_what_lies_between() -> None:
    meter, now = Meter(), 0.0
    meter.begin()
    assert meter.share is None
    for number in range(1, 41):
        now += 0.98
        meter.enter(now)
        committed = number % 2 == 0
        now += 0.04 if committed else 0.0
        meter.leave(now, committed=committed)
    costs = meter.take()
    assert costs is not None
    assert costs.commit_s == pytest.approx(0.04)
    assert costs.step_s == pytest.approx(0.98)
    assert meter.share == pytest.approx(0.02, rel=0.1)
    assert meter.take() is None


def test_the_meter_forgets_a_recovery_and_the_first_commits() -> None:
    meter, now = Meter(), 0.0
    for _generation in range(2):
        now += 100.0
        meter.begin()
        for number in range(WARM_UP + 2):
            now += 1.0
            meter.enter(now)
            now += 5.0 if number < WARM_UP else 0.1
            meter.leave(now, committed=True)
        costs = meter.take()
        assert costs is not None
        assert costs.commit_s == pytest.approx(0.1)
        assert costs.step_s == pytest.approx(1.0)


def test_a_fixed_interval_follows_from_the_number_of_the_step() -> None:
    nowhere = cast("ProcessGroups", None)  # is not asked when a step is due
    fixed = Cadence(nowhere, 4)
    assert [step for step in range(1, 13) if fixed.is_due(step)] == [1, 4, 8, 12]
    assert all(Cadence(nowhere, 1).is_due(step) for step in range(1, 9))


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "often", None])
def test_what_is_no_interval_is_said(every: object) -> None:
    with pytest.raises(UsageError, match="commit_every"):
        checked(every, BUDGET)


@pytest.mark.parametrize("budget", [0.0, 1.0, -0.1])
def test_what_is_no_budget_is_said(budget: float) -> None:
    with pytest.raises(UsageError, match="commit_budget"):
        checked("auto", budget)


def test_what_is_one() -> None:
    assert (checked("auto", 0.02), checked(3, BUDGET)) == (None, 3)
