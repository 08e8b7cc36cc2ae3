"""Whatever moves parameters, and by whatever way: after a fault every loss is that of a run without one."""

from __future__ import annotations

import functools
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from localrun import FAULTY_DEADLINE_S, RANKS, Fault, Job, Result, fault, read_toy

SCRIPT = Path(__file__).parent / "moved_script.py"
STEPS = 50
WHERE = ("forward", "backward", "half", "updated", "committed")

pytestmark = pytest.mark.timeout(300)


@contextmanager
def started(
    home: Path, kind: str, parallel: str, faults: Sequence[Fault] = (), overlap: str = "off"
) -> Iterator[Job]:
    words = ["--nodes", RANKS, "--nproc-per-node", 1, "--max-stall", 60, "--tee", "none"]
    env = {"MOVED_KIND": kind, "MOVED_PARALLEL": parallel, "MOVED_OVERLAP": overlap}
    with Job(home, words, [SCRIPT, STEPS, home / "out", json.dumps(list(faults))], env) as job:
        yield job


@functools.cache
def clean(kind: str, parallel: str) -> Result:
    with tempfile.TemporaryDirectory(prefix="ckptless-reference-") as scratch:
        with started(Path(scratch), kind, parallel) as job:
            job.ended(0)
        found = read_toy(Path(scratch) / "out")
    assert set(found.losses) == {(rank, step) for rank in range(RANKS) for step in range(1, STEPS + 1)}
    assert found.generations == {1}
    return found


def same(home: Path, kind: str, parallel: str, faults: Sequence[Fault], overlap: str = "off") -> None:
    with started(home, kind, parallel, faults, overlap) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        found, wanted, ledger = read_toy(home / "out"), clean(kind, parallel), job.ledger()
        assert len(found.struck) == len(faults), f"{found.struck} of {faults}\n{job.story()}"
        wrong = {where: lines for where, lines in found.losses.items() if lines != wanted.losses.get(where)}
        assert not wrong, f"{len(wrong)} other losses: {sorted(wrong.items())[:6]}\n{job.story()}"
        assert set(found.losses) == set(wanted.losses)
        assert found.finals == wanted.finals
        # Nobody is to be repaired by twins, nor by one more new process.
        assert {f.kind for f in ledger.faults} <= {"died", "broken"}, f"{ledger.faults}\n{job.story()}"


def some(seed: str, count: int) -> list[Fault]:
    """So many deaths, of random ranks at random places, each in another step."""
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(1, STEPS - 1), count))
    return [fault(chance.choice(WHERE), "kill", chance.randrange(RANKS), step) for step in steps]


def struck(kind: str, faults: Sequence[Fault]) -> list[Fault]:
    """The faults, at places that this kind comes by."""
    return [
        {**f, "where": "updated"} if kind == "accumulated" and f["where"] == "half" else f for f in faults
    ]


def test_an_update_by_hand(tmp_path: Path) -> None:
    faults = [fault("updated", "kill", 1, 5), fault("half", "kill", 2, 12), fault("updated", "kill", 0, 20)]
    same(tmp_path, "by-hand", "fsdp", faults)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["by-hand", "by-data", "ema-first", "accumulated", "swapped"])
def test_fifteen_faults(tmp_path: Path, kind: str, parallel: str) -> None:
    if (kind, parallel) == ("swapped", "fsdp"):
        pytest.skip("torch: the memory of a DTensor is not exchanged by .data")
    same(tmp_path, kind, parallel, some(f"{kind} {parallel}", 15))
