"""Trainers of TRL, killed at three steps: their logs and parameters are those of TRL alone.

Where it is installed: `make test-framework-matrix` does so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .frameworks import plain, protected
from .localrun import HERE
from .test_torchrun import execute

pytest.importorskip("trl")

SCRIPT = HERE / "trl_script.py"


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_trainer_that_is_killed_ends_as_without_ckptless(tmp_path: Path, kind: str) -> None:
    env = {"KIND": kind, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    # Before there are groups: with one, its first rank alone saves.
    env["MODEL"] = str(tmp_path / "model")
    execute([SCRIPT, env["MODEL"], 0, ""], tmp_path, env)
    expected = plain(SCRIPT, tmp_path, 12, env)
    assert protected(SCRIPT, tmp_path, 12, "1:0,5:1,10:0", env) == expected
