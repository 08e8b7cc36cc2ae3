"""An NCCL that no agent knows: its job goes on with the next generation, where NCCL has its own roots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from localrun import Job

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).with_name("future_nccl.py")


def test_it_gets_roots_of_its_own_with_the_next_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_COMM_ID", "127.0.0.1:1")
    out = tmp_path / "out"
    out.mkdir()
    with Job(tmp_path, ["--nnodes=2", "--nproc_per_node=1", "--max_restarts=3"], [SCRIPT, out]) as job:
        job.ended(0)
        kinds = {event.kind for event in job.ledger().events}
    assert {"nccl-unknown", "nccl-stock-roots", "nccl-comm-id"} <= kinds
    for rank in range(2):
        computed = json.loads((out / f"rank-{rank}-1.json").read_text())
        assert computed["comm_id"] is None
        assert len(set(computed["ids"])) == 2, "each rank's root is on its own node"
        assert len({data[:16] for data in computed["ids"]}) == 1, "and all have one magic"
        passed_on = json.loads((out / f"rank-{rank}-128.json").read_text())
        assert passed_on["ids"] == [(bytes([root]) * 128).hex() for root in range(2)]
