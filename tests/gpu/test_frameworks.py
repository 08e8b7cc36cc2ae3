"""Lightning, Accelerate and transformers' Trainer on a GPU that two ranks share: killed, with plain bits.

On the CPU they are in tests/local. Some of these train in lower precision, with a GradScaler.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.local.frameworks import RANKS, plain, protected
from tests.local.localrun import HERE, on

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# What cuBLAS asks for where sums are to be the same each time.
ENV = {**on("cuda"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONWARNINGS": "ignore"}


def same(script: str, home: Path, size: int, kills: str, more: dict[str, str]) -> None:
    """Fails where a run that is killed leaves another line than one without ckptless."""
    env = {**ENV, **more}
    expected = plain(HERE / script, home, size, env)
    found = protected(HERE / script, home, size, kills, env)
    for name in ("prepared-0.txt", "prepared-1.txt"):
        # Who has fetched the data: a new process makes sure that it is there.
        expected.pop(name, None)
        found.pop(name, None)
    assert found == expected


def every_other(times: int) -> str:
    """Return kills of both ranks in turns, in every other step."""
    return ",".join(f"{2 * n + 1}:{n % RANKS}" for n in range(times))


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_accelerate(tmp_path: Path, how: str) -> None:
    same("accelerate_script.py", tmp_path, 4, every_other(4), {"FSDP": "1"} if how == "fsdp2" else {})


@pytest.mark.parametrize("how", ["plain", "fp16", "bf16", "fsdp2", "lora"])
def test_trainer(tmp_path: Path, how: str) -> None:
    arguments: dict[str, object] = {how: True} if how in ("fp16", "bf16") else {}
    more = {"FSDP": "1"} if how == "fsdp2" else {"LORA": "1"} if how == "lora" else {}
    same("trainer_script.py", tmp_path, 16, every_other(4), {**more, "ARGUMENTS": json.dumps(arguments)})


@pytest.mark.parametrize(("variant", "precision"), [("steps", "16-mixed"), ("manual", "32"), ("fsdp2", "32")])
def test_lightning(tmp_path: Path, variant: str, precision: str) -> None:
    # With two optimizers steps are counted by two.
    kills = "2:0,8:1,10:0,14:1" if variant == "manual" else "0:1,3:0,6:1,9:0"
    same("lightning_script.py", tmp_path, 16, kills, {"VARIANT": variant, "PRECISION": precision})
