"""What a script has called in a recovery: its own abort, clean-up and health check, and what they decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.running.main import run

from .localrun import FAULTY_DEADLINE_S, RANKS, fault, same_as_reference, toy

FEW = 40


def test_who_lives_is_asked_and_who_is_not_fit_is_replaced(tmp_path: Path) -> None:
    """Rank 2 dies; rank 1's check then raises, as told."""
    faults = [fault("forward", "kill", 2, 5), fault("health", "raise", 1)]
    with toy(tmp_path, faults, steps=FEW, env={"TOY_HOOKS": "1"}) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = same_as_reference(job, faults, FEW)
    calls = {
        rank: [line.split() for line in (tmp_path / f"out/hooks-{rank}.txt").read_text().splitlines()]
        for rank in range(RANKS)
        if rank != 2
    }
    for rank in (0, 3):
        names = [name for name, _pid in calls[rank]]
        assert names[0] == "abort"
        # Once for each recovery; the second one may come before anybody had entered what the first led to.
        asked = [name for name in names if name != "abort"]
        assert asked == ["finalize", "health_check"] * (len(asked) // 2)
        assert len(asked) == 4
    assert [name for name, _pid in calls[1]][:3] == ["abort", "finalize", "health_check"]
    kinds = [one.kind for one in ledger.faults]
    assert kinds.count("died") == 2
    # Of collectives that failed with them.
    assert set(kinds) <= {"died", "broken"}
    told = [event for event in ledger.events if event.kind == "health-check" and "raises" in event.text]
    assert [event.node for event in told] == [1]
    assert any(event.kind == "device-lost" and event.node == 1 for event in ledger.events)


@pytest.mark.parametrize("name", ["abort", "finalize", "health_check", "warmup"])
def test_what_is_no_function_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=3: give ckptless.run a function without arguments"):
        run(lambda _run: None, **{name: 3})  # type: ignore[arg-type]
