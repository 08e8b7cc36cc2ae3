"""An NCCL that no agent knows: its job goes on with the next generation, where NCCL has its own roots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .localrun import Job

HOOKED = pytest.mark.parametrize("how", [[], pytest.param(["hooked"], id="hooked")])

SCRIPT = Path(__file__).with_name("future_nccl.py")


@HOOKED
def test_it_gets_roots_of_its_own_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    """Its ranks would wait for good; and nothing is tried again, so that no budget is used."""
    monkeypatch.setenv("NCCL_COMM_ID", "127.0.0.1:1")
    out = tmp_path / "out"
    out.mkdir()
    with Job(tmp_path, ["--nnodes=2", "--nproc_per_node=1", "--max-stall=30"], [SCRIPT, out, *how]) as job:
        job.ended(0)
        ledger = job.ledger()
    assert {"nccl-unknown", "nccl-stock-roots", "nccl-comm-id"} <= {event.kind for event in ledger.events}
    first = [fault.kind for fault in ledger.faults if fault.generation == 1]
    assert first[0] == "nccl-unknown"
    assert "stall" not in first
    assert [generation.generation for generation in ledger.generations] == [1, 2]
    # One has been enough: the other may not have come so far.
    found = [json.loads(path.read_text()) for path in out.glob("rank-*-1.json")]
    assert found
    for computed in found:
        assert computed["comm_id"] is None
        assert len(set(computed["ids"])) == 2, "each rank's root is on its own node"
        assert len({data[:16] for data in computed["ids"]}) == 1, "and all have one magic"
    for rank in range(2):
        passed_on = json.loads((out / f"rank-{rank}-128.json").read_text())
        assert passed_on["ids"] == [(bytes([root]) * 128).hex() for root in range(2)]


def test_tier_1_ends_and_says_what_to_set(tmp_path: Path) -> None:
    """There is no next generation that could have other roots: nobody waits for one, nor for a deadline."""
    out = tmp_path / "out"
    out.mkdir()
    with Job(tmp_path, ["--tier=1", "--nodes=2", "--max-stall=200"], [SCRIPT, out]) as job:
        job.ended(4)
        ledger = job.ledger()
        assert "TORCH_NCCL_RANKS_PER_ROOT=100000" in job.stderr
    assert "nccl-unknown" in {event.kind for event in ledger.events}
    assert ledger.faults[0].kind == "nccl-unknown"
    assert [generation.generation for generation in ledger.generations] == [1]


@HOOKED
def test_the_jobs_own_number_of_ranks_for_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    """It reaches the ranks, and the agents compute so many ids: here no check-in follows."""
    monkeypatch.setenv("TORCH_NCCL_RANKS_PER_ROOT", "3")
    out = tmp_path / "out"
    out.mkdir()
    with Job(tmp_path, ["--nnodes=2", "--nproc_per_node=2"], [SCRIPT, out, *how]) as job:
        job.ended(0)
        ledger = job.ledger()
    assert "nccl-ranks-per-root" in {event.kind for event in ledger.events}
    assert [generation.generation for generation in ledger.generations] == [1]
    lists = {tuple(json.loads((out / f"rank-{rank}-3.json").read_text())["ids"]) for rank in range(4)}
    assert len(lists) == 1, "the same on every rank"
    (ids,) = lists
    assert len(set(ids)) == len(ids) == 2, "one for each block of ranks, on the node of its first"
    assert len({data[:16] for data in ids}) == 1
