"""transformers' Trainer, killed at many steps: its log and its parameters are those of plain Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .frameworks import RANKS, Lines, mlflow_lines, once_each, plain, protected, scalars, wandb_files
from .localrun import HERE

pytest.importorskip("transformers")

SCRIPT = HERE / "trainer_script.py"
# Of 7 updates an epoch, the last with half of the batches: the first update, the last, the one after an
# evaluation; both ranks.
FEW = "0:1,3:1,6:0,7:1,15:0"
VARIANTS: dict[str, dict[str, Any]] = {
    "steps": {},
    "epochs": {
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": 4,
        "dataloader_num_workers": 1,
        "logging_steps": 3,
    },
    "stops": {
        "max_steps": -1,
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 1,
        "save_strategy": "steps",
        "save_steps": 5,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        # It gets smaller, which here is worse: the training stops early.
        "greater_is_better": True,
        "eval_on_start": True,
    },
}

BEST = {
    "save_strategy": "steps",
    "save_steps": 4,
    "eval_steps": 4,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "save_total_limit": 2,
}
LENGTHS, METRICS = {"LENGTHS": "1"}, {"METRICS": "1"}
# More of its arguments, each with what the script is told beside them.
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "lengths": ({"train_sampling_strategy": "group_by_length"}, LENGTHS),
    "rebalance": ({"train_sampling_strategy": "batch_rebalance"}, LENGTHS),
    "metrics": ({"eval_steps": 3}, METRICS),
    "checkpointing": ({"gradient_checkpointing": True}, {}),
    "smoothing": ({"label_smoothing_factor": 0.1}, {}),
    "best": (BEST, {}),
    "bf16": ({"bf16": True}, {}),
    "fp16": ({"fp16": True}, {}),
}
ALL = {
    **BEST,
    "train_sampling_strategy": "group_by_length",
    "gradient_checkpointing": True,
    "label_smoothing_factor": 0.1,
    "bf16": True,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trainer_that_is_killed_ends_as_plain_trainer_does(tmp_path: Path, variant: str) -> None:
    env = {"ARGUMENTS": json.dumps(VARIANTS[variant]), "TOKENIZERS_PARALLELISM": "false"}
    if variant == "stops":
        env["PATIENCE"] = "2"
    expected = plain(SCRIPT, tmp_path, 24, env)
    assert protected(SCRIPT, tmp_path, 24, FEW if variant != "stops" else "3:1,6:0,11:1", env) == expected


@pytest.mark.slow
def test_many_arguments_at_once(tmp_path: Path) -> None:
    env = {"ARGUMENTS": json.dumps(ALL), "TOKENIZERS_PARALLELISM": "false", **LENGTHS, **METRICS}
    assert protected(SCRIPT, tmp_path, 24, FEW, env) == plain(SCRIPT, tmp_path, 24, env)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument(tmp_path: Path, name: str) -> None:
    arguments, more = ARGUMENTS[name]
    env = {"ARGUMENTS": json.dumps(arguments), "TOKENIZERS_PARALLELISM": "false", **more}
    assert protected(SCRIPT, tmp_path, 24, FEW, env) == plain(SCRIPT, tmp_path, 24, env)


@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_over_a_frozen_model(tmp_path: Path, sharded: bool) -> None:
    """LoRA by peft; with FSDP2 some of it is the Trainer's, through Accelerate."""
    env = {"LORA": "1", **({"FSDP": "1"} if sharded else {})}
    assert protected(SCRIPT, tmp_path, 24, FEW, env) == plain(SCRIPT, tmp_path, 24, env)


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    """Killed between a line and its commit; of both ranks, of which one writes."""
    env = {"LATE": "1", "ARGUMENTS": json.dumps({"report_to": ["tensorboard"]})}
    expected = plain(SCRIPT, tmp_path, 16, env)
    assert protected(SCRIPT, tmp_path, 16, "1:0,2:1,4:1,5:0,6:0,10:1", env) == expected
    assert scalars(tmp_path / "ours") == scalars(tmp_path / "plain")
    assert [step for step, _ in scalars(tmp_path / "ours")["train/loss"]] == [*range(1, 17)]


@pytest.mark.slow
def test_mlflow_has_each_step_once(tmp_path: Path) -> None:
    """Killed as with TensorBoard."""
    pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow-skinny")
    found = {}
    for name, run in (("plain", plain), ("ours", protected)):
        env = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/{name}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
        _reported(tmp_path, "mlflow", run, env)
        found[name] = mlflow_lines(tmp_path / name)
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert found["ours"][name] == found["plain"][name]
    assert [step for step, _ in found["ours"]["loss"]] == [*range(1, 17)]


@pytest.mark.slow
def test_wandb_is_one_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    clean: Lines = []
    for name, run in (("plain", plain), ("ours", protected)):
        home = tmp_path / name
        home.mkdir()
        _reported(tmp_path, "wandb", run, {"WANDB_MODE": "offline", "WANDB_DIR": str(home)})
        if run is plain:
            clean = wandb_files(home)[0]["train/loss"]
    assert once_each(wandb_files(tmp_path / "ours"), clean, "train/loss") in (6, 7)


def _reported(home: Path, where: str, run: Any, env: dict[str, str]) -> None:
    words = {**env, "LATE": "1", "ARGUMENTS": json.dumps({"report_to": [where]})}
    kills = () if run is plain else ("1:0,2:1,4:1,5:0,6:0,10:1",)
    run(SCRIPT, home, 16, *kills, words)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_twenty_kills(tmp_path: Path, how: str) -> None:
    kills = ",".join(f"{2 * n + 1}:{n % RANKS}" for n in range(20))
    env = {"FSDP": "1"} if how == "fsdp2" else {}
    assert protected(SCRIPT, tmp_path, 44, kills, env) == plain(SCRIPT, tmp_path, 44, env)
