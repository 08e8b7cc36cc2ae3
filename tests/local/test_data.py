"""A job on `ckptless.data` loses a process and a node: every rank trains on the samples of a run without
faults.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from localrun import FAULTY_DEADLINE_S, Job

SCRIPT = Path(__file__).parent / "data_job.py"
STEPS, RANKS, COUNT, BATCH = 30, 3, 111, 13

pytestmark = pytest.mark.timeout(300)

Seen = dict[tuple[int, int], set[str]]


def trained(home: Path, *faulty: str) -> Seen:
    """What each rank trained on in each step, and the losses; more than one where it was not the same
    again.
    """
    options = ["--nodes", RANKS, "--spares", 1, "--max-stall", 60, "--tee", "none"]
    with Job(home, options, [SCRIPT, STEPS, home / "out", home.parent / "data.gz", *faulty]) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        if faulty:
            assert {f.kind for f in job.ledger().faults} >= {"died", "raised", "node-lost"}
    seen: Seen = {}
    for path in (home / "out").glob("seen-*.txt"):
        for line in path.read_text().splitlines():
            step, *rest = json.loads(line)
            seen.setdefault((int(path.stem.split("-")[1]), step), set()).add(json.dumps(rest))
    return seen


def test_the_samples_are_those_without_a_fault(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"id": n}) + "\n" for n in range(COUNT))
    (tmp_path / "data.gz").write_bytes(gzip.compress(rows.encode()))
    clean, found = trained(tmp_path / "clean"), trained(tmp_path / "faulty", "faulty")
    assert set(clean) == {(rank, step) for rank in range(RANKS) for step in range(STEPS)}
    assert all(len(lines) == 1 for lines in clean.values())
    assert found == clean
    ids = [
        sample for step in range(STEPS) for r in range(RANKS) for sample in json.loads(min(clean[r, step]))[0]
    ]
    for begin in range(0, len(ids) - COUNT + 1, COUNT):
        assert sorted(ids[begin : begin + COUNT]) == list(range(COUNT))
