"""What a Trainer reports to TensorBoard, wandb and others: each line once, also where its step is done again.

What this process has written since the step is not written again, nor what a process before it has written to
MLflow. What that has given to TensorBoard is taken back there. wandb gets the job's name for its run's, and
says nothing of what it has; others know which run it is only where the script tells them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    MLflowCallback,
    TensorBoardCallback,
    WandbCallback,
)

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.adapters import mlflow_runs
from ckptless.pytorch_hooks.adapters.written import Line, Written, take_back

REPORTERS = tuple(INTEGRATION_TO_CALLBACK.values())

# What is read or set on them.
HOOKS: dict[Any, str] = {
    TensorBoardCallback: "on_log tb_writer logging_dir",
    MLflowCallback: "on_log _ml_flow _async_log",
    WandbCallback: "on_log",
}


def refuse_reporters(callbacks: list[Any]) -> None:
    """Raise UsageError where one of them is not what it was."""
    for one in callbacks:
        for kind, names in HOOKS.items():
            for name in names.split() if isinstance(one, kind) else ():
                # One of them comes where it begins to report.
                late = name == "_async_log" and name in kind.on_log.__code__.co_names
                if not hasattr(one, name) and not late:
                    raise UsageError(
                        f"transformers' {kind.__name__}.{name} is gone: use transformers 5.17 to 5.24"
                    )


logger = logging.getLogger(__name__)


class Reports:
    """The callbacks of one Trainer that report somewhere; `committed()`: the newest committed step.

    Without an agent around it they are left as they are.
    """

    def __init__(self, owner: Any, committed: Callable[[], int]) -> None:
        self._committed = committed
        self._written: list[tuple[Any, Written]] = []
        self._mlflow: _Mlflow | None = None
        # Lines from this step on another process may have written.
        self._from: int | None = None
        # Without one torchrun's name for a job may be that of any other, too.
        watched = env.read().agent_socket is not None
        for one in owner.callback_handler.callbacks if watched else ():
            if isinstance(one, REPORTERS):
                self._filter(one)
                reports = getattr(type(one), "on_log", None) is not TrainerCallback.on_log and not isinstance(
                    one, tuple(HOOKS)
                )
                if reports and owner.is_world_process_zero():
                    logger.warning(
                        "%s does not say what it has written: lines of the step that is cut off are there "
                        "twice where the process that reports is lost. In tensorboard or mlflow each is once",
                        type(one).__name__,
                    )
            job = os.environ.get("TORCHELASTIC_RUN_ID")
            if isinstance(one, WandbCallback) and job:
                os.environ.setdefault("WANDB_RUN_ID", job)
                os.environ.setdefault("WANDB_RESUME", "allow")
            if isinstance(one, MLflowCallback) and job and owner.is_world_process_zero():
                self._mlflow = _Mlflow(one._ml_flow, job)
                self._written[-1][1].go_back(0, self._mlflow.lines(0))
            if isinstance(one, TensorBoardCallback) and one.logging_dir is None and job:
                # The job's, not one for each process that comes to write it.
                one.logging_dir = str(Path(owner.args.output_dir) / "runs" / job)

    def _filter(self, callback: Any) -> None:
        written, write = Written(), callback.on_log
        self._written.append((callback, written))

        def on_log(args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> Any:
            writer = getattr(callback, "tb_writer", None)
            if self._from is not None and writer is not None:
                take_back(writer, self._from)
                self._from = None
            if isinstance(callback, MLflowCallback):
                # Else lines are lost with the process that were to be written a little later.
                callback._async_log = False
                logs = {
                    name: value
                    for name, value in (logs or {}).items()
                    if written.is_new((state.global_step, frozenset({name})), self._committed())
                }
                return write(args, state, control, logs=logs, **more) if logs else None
            line = state.global_step, frozenset(logs or {})
            if written.is_new(line, self._committed()):
                return write(args, state, control, logs=logs, **more)
            return None

        callback.on_log = on_log

    def go_back(self, step: int, *, joins: bool) -> None:
        """The job goes on after a step; `joins`: others have trained before this process."""
        if joins or self._from is not None:
            self._from = step + 1 if step else 0
        for one, written in self._written:
            others = None
            if joins and self._mlflow is not None and isinstance(one, MLflowCallback):
                others = self._mlflow.lines(step + 1)
            written.go_back(step, others)


class _Mlflow:
    """The job's run, which an MLflowCallback is told of by the environment."""

    def __init__(self, mlflow: Any, job: str) -> None:
        if "MLFLOW_TRACKING_URI" in os.environ:
            mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
        self._client = mlflow.MlflowClient()
        tags = json.loads(os.environ.get("MLFLOW_TAGS") or "{}")
        os.environ["MLFLOW_TAGS"] = json.dumps({**tags, mlflow_runs.TAG: job})
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        self._run_id = os.environ.get("MLFLOW_RUN_ID") or mlflow_runs.run_of(self._client, experiment, job)
        if self._run_id is not None:
            os.environ["MLFLOW_RUN_ID"] = self._run_id

    def lines(self, step: int) -> list[Line]:
        """Return what it has from a step on."""
        return mlflow_runs.lines(self._client, self._run_id, step)
