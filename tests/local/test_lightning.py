"""Lightning's Trainer, killed at many steps: losses, metrics and parameters are plain Lightning's."""

from __future__ import annotations

from pathlib import Path

import pytest

from .frameworks import RANKS, mlflow_lines, once_each, plain, protected, scalars, told, wandb_files
from .localrun import FAULTY_DEADLINE_S, HERE, Job, lose_node, wait_until

pytest.importorskip("lightning")

SCRIPT = HERE / "lightning_script.py"
QUIET = {"PYTHONWARNINGS": "ignore"}
# Of either rank: in an epoch's middle, at its begin and end, in a validation (1000 and the step).
KILLS = {
    # Two batches an update, validation each three batches.
    "steps": (20, "0:1,5:0,9:1,1005:0,15:0"),
    # With epochs that are cut short, checkpoints, averaged weights and a scheduler that reads a metric.
    "epochs": (20, "2:0,4:0,1005:1,9:1,1015:0"),
    # Until a metric gets worse; with a worker of the loader.
    "stops": (99, "2:0,1007:1,9:1"),
    # Two optimizers, each toggled.
    "manual": (20, "2:0,8:1,10:0,14:1"),
    "fsdp2": (20, "0:1,2:0,5:1,8:1"),
}


@pytest.mark.parametrize("variant", KILLS)
def test_a_trainer_that_is_killed_ends_as_plain_lightning_does(tmp_path: Path, variant: str) -> None:
    steps, kills = KILLS[variant]
    env = {"VARIANT": variant, **QUIET}
    assert _results(protected(SCRIPT, tmp_path, steps, kills, env)) == _results(
        plain(SCRIPT, tmp_path, steps, env)
    )
    if variant == "steps":
        assert scalars(tmp_path / "ours") == scalars(tmp_path / "plain")
        assert {name for name, lines in scalars(tmp_path / "ours").items() if len(lines) > 2} >= {"val"}


def _results(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out who has fetched the data: a new process makes sure that it is there."""
    return {name: lines for name, lines in found.items() if not name.startswith("prepared")}


@pytest.mark.parametrize("where", [-1, -2], ids=["while all set up", "before the first commit is whole"])
def test_what_was_set_up_is_never_trained_on_twice(tmp_path: Path, where: int) -> None:
    """Of a job that begins anew all processes are new, also those that live; it is one recovery."""
    options = ["--nodes", RANKS, "--tee", "none", "--max-stall", 60]
    with Job(tmp_path / "job", options, [SCRIPT, tmp_path / "ours", 6, f"{where}:1"], QUIET) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        (recovery,) = job.ledger().recoveries
        assert (recovery.rung, recovery.restore_step) == ("process", None), job.story()
    assert _results(told(tmp_path / "ours")) == _results(plain(SCRIPT, tmp_path, 6, QUIET))


def test_a_spare_takes_a_lost_nodes_rank_and_its_log(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    options = ["--nodes", RANKS, "--spares", 1, "--tee", "none", "--max-stall", 60]
    with Job(tmp_path / "job", options, [SCRIPT, ours, 60, ""], {**QUIET, "PAUSE": "0.05"}) as job:
        wait_until(lambda: len(_losses(ours)) > 20, 60, job)
        lose_node(job, 0)
        job.ended(0, FAULTY_DEADLINE_S)
    assert _results(told(ours)) == _results(plain(SCRIPT, tmp_path, 60, QUIET))


def _losses(home: Path) -> list[str]:
    path = home / "loss-0.txt"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_a_process_that_joins_in_an_epochs_middle_accumulates_as_the_others_do(tmp_path: Path) -> None:
    """What a callback sets in the Trainer as an epoch begins; of 13 batches each, the second in pairs."""
    env = {"VARIANT": "accumulates", **QUIET}
    kills = "5:0,15:1,17:0"
    assert _results(protected(SCRIPT, tmp_path, 20, kills, env)) == _results(plain(SCRIPT, tmp_path, 20, env))


@pytest.mark.slow
def test_mlflow_has_each_step_once(tmp_path: Path) -> None:
    """Killed between a line and its commit, by both ranks, of which one writes."""
    pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow-skinny")
    env = {**QUIET, "LOGGER": "mlflow", "MLFLOW_ALLOW_FILE_STORE": "true", "VARIANT": "steps"}
    kills = "2:1,2003:0,6:0,2009:0,12:1"
    assert _results(protected(SCRIPT, tmp_path, 16, kills, env)) == _results(plain(SCRIPT, tmp_path, 16, env))
    ours = mlflow_lines(tmp_path / "ours")
    assert ours == mlflow_lines(tmp_path / "plain")
    assert [step for step, _ in ours["loss_step"]] == [*range(16)]


@pytest.mark.slow
def test_wandb_is_one_run(tmp_path: Path) -> None:
    """Each process that rank 0 ever is writes its steps once; the file of one goes on where it joined."""
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    env = {**QUIET, "LOGGER": "wandb", "VARIANT": "steps"}
    protected(SCRIPT, tmp_path, 16, "2:1,2003:0,6:0,12:1", env)
    plain(SCRIPT, tmp_path, 16, env)
    (clean,) = wandb_files(tmp_path / "plain")
    last = once_each(wandb_files(tmp_path / "ours"), clean["loss_step"], "loss_step")
    assert last in (5, 6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["steps", "fsdp2"])
def test_twenty_kills(tmp_path: Path, variant: str) -> None:
    kills = ",".join(f"{2 * n + 1}:{n % RANKS}" for n in range(20))
    env = {"VARIANT": variant, **QUIET}
    assert _results(protected(SCRIPT, tmp_path, 44, kills, env)) == _results(plain(SCRIPT, tmp_path, 44, env))
