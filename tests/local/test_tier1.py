"""Tier 1: unchanged scripts start without a root or a central store, and get nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .localrun import TOY, Job, read_toy

SCRIPT = Path(__file__).with_name("tier1_script.py")
ROOTLESS = {"CKPTLESS_ROOTLESS": "1"}


def told(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]


@pytest.mark.parametrize(
    ("how", "options", "env", "code", "words"),
    [
        ("exit", ["--tier", "1"], {}, 7, "rank 1 ended with exit code 7"),
        ("kill", [], ROOTLESS, 128 + 9, "rank 1 was ended by SIGKILL"),
    ],
)
def test_it_starts_and_fails_as_with_torchrun(
    tmp_path: Path, how: str, options: list[str], env: Mapping[str, str], code: int, words: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = [*options, "--nodes", "2", "--nproc-per-node", "2"]
    with Job(tmp_path, options, [SCRIPT, out, how], env) as job:
        job.ended(code)
        assert words in job.stderr
        # Nothing was tried again.
        assert [row.generation for row in job.ledger().generations] == [1]
    found = told(out)
    assert [one["sum"] for one in found] == [10.0] * 4
    for one in found:
        assert one["preloaded"] == []
        assert "CKPTLESS_AGENT_SOCKET" not in one["env"]
        assert one["env"]["TORCH_GLOO_LAZY_INIT"] == "1"
        assert one["env"]["TORCH_NCCL_RANKS_PER_ROOT"] == "1"
        assert one["env"]["TORCHELASTIC_RESTART_COUNT"] == "0"


def test_a_script_of_ckptless_is_a_plain_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Job(tmp_path, ["--tier", "1", "--nodes", "2"], [TOY, 6, out]) as job:
        job.ended(0)
    assert set(read_toy(out).losses) == {(rank, step) for rank in range(2) for step in range(1, 7)}
