"""torch.compile over a recovery: the living keep their compiled code, the new take it from the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .localrun import Job, on

STEPS, KILL_STEP, NEVER = 12, 5, 99
DEADLINE_S = 500.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S)]


def train(
    home: Path, cache: Path, kill_step: int, device: str = "cpu"
) -> tuple[dict[int, list[dict[str, Any]]], dict[int, set[str]]]:
    """What each rank's processes told of their compiler, and the losses; `cache` has the compiled code."""
    words = [Path(__file__).with_name("compiled_script.py"), home / "out", STEPS, kill_step]
    options = ["--nodes", 2, "--tee", "none"]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cache), **on(device)}
    with Job(home, options, words, env) as job:
        job.ended(0, DEADLINE_S)
    told = {
        rank: [json.loads(line) for line in (home / f"out/compiled-{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    }
    return told, {rank: set((home / f"out/loss-{rank}.txt").read_text().splitlines()) for rank in (0, 1)}


def nothing_is_compiled_again(home: Path, device: str = "cpu") -> None:
    told, losses = train(home / "struck", home / "cache", KILL_STEP, device)
    survivor = told[0]
    assert {line["generation"] for line in survivor} == {1, 2}
    assert len({line["pid"] for line in survivor}) == 1
    # Rank 0 has compiled, or taken what rank 1 had compiled, before the fault; not after it.
    before, after = survivor[0], survivor[-1]
    assert before["hit"] + before["miss"] > 0
    assert (after["hit"], after["miss"]) == (before["hit"], before["miss"])
    (dead, *_), *_, reborn = told[1], told[1][-1]
    assert dead["pid"] != reborn["pid"]
    assert dead["miss"] + before["miss"] > 0, "the cache was not empty"
    assert reborn["hit"] > 0
    assert (reborn["miss"], reborn["bypass"]) == (0, 0)
    assert losses == train(home / "clean", home / "cache", NEVER, device)[1]


def test_nothing_is_compiled_again(tmp_path: Path) -> None:
    nothing_is_compiled_again(tmp_path)
