"""What torchtitan's metrics write to TensorBoard and wandb: one run for the whole job, and each line once.

What this process has written since the step that is restored is not written again. What a process before it
has given to TensorBoard is taken back there; wandb says nothing of what it has.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.adapters.written import Written, take_back

# Its module, where it looks up what writes to TensorBoard.
_METRICS: Any = sys.modules[TensorBoardLogger.__module__]
# What it calls a folder, by the minute in which the process has begun.
_MINUTE = re.compile(r"(?<=/)\d{8}-\d{4}(?=/|$)")


class _InJobsFolder(TensorBoardLogger):  # type: ignore[misc]
    """Writes into a folder of the job's name, whatever process it is in, and at once: it may be killed."""

    def __init__(self, log_dir: str, tag: str | None = None) -> None:
        super().__init__(_MINUTE.sub(os.environ.get("TORCHELASTIC_RUN_ID", "job"), log_dir), tag)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        super().log(metrics, step)
        self.writer.flush()


def name_by_job() -> None:
    """Have what is built from here on write where all processes of the job do."""
    _METRICS.TensorBoardLogger = _InJobsFolder
    os.environ.setdefault("WANDB_RUN_ID", os.environ.get("TORCHELASTIC_RUN_ID", "job"))
    os.environ.setdefault("WANDB_RESUME", "allow")


class Loggers:
    """The loggers of one Trainer's metrics; `committed()`: the newest committed step."""

    def __init__(self, metrics: Any, committed: Callable[[], int]) -> None:
        self._committed = committed
        if isinstance(metrics.logger, LoggerContainer) and not hasattr(metrics.logger, "_loggers"):
            raise UsageError("torchtitan's LoggerContainer._loggers is gone: use torchtitan 0.2.2 to 0.3")
        # None where this rank logs nothing.
        self._loggers = [(one, Written()) for one in getattr(metrics.logger, "_loggers", ())]
        for one, written in self._loggers:
            one.log = self._once(one.log, written)

    def _once(self, log: Callable[..., None], written: Written) -> Callable[..., None]:
        def once(metrics: dict[str, Any], step: int) -> None:
            if written.is_new((step, frozenset(metrics)), self._committed()):
                log(metrics, step)

        return once

    def go_back(self, step: int, *, joins: bool) -> None:
        """The job goes on after a step; `joins`: others have trained before this process."""
        for one, written in self._loggers:
            if joins and isinstance(one, TensorBoardLogger):
                take_back(one.writer, step + 1)
            written.go_back(step)
