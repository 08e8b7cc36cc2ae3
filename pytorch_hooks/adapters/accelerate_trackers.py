"""What Accelerate's trackers write through a fault: one run for the whole job, and each line once.

A step that is done again logs what it has logged before it was cut off. What this process has written since
is not written again, nor what a process before it has written to MLflow. What that has given to TensorBoard
is taken back there; wandb says nothing of what it has. The numbers of the lines are the script's own, so the
largest of them is kept with the step.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.tracking import MLflowTracker, TensorBoardTracker, WandBTracker

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.adapters import mlflow_runs
from ckptless.pytorch_hooks.adapters.prepared import ACCELERATE
from ckptless.pytorch_hooks.adapters.written import Line, Written, take_back

# What is read or set on those that are known, beside what every tracker has.
HOOKS: dict[type, str] = {
    MLflowTracker: "run_id tags experiment_name logging_dir tracker",
    TensorBoardTracker: "tracker",
    WandBTracker: "init_kwargs",
}

# Set on a tracker whose run is the job's.
_NAMED = "_ckptless_named"

logger = logging.getLogger(__name__)


def name_by_job() -> None:
    """Have trackers that begin from here on write the run of the job, whatever process they are in."""
    if env.read().agent_socket is None:
        return
    _name_runs(os.environ["TORCHELASTIC_RUN_ID"])


@functools.cache
def _name_runs(job: str) -> None:
    """Have them begin with the job's run, or its name, where the script gives none."""
    for kind, name in ((MLflowTracker, _name_in_mlflow), (WandBTracker, _name_in_wandb)):
        kind.start = _named(kind.start, functools.partial(name, job=job))


def _named(start: Callable[[Any], None], name: Callable[[Any], None]) -> Callable[[Any], None]:
    def begin(tracker: Any) -> None:
        if PartialState().is_main_process:
            _refuse(tracker)
            name(tracker)
            vars(tracker)[_NAMED] = True
        start(tracker)

    return begin


def _name_in_wandb(tracker: Any, job: str) -> None:
    if "WANDB_RUN_ID" not in os.environ and "id" not in tracker.init_kwargs:
        tracker.init_kwargs = {"resume": "allow", **tracker.init_kwargs, "id": job}


def _name_in_mlflow(tracker: Any, job: str) -> None:
    if tracker.run_id is not None:
        return
    import mlflow

    client, name = mlflow.MlflowClient(), tracker.experiment_name
    if client.get_experiment_by_name(name) is None:
        # As the tracker would: with its own tags, which are those of its run as well.
        mlflow.create_experiment(name, artifact_location=tracker.logging_dir, tags=tracker.tags)
    tracker.run_id = mlflow_runs.run_of(client, name, job)
    tracker.tags = {**(tracker.tags or {}), mlflow_runs.TAG: job}


def _refuse(tracker: Any) -> None:
    """Raise UsageError where one is not what it was."""
    for kind, names in HOOKS.items():
        for name in names.split() if isinstance(tracker, kind) else ():
            # A property may have nothing to give yet.
            if not hasattr(kind, name) and not hasattr(tracker, name):
                raise UsageError(f"accelerate's {kind.__name__}.{name} is gone: {ACCELERATE}")


class Trackers:
    """The trackers that one Accelerator has begun; without an agent around it they are left as they are."""

    def __init__(self, accelerator: Any) -> None:
        # The largest number of a line.
        self.newest = -1
        self._run: Any = None
        watched = env.read().agent_socket is not None
        # Those of other ranks do nothing.
        these = accelerator.trackers if watched and accelerator.is_main_process else []
        self._trackers = [(one, Written()) for one in these]
        for one, written in self._trackers:
            _refuse(one)
            if isinstance(one, (MLflowTracker, WandBTracker)) and _NAMED not in vars(one):
                raise UsageError(
                    "init_trackers was called before keep, which finds the job's run: call it in the "
                    "function that is given to keep"
                )
            if not isinstance(one, tuple(HOOKS)):
                logger.warning(
                    "%s does not say what it has written: lines of the step that is cut off are there twice "
                    "where the process that logs is lost. In tensorboard or mlflow each is once",
                    type(one).__name__,
                )
            one.log = self._once(one, written)
        if watched:
            accelerator.init_trackers = _too_late

    def _once(self, tracker: Any, written: Written) -> Callable[..., None]:
        write = tracker.log

        def log(values: dict[str, Any], step: int | None = None, **more: Any) -> None:
            number = step or 0
            self.newest = max(self.newest, number)
            if isinstance(tracker, MLflowTracker):
                # Each value is a line of its own there.
                lines = {name: (number, frozenset({name})) for name in values}
                values = {k: v for k, v in values.items() if written.is_new(lines[k], self._run.step)}
                new = bool(values)
            else:
                new = written.is_new((number, frozenset(values)), self._run.step)
            if new:
                write(values, step=step, **more)

        return log

    def enter(self, run: Any, *, joins: bool) -> None:
        """The job goes on after a step; `joins`: others have trained before this process."""
        first, self._run = self._run is None, run
        others = first and (joins or run.step > 0)
        for one, written in self._trackers:
            if others and isinstance(one, TensorBoardTracker):
                take_back(one.tracker, self.newest + 1)
            # A run that was given to it may have lines of another job, with the same numbers.
            theirs = others or (first and mlflow_runs.TAG in (getattr(one, "tags", None) or {}))
            written.go_back(run.step, self._lines(one) if theirs and isinstance(one, MLflowTracker) else None)

    def _lines(self, tracker: Any) -> list[Line]:
        """Return what MLflow has of the steps to come."""
        import mlflow

        return mlflow_runs.lines(mlflow.MlflowClient(), tracker.tracker.info.run_id, self.newest + 1)


def _too_late(*_words: Any, **_more: Any) -> None:
    raise UsageError(
        "init_trackers was called behind keep, where it would come again after each fault: call it in the "
        "function that is given to keep"
    )
