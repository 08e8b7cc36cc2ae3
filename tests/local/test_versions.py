"""Versions that rot in memory: found before use; another copy is used, or an older step; no bit differs."""

from __future__ import annotations

from pathlib import Path

from ckptless.daemon.ledger.merge import Snapshot

from .localrun import Fault, recovered, same_as_reference, toy

STEPS = 60
DEADLINE_S = 200.0
FSDP = {"TOY_PARALLEL": "fsdp"}


def check(home: Path, faults: list[Fault], spares: int = 0) -> Snapshot:
    """Run a sharded toy with these faults: all has to be as without them."""
    with toy(home, faults, spares=spares, steps=STEPS, env=FSDP) as job:
        job.ended(0, DEADLINE_S)
        return same_as_reference(job, faults, STEPS, parallel="fsdp")


def events(ledger: Snapshot, kind: str) -> list[str]:
    return [event.text for event in ledger.events if event.kind == kind]


def test_a_bad_version_of_ones_own_is_fetched_from_a_holder(tmp_path: Path) -> None:
    ledger = check(tmp_path, [{"where": "commit", "kind": "rot-own", "rank": 1, "step": 20}])
    found = events(ledger, "bad-version")
    assert any("shard 1, step" in text and "chunk 0" in text for text in found), found
    assert len(recovered(ledger)) == 1, "another copy was there: no second recovery"


def test_a_bad_replica_is_told_by_its_holder_and_another_is_used(tmp_path: Path) -> None:
    faults: list[Fault] = [
        {"where": "commit", "kind": "rot-replica", "rank": 2, "step": 20},
        {"where": "forward", "kind": "node", "rank": 0, "step": 30},
    ]
    ledger = check(tmp_path, faults, spares=1)
    assert any("shard 2, step" in text for text in events(ledger, "bad-version"))
    assert len(recovered(ledger)) == 2


def test_where_no_copy_of_a_step_is_sound_an_older_one_is_used(tmp_path: Path) -> None:
    ledger = check(tmp_path, [{"where": "commit", "kind": "rot-newest", "rank": 3, "step": 20}])
    assert any("shard 3, step 20" in text for text in events(ledger, "bad-version"))
    assert "no-state" in {f.kind for f in ledger.faults} or any("no-state" in f.detail for f in ledger.faults)
    restored = [g.restore_step for g in ledger.generations]
    assert restored[-1] is not None
    assert restored[-1] < 20
