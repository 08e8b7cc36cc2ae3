"""`ckptless-doctor --pairs` as processes on loopback addresses: slow, wrong, deaf, gone, never there.

All of them send at a pace that any machine keeps, so that a slow one is slow on a busy machine, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptless.doctor.pairing import TOKEN

STRUCK = Path(__file__).with_name("struck_doctor.py")
NODES, LIMIT_S, DEADLINE_S = 5, 60, 90.0
RATE, SLOW_RATE = 8 << 20, 1 << 20
SECRET = "0123456789abcdef"


def name(node: int) -> str:
    return f"127.0.0.{node + 2}"


def ended(
    strikes: Mapping[int, str],
    *,
    slow: int = -1,
    absent: int = -1,
    secrets: Mapping[int, str] | None = None,
    limit_s: float = LIMIT_S,
    mib: int = 2,
) -> tuple[int | None, dict[str, tuple[str, str]], list[str]]:
    """Run all but the absent one: node 0's exit code and findings, and what each has said on stderr."""
    started = []
    listed = f"127.0.0.[2-{NODES + 1}]"
    for node in range(NODES):
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
            **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": listed, "SLURM_STEP_NODELIST": listed},
            **{"SLURM_STEP_ID": "0", "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"},
            TOKEN: (secrets or {}).get(node, SECRET),
        }
        rate = SLOW_RATE if node == slow else RATE
        words = [sys.executable, str(STRUCK), str(rate), strikes.get(node, ""), "--pairs", "--json"]
        words += [f"--interface={name(node)}", f"--mib={mib}", f"--time-limit={limit_s:g}"]
        if node != absent:
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True))
    limit = time.monotonic() + DEADLINE_S
    try:
        told = [one.communicate(timeout=max(1.0, limit - time.monotonic())) for one in started]
    finally:
        for one in started:
            one.kill()
    assert [out for out, _ in told[1:]] == [""] * (len(told) - 1)
    assert told[0][0], told
    found = json.loads(told[0][0])["findings"]
    return (
        started[0].returncode,
        {one["about"]: (one["grade"], one["text"]) for one in found},
        [errors for _, errors in told],
    )


def test_a_sound_network() -> None:
    code, found, errors = ended({})
    assert (code, [*found]) == (0, ["pairs"]), found
    assert found["pairs"][1].startswith("8 of 8 are in order; medians ")
    assert errors == [""] * NODES


def test_too_little_time_is_no_node_s_fault() -> None:
    """All send on when it is over."""
    code, found, errors = ended({}, limit_s=20, mib=64)
    assert (code, [*found]) == (1, ["pairs", "time"]), found
    assert found["time"][1] == "0 of 8 pairs were tried to their end in the time that there was"
    assert errors == [""] * NODES


def test_a_slow_node() -> None:
    code, found, _ = ended({}, slow=3)
    assert (code, [*found]) == (1, ["pairs", name(3)]), found
    assert found[name(3)][0] == "limited"


@pytest.mark.parametrize(
    ("strike", "words"),
    [("wrong", "what came is not what was sent"), ("deaf", "127.0.0.4"), ("gone", "has gone")],
)
def test_a_node_that_fails(strike: str, words: str) -> None:
    code, found, _ = ended({2: strike})
    assert (code, [*found]) == (2, ["pairs", name(2)]), found
    assert found[name(2)][0] == "broken"
    assert words in found[name(2)][1]


def test_nodes_that_never_come_or_have_another_token() -> None:
    code, found, errors = ended({}, absent=4, secrets={1: SECRET + "!"}, limit_s=20)
    assert (code, [*found]) == (2, ["pairs", name(1), name(4)]), found
    assert found[name(1)] == found[name(4)] == ("broken", "it has not come")
    assert found["pairs"][1].startswith("3 of 3 are in order"), found
    assert "node 0 does not answer at 127.0.0.2" in errors[1]
