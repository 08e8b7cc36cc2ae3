"""Whatever moves parameters, and by whatever way: after a fault every loss is that of a run without one."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from .localrun import FAULTY_DEADLINE_S, RANKS, Fault, Job, Result, fault, read_toy

SCRIPT = Path(__file__).parent / "moved_script.py"
STEPS = 50
LATE_AT = 3
WHERE = ("forward", "backward", "half", "updated", "committed")


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


@pytest.mark.parametrize(("kind", "parallel"), [("by-hand", "fsdp"), ("accumulated", "ddp")])
def test_three_faults(tmp_path: Path, kind: str, parallel: str) -> None:
    faults = [fault("updated", "kill", 1, 5), fault("half", "kill", 2, 12), fault("backward", "kill", 0, 20)]
    same(tmp_path, kind, parallel, faults)


REFUSED = {
    "late-group": "state.optimizer has 2 parameter groups, where it had 1,",
    "other-group": "the parameters in group 0 of state.optimizer have changed",
    "late-buffer": "the buffer state.target.seen has come",
    "late-parameter": "the parameter state.target.scale has come",
    "late-module": "the module state.target.more has come",
    "held-by-hand": "has a gradient that no optimizer has used",
    "held-before-step": "has a gradient that no optimizer has used",
    "held-micro-batch": "has a gradient that no optimizer has used",
}


def refused(home: Path, kind: str, parallel: str) -> None:
    """The commit at which it appears raises, on every rank, and the job ends with that sentence."""
    with started(home, kind, parallel) as job:
        job.ended(1)
        assert REFUSED[kind] in job.stderr, job.story()
        found = read_toy(home / "out")
        # Told of by every rank, or by those that were first; committed by none.
        last = LATE_AT + 1 if "late" in kind or "other" in kind else 1
        assert max(step for _, step in found.losses) == last, job.story()
        assert not found.finals


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "late-group", "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", REFUSED)
def test_each_that_would_be_lost_is_refused(tmp_path: Path, kind: str, parallel: str) -> None:
    refused(tmp_path, kind, parallel)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["by-hand", "by-data", "ema-first", "accumulated", "swapped", "unfrozen"])
def test_fifteen_faults(tmp_path: Path, kind: str, parallel: str) -> None:
    if (kind, parallel) in (("swapped", "fsdp"), ("unfrozen", "ddp")):
        pytest.skip(
            "torch: the memory of a DTensor is not exchanged by .data; DDP reduces what it was built with"
        )
    same(tmp_path, kind, parallel, some(f"{kind} {parallel}", 15))
