"""A job on `ckptless.data` loses a process and a node: every rank trains on the samples of a run without
faults, and takes them from its node's ring.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

from click.testing import CliRunner

from ckptless.daemon.ckptctl.main import ckptctl

from .localrun import FAULTY_DEADLINE_S, Job

SCRIPT = Path(__file__).parent / "data_job.py"
STEPS, NODES, RANKS, COUNT = 30, 2, 4, 111


Seen = dict[tuple[int, int], set[str]]


def waits_are_told(job: Job) -> None:
    """`ckptctl data` of a job that is over: each node's ring, and how long its ranks waited."""
    asked = ["--state-dir", str(job.state_dir), "--json", "data"]
    result = CliRunner().invoke(ckptctl, asked)
    assert result.exit_code == 0, result.output
    rings = json.loads(result.stdout)["rings"]
    assert len(rings) == NODES
    for ring in rings:
        assert (ring["loader"], ring["prefetch"], ring["made"] > 0) == ("batches", 6, True)
        assert {reader["rank"] for reader in ring["readers"]} <= set(range(RANKS))
        assert len(ring["readers"]) == RANKS // NODES
        for reader in ring["readers"]:
            assert reader["taken"] > 0, json.dumps(rings)
            assert 0 <= reader["waits"] <= reader["taken"]
            assert 0 <= reader["waited_s"] < FAULTY_DEADLINE_S


def trained(home: Path, *faulty: str) -> Seen:
    """Return what each rank trained on in each step, and the losses; more than one where it was not the same
    again.
    """
    options = [
        "--nodes",
        NODES,
        "--nproc-per-node",
        RANKS // NODES,
        "--spares",
        1,
        "--max-stall",
        60,
        "--tee",
        "none",
        "--data-prefetch",
        6,
    ]
    with Job(home, options, [SCRIPT, STEPS, home / "out", home.parent / "data.gz", *faulty]) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        ledger = job.ledger()
        told = Counter(event.kind for event in ledger.events)
        waits_are_told(job)
        # Each batch came from a ring: one of each node, of which the lost one has nothing more to say.
        assert told["ring-closed"] == NODES
        assert not told["ring-off"]
        # Each heard of the limit, and so did the spare's node where it got ranks.
        limits = [event.text for event in ledger.events if event.kind == "ring-limited"]
        assert len(limits) == NODES + bool(faulty)
        assert all("6 batches are made ahead, not 8" in text for text in limits)
        # All processes have the same key, also the new ones.
        assert not told["data-cache-remade"]
        if faulty:
            assert {f.kind for f in ledger.faults} >= {"died", "raised", "node-lost"}
            # The heir of the dead rank went on with what had been made for that. Others, too, if a fault met
            # them while they waited for a batch.
            heir = "reader 1 goes on with batch 7 of stream 1: "
            texts = [event.text for event in ledger.events if event.kind == "ring-resumed"]
            (resumed,) = (text for text in texts if heir in text)
            assert not resumed.endswith(": 0 were there")
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
