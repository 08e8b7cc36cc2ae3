"""Lightning's loggers through a fault: one folder for the whole job, and each line once.

A step that is done again logs what it has logged before it was cut off. What this process has written since
is not written again; nor is what a process before it has written to the file of a CSVLogger, or to MLflow.
What that has given to TensorBoard is taken back there. wandb says nothing of what it has.
"""

from __future__ import annotations

import csv
import logging
import os
import re
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from ckptless.pytorch_hooks.adapters import mlflow_runs
from ckptless.pytorch_hooks.adapters.written import Line, Written, take_back

# What is private in loggers, and read or set.
LOGGERS: dict[type, str] = {
    CSVLogger: "_version",
    TensorBoardLogger: "_version",
    WandbLogger: "_id _wandb_init",
    MLFlowLogger: "tags _run_id _experiment_name _mlflow_client _prefix LOGGER_JOIN_CHAR",
}


logger = logging.getLogger(__name__)


class Loggers:
    """The loggers of one Trainer, before they have begun to write."""

    def __init__(self, trainer: Any, run: Any, *, joins: bool) -> None:
        """`joins`: others have trained already."""
        self._run = run
        self._loggers = list(trainer.loggers)
        self._written = [Written() for _ in self._loggers]
        self._is_global_zero = bool(trainer.is_global_zero)
        for written, one in zip(self._written, self._loggers, strict=True):
            chosen, job = getattr(one, "_version", "") is None, os.environ.get("TORCHELASTIC_RUN_ID")
            if chosen and job:
                # As Lightning does under Slurm: the job's, not the next one that is free.
                one._version = f"version_{job}"
            elif isinstance(one, WandbLogger) and one._id is None and job:
                one._id = one._wandb_init["id"] = job
            elif isinstance(one, MLFlowLogger) and one._run_id is None and trainer.is_global_zero and job:
                one.tags = {**(one.tags or {}), mlflow_runs.TAG: job}
                one._run_id = mlflow_runs.run_of(one._mlflow_client, one._experiment_name, job)
                written.go_back(0, lines(one, 0))
            if (chosen or joins) and isinstance(one, CSVLogger) and trainer.is_global_zero:
                go_on(one)
            if trainer.is_global_zero and not isinstance(one, (*LOGGERS, DummyLogger)):
                logger.warning(
                    "%s does not say what it has written: lines of the step that is cut off are there twice "
                    "where the process that logs is lost. A CSVLogger, TensorBoardLogger or MLFlowLogger has "
                    "each once",
                    type(one).__name__,
                )
            self._filter(written, one)

    def _filter(self, written: Written, logger: Any) -> None:
        write = logger.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
            if isinstance(logger, MLFlowLogger):
                metrics = {
                    name: value
                    for name, value in metrics.items()
                    if written.is_new((step or 0, frozenset({_kept_as(logger, name)})), self._run.step)
                }
                if metrics:
                    write(metrics=metrics, step=step)
            elif written.is_new((step, frozenset(metrics)), self._run.step):
                write(metrics=metrics, step=step)

        logger.log_metrics = log_metrics

    def go_back(self, step: int, logged: int, *, joins: bool) -> None:
        """The job goes on from a step, of which what it logs has this number."""
        for written, one in zip(self._written, self._loggers, strict=True):
            others = None
            if joins and isinstance(one, (CSVLogger, MLFlowLogger)):
                others = lines(one, logged)
            elif joins and isinstance(one, TensorBoardLogger) and self._is_global_zero:
                take_back(one.experiment, logged)
            written.go_back(step, others)


def _file(logger: Any) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def _kept_as(logger: Any, name: str) -> str:
    """Return what an MLFlowLogger calls a metric."""
    whole = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}" if logger._prefix else name
    return re.sub("[^a-zA-Z0-9_/. -]+", "", whole)


def lines(logger: Any, step: int) -> list[Line]:
    """Return what a CSVLogger's file, or an MLFlowLogger's run, has from a step on."""
    if isinstance(logger, MLFlowLogger):
        return mlflow_runs.lines(logger._mlflow_client, logger._run_id, step)
    if not _file(logger).exists():
        return []
    with _file(logger).open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(int(row["step"]), frozenset(k for k, v in row.items() if v and k != "step")) for row in rows]
    return [line for line in found if line[0] >= step]


def go_on(logger: Any) -> None:
    """Have a CSVLogger add to its file, which it deletes where it begins."""
    file = _file(logger)
    aside = file.with_suffix(".kept")
    if aside.exists():
        # Whoever was here before was killed in between.
        aside.replace(file)
    if file.exists():
        file.replace(aside)
        writer = logger.experiment
        aside.replace(file)
        with file.open(newline="") as rows:
            writer.metrics_keys = next(csv.reader(rows), [])
