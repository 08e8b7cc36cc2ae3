"""Process groups are left at any moment and renewed, and training goes on with the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from ckptless.pytorch_hooks.torch_private import calls as torch_private

from .world import run

KINDS = ["plain", "view", "frozen", "batchnorm", "static", "unused", "no_sync"]


def test_abort_frees_a_rank_blocked_by_a_stopped_peer() -> None:
    results = run("fabric_scenarios:stopped_peer", 3, lost=(2,), deadline=20)
    for result in results[:2]:
        assert result["first"] == 3.0
        assert result["blocked"] == "GenerationEnded"
        assert result["waited"] < 1.0
        assert result["again"] < 0.1
        assert set(result["after"].values()) == {"GenerationEnded"}
        assert result["late"] < 1.0
        assert result["broken"] == []
        assert result["close"] < 5.0


def test_a_dead_peer_is_a_failed_collective_until_the_verdict() -> None:
    results = run("fabric_scenarios:killed_peer", 3, lost=(2,), deadline=20)
    for result in results[:2]:
        assert result["seen"] == "CollectiveFailed"
        assert result["before"] == ["CollectiveFailed", "CollectiveFailed", True, False]
        assert result["after"] == ["GenerationEnded", "GenerationEnded", True]
        assert result["calls"] == 1
        assert result["again"] == 2.0


def test_configure_is_left_when_a_peer_never_comes() -> None:
    (result,) = run("fabric_scenarios:nobody_comes", 1, deadline=20)
    assert result["aborted"] == "GenerationEnded"
    assert result["waited"] < 0.5
    assert result["stuck"] < 0.5  # the caller's own store connection was not held
    assert result["early"] == ["GenerationEnded"]
    assert result["failed"] == "CollectiveFailed"
    assert 1.0 < result["timed"] < 6.0
    assert "generation 4" in result["text"]


def test_no_optimizer_moves_a_parameter_of_an_ended_generation() -> None:
    (result,) = run("fabric_scenarios:guarded", 1, deadline=20)
    assert result == {"fine": ["ok"] * 2, "refused": ["GenerationEnded"] * 2, "kept": True, "free": "ok"}


def test_meshes_and_groups_made_later_come_along() -> None:
    results = run("fabric_scenarios:many_groups", 4, deadline=30)
    for result in results:
        assert result["again"] == [6.0, 6.0]
        assert result["timeouts"] == [20.0]
    assert len({result["names"] for result in results}) == 1
    assert all(len(result["losses"]) == 3 for result in results)


def test_a_builder_that_was_left_cuts_nothing_of_the_next_generation() -> None:
    for result in run("fabric_scenarios:late_builder", 2, deadline=30):
        assert result["entered"] == "GenerationEnded"
        assert result["sums"] == [2.0] * 20


def test_a_newcomer_changes_no_bit() -> None:
    results = run("fabric_scenarios:bitwise", 4, deadline=45, kinds=KINDS, steps=6, at=3)
    stock = run("fabric_scenarios:stock", 3, deadline=30, kinds=KINDS, steps=6)
    for kind in KINDS:
        for rank in range(3):
            plain, survivor = results[rank][kind]
            assert plain == stock[rank][kind], (kind, rank)
            after = results[3][kind][1] if rank == 1 else survivor
            known = [loss for loss in after["losses"] if loss is not None]
            assert known == plain["losses"][6 - len(known) :], (kind, rank)
            assert len(known) == (3 if rank == 1 else 6)
            assert after["digest"] == plain["digest"], (kind, rank)
            assert rank == 1 or after["seen"] in {"CollectiveFailed", "GenerationEnded"}


WAYS = ["older", *(["stock"] if torch_private.takes_backends() else [])]


@pytest.mark.parametrize("way", WAYS)
def test_what_both_ways_do(way: str) -> None:
    """Groups are opened, left in a collective, renewed with a newcomer among them, and closed."""
    stayed, gone, came = run("fabric_scenarios:contract", 3, deadline=30, way=way)
    assert stayed["first"] == gone["first"] == [2.0] * 3
    assert came["first"] == [1.0] * 3  # nobody is there yet, and nothing waits
    assert stayed["left"] == "GenerationEnded"
    assert stayed["asked"] == [True, True, [[2.0] * 3], False, False, True, False, "GenerationEnded"]
    assert came["asked"] == [True, True, [[1.0] * 3]]
    assert (stayed["from"], came["from"]) == (1, 0)
    for rank, result in enumerate((stayed, came)):
        assert result["again"] == [[3.0] * 3] * 2
        assert result["last"] == [True, True, [[2.0] * 3]]
        assert result["got"] == [1.0 - rank] * 2
        assert result["everyone"] == ["rank 0", "rank 1"]
        assert result["backend"] == "gloo"
        assert result["stock"] is (way == "stock")
        assert result["calls"] >= 6
        assert result["members"] == 2
        assert result["closed"] is False


def check_stress(results: list[dict[str, Any]]) -> None:
    waits = sorted(wait for result in results for wait in result["waits"])
    calls = sorted(call for result in results for call in result["calls"])
    joins = sorted(join for result in results for join in result["joins"])
    for what, times in (("freed", waits), ("abort()", calls), ("configure()", joins)):
        middle, high = times[len(times) // 2], times[int(len(times) * 0.99)]
        print(
            f"{what}: n {len(times)} p50 {middle * 1e3:.2f} p99 {high * 1e3:.2f} max {times[-1] * 1e3:.2f} ms"
        )
    assert waits[-1] < 2.0
    for result in results:
        assert set(result["names"]) <= {"CollectiveFailed", "GenerationEnded"}
        assert result["same"]
        assert len(result["losses"]) == 3
        print("fds, threads", result["start"], result["end"])
        assert result["end"][0] <= result["start"][0] + 4
        assert result["end"][1] <= result["start"][1] + 4


def test_ten_aborts_at_random_moments() -> None:
    check_stress(run("fabric_scenarios:stress", 4, deadline=40, aborts=10))


@pytest.mark.slow
def test_a_hundred_aborts_at_random_moments() -> None:
    check_stress(run("fabric_scenarios:stress", 4, deadline=90, aborts=100))
