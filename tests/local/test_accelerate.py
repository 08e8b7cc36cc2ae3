"""A script with Accelerate, killed at many steps: losses and parameters are those without ckptless."""

from __future__ import annotations

from pathlib import Path

import pytest

from .frameworks import RANKS, mlflow_lines, once_each, plain, protected, scalars, wandb_files
from .localrun import HERE, Job

pytest.importorskip("accelerate")

SCRIPT = HERE / "accelerate_script.py"
EPOCHS = 4
# Of 4 updates an epoch, the last of them of one batch: before the first commit, an epoch's last, its first.
FEW = "0:1,3:0,4:1,7:0,12:1"
# Of those that log: also behind a line and before its commit.
LOGGED = "1:0:1,4:0:1,5:1:1,8:0,10:1,11:0:1"


ENVIRONMENTS = {
    "ddp": {},
    "worker": {"WORKERS": "1"},
    "fsdp2": {"FSDP": "1"},
    "seedable": {"SEEDABLE": "1"},
    "protect": {"PROTECT": "1"},
    "protect fsdp2": {"PROTECT": "1", "FSDP": "1"},
    "from one": {"FSDP": "1", "RAM": "1"},
}
SLOW = ("seedable", "protect fsdp2", "from one")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] if how in SLOW else []) for how in ENVIRONMENTS]
)
def test_a_script_that_is_killed_ends_as_without_ckptless(tmp_path: Path, how: str) -> None:
    env = ENVIRONMENTS[how]
    expected = plain(SCRIPT, tmp_path, EPOCHS, env)
    assert protected(SCRIPT, tmp_path, EPOCHS, FEW, env) == expected


@pytest.mark.slow
def test_wandb_is_one_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    for name in ("plain", "ours"):
        (tmp_path / name).mkdir()
    env = {"LOGGER": "wandb", "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path / "plain")}
    plain(SCRIPT, tmp_path, EPOCHS, env)
    (clean,) = wandb_files(tmp_path / "plain")
    protected(SCRIPT, tmp_path, EPOCHS, FEW, {**env, "WANDB_DIR": str(tmp_path / "ours")})
    assert once_each(wandb_files(tmp_path / "ours"), clean["loss"], "loss") in (7, 8)


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["mlflow", "tensorboard"])
def test_each_line_is_once(tmp_path: Path, logger: str) -> None:
    if logger == "mlflow":
        pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow-skinny")
    read = {"mlflow": mlflow_lines, "tensorboard": scalars}[logger]
    env = {"LOGGER": logger, "MLFLOW_ALLOW_FILE_STORE": "true", "EVERY": "3"}
    store = "MLFLOW_TRACKING_URI"
    expected = plain(SCRIPT, tmp_path, EPOCHS, {**env, store: f"file:{tmp_path}/plain/mlruns"})
    ours = {**env, store: f"file:{tmp_path}/ours/mlruns"}
    assert protected(SCRIPT, tmp_path, EPOCHS, LOGGED, ours) == expected
    (rows,) = read(tmp_path / "ours").values()
    assert [step for step, _ in rows] == [*range(1, 4 * EPOCHS + 1)]
    assert [rows] == [*read(tmp_path / "plain").values()]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_twenty_kills(tmp_path: Path, how: str) -> None:
    env = ENVIRONMENTS[how]
    kills = ",".join(f"{2 * n + 1}:{n % RANKS}" for n in range(20))
    assert protected(SCRIPT, tmp_path, 11, kills, env) == plain(SCRIPT, tmp_path, 11, env)


@pytest.mark.parametrize(
    ("how", "told"),
    [("PAST", "loop over the loader that keep returns"), ("LOGGER", "init_trackers was called before keep")],
)
def test_what_was_made_before_keep_and_would_be_lost_is_refused(tmp_path: Path, how: str, told: str) -> None:
    env = {"PROTECT": "1", how: "mlflow"}
    if how == "LOGGER":
        pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow-skinny")
        env |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns"}
    options = ["--nodes", RANKS, "--tee", "none"]
    with Job(tmp_path / "job", options, [SCRIPT, tmp_path / "ours", 1, ""], env) as job:
        job.ended(1)
        (row,) = job.ledger().jobs
        assert told in str(row.reason)


def test_a_commit_in_the_middle_of_an_accumulation_is_refused(tmp_path: Path) -> None:
    options = ["--nodes", RANKS, "--tee", "none"]
    with Job(tmp_path / "job", options, [SCRIPT, tmp_path / "ours", 1, ""], {"EACH": "1"}) as job:
        job.ended(1)
        (row,) = job.ledger().jobs
        assert "has a gradient that no optimizer has used, and gradients are not saved" in str(row.reason)
