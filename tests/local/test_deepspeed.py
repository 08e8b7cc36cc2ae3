"""DeepSpeed by Accelerate and by transformers: one sentence before the first step.

Where it is installed: `make test-framework-matrix` does so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .localrun import HERE, Job

pytest.importorskip("deepspeed")

SAID = {
    "accelerate": "Accelerate with DEEPSPEED is not protected by ckptless, which knows DDP and FSDP of",
    "trainer": "a Trainer with DeepSpeed is not protected by ckptless: train without it",
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("by", SAID)
def test_it_is_refused_before_the_first_step(tmp_path: Path, by: str, stage: int) -> None:
    env = {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    script = HERE / "deepspeed_script.py"
    with Job(tmp_path / "job", ["--nodes", 2, "--tee", "none"], [script, by, stage], env) as job:
        job.ended(1, 100)
        assert SAID[by] in job.stderr
        assert not any(holding.nbytes for holding in job.ledger().holdings)
