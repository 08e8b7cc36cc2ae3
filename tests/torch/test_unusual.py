"""Legal training that few write: after a fault it is the same bit for bit, or refused by name, or told of."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)

EQUAL = (
    *("Tied", "Composed", "Viewed", "Parametrized", "Odd", "Modes", "Remade", "Late", "Lbfgs"),
    *("InBackward", "Infinite", "DictParameters", "ObjectSchedule", "Slots", "Replay", "SharedWeights"),
    *("OwnSampler", "Recurrent"),
)
REFUSED = {
    "Inference": "was made under torch.inference_mode",
    "LargeAttribute": "state.model.module.memory changes in training and is no buffer",
    "HeldObject": "state.model.module.held[0].rows changes in training",
    "HeldModule": "state.model.module.held[0].running_mean changes in training",
    "HeldGenerator": "state.model.module.held[0] changes in training",
    "Leftover": "state.other.weight has a gradient that no optimizer has used",
    "PowerSgd": "the communication hook of state.model keeps a PowerSGDState",
    "SparseDdp": "state.model is a DistributedDataParallel with sparse gradients",
    "LargeList": "state.own.items changes in training and is too large to be looked through",
}
# Nobody can say whether the next step depends on it.
TOLD = {
    "InClass": "the global Counting.calls changes in training",
    "WideRecurrent": "state.model.module.hidden changes in training",
    "Global": "the global COUNTER[0] changes in training",
    "ClosureSchedule": "state.scheduler.lr_lambdas[0].counts.n changes in training",
}


@functools.cache
def verdicts() -> dict[str, dict[str, str]]:
    """All of them, in forks of one process."""
    script = Path(__file__).parent / "unusual.py"
    env = {key: value for key, value in os.environ.items() if not key.startswith("CKPTLESS_")}
    done = subprocess.run(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=env, timeout=380, check=True
    )
    # Gloo of torch 2.8 to 2.10 says something there, too.
    return dict(map(json.loads, (line for line in done.stdout.splitlines() if line.startswith('["'))))


@pytest.mark.parametrize("kind", EQUAL)
def test_it_is_the_same(kind: str) -> None:
    assert verdicts()[kind] == {"told": "", "survivor": "equal", "new": "equal"}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_by_name(kind: str) -> None:
    assert verdicts()[kind]["clean"].startswith("refused: ")
    assert REFUSED[kind] in verdicts()[kind]["clean"]


@pytest.mark.parametrize("kind", TOLD)
def test_it_is_told_of(kind: str) -> None:
    assert verdicts()[kind]["told"].startswith(TOLD[kind])


def test_each_thing_that_is_told_of_is_told_of_once() -> None:
    told = verdicts()["InClass"]["told"].split("; ")
    assert len(told) == len(set(told)) == 1


def test_every_kind_is_looked_at() -> None:
    assert set(verdicts()) == {*EQUAL, *REFUSED, *TOLD}
