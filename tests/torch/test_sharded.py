"""FSDP2, HSDP and DDP go on as the same objects, wherever they were left, and a newcomer changes no bit."""

from __future__ import annotations

from typing import Any

import pytest

from .world import run

# Two micro-batches, 0 and 1, are a step. A work that cannot end is pending; a step is torn when the optimizer
# has moved the parameters and nothing is committed.
PLACES = [
    "idle",
    "pending",
    "forward0-block",
    "between0",
    "backward0-grad",
    "after0",
    "forward1-block",
    "between1",
    "backward1-grad",
    "after1",
    "clipped",
    "torn",
]
SOME = ["pending", "forward0-block", "backward0-grad", "after0", "backward1-grad", "clipped"]
# With activation checkpointing the middle of a block is come to in the backward pass, too.
RECOMPUTED = ["forward0-block", "backward0-block", "after0", "backward1-block", "backward1-grad", "torn"]
# A compiled block cannot call back.
COMPILED = ["forward0-middle", "backward0-grad", "after0", "clipped"]


def check(kind: str, ranks: int, places: list[str], deadline: float = 95.0) -> list[dict[str, Any]]:
    """Every rank's losses, step by step, and all its tensors are those of stock torch without a fault."""
    results: list[dict[str, Any]] = run(
        "sharded_scenarios:faults", ranks + 1, deadline=deadline, kind=kind, places=places
    )
    for process, result in enumerate(results):
        rank = 1 if process == ranks else process
        plain = results[rank]["plain"]
        steps = {str(step): loss for step, loss in enumerate(plain["losses"], start=1)}
        assert result["losses"] == {step: steps[step] for step in result["losses"]}, (kind, process)
        assert result["same"], (kind, process)
        left = len(places) if rank != 1 else (len(places) + (process == 1)) // 2
        assert len(result["seen"]) == left
        assert set(result["seen"]) <= {"GenerationEnded", "CollectiveFailed"}, (kind, process)
        if rank != 1:
            assert len(result["losses"]) == len(places) + 2
            assert result["built"] == 1
        last = (1, ranks)[len(places) % 2]
        assert (result["digest"] is not None) == (rank != 1 or process == last)
        if result["digest"] is not None:
            assert result["digest"] == plain["digest"], (kind, process)
    return results


@pytest.mark.parametrize(
    ("kind", "ranks", "places"),
    [
        ("plain", 2, ["forward0-block", "after0", "clipped"]),
        ("ddp", 2, PLACES),
        ("fsdp", 3, PLACES),
        ("hsdp", 4, PLACES),
        ("hsdp-partial", 4, SOME),
        pytest.param("kept", 2, SOME, marks=pytest.mark.slow),
        pytest.param("mixed", 2, SOME, marks=pytest.mark.slow),
    ],
)
def test_left_at_every_place(kind: str, ranks: int, places: list[str]) -> None:
    check(kind, ranks, places)


@pytest.mark.parametrize(
    "kind", ["checkpoint", "ddp-checkpoint", pytest.param("wrapped", marks=pytest.mark.slow)]
)
def test_left_while_activations_are_recomputed(kind: str) -> None:
    check(kind, 2, RECOMPUTED)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kind",
    [
        "ddp-aot_eager",
        pytest.param("inside-aot_eager", marks=pytest.mark.slow),
        pytest.param("outside-aot_eager", marks=pytest.mark.slow),
    ],
)
def test_compiled_models(kind: str) -> None:
    check(kind, 2, COMPILED, deadline=180.0)


def check_rest(results: list[dict[str, Any]], ranks: int) -> None:
    """Descriptors and threads of those who lived through it all are as they were after the first step."""
    for process, result in enumerate(results):
        if process not in (1, ranks):
            print("descriptors, threads", result["start"], result["end"])
            assert result["end"][0] <= result["start"][0] + 2
            assert result["end"][1] <= result["start"][1] + 2


@pytest.mark.timeout(240)
def test_left_anywhere_again_and_again() -> None:
    check_rest(check("fsdp", 2, ["anywhere"] * 21, deadline=180.0), 2)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hybrid_left_anywhere_again_and_again() -> None:
    check_rest(check("hsdp", 4, ["anywhere"] * 30, deadline=300.0), 4)


def test_a_mesh_made_twice_is_two_meshes() -> None:
    (found,) = run("sharded_scenarios:meshes_twice", 1, deadline=60)
    assert all(found.values())
