"""What a Trainer reports to TensorBoard, wandb and others: each line once, also where its step is done again.

What this process has written since the step is not written again. What a process before it has written to
TensorBoard is taken back there; other services know which run it is only where the script tells them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from ckptless.pytorch_hooks.adapters.written import Written, take_back

REPORTERS = tuple(INTEGRATION_TO_CALLBACK.values())


class Reports:
    """The callbacks of one Trainer that report somewhere; `committed()`: the newest committed step."""

    def __init__(self, owner: Any, committed: Callable[[], int]) -> None:
        self._committed = committed
        self._written: list[Written] = []
        # Lines from this step on another process may have written.
        self._from: int | None = None
        for one in owner.callback_handler.callbacks:
            if isinstance(one, REPORTERS):
                self._filter(one)
            job = os.environ.get("TORCHELASTIC_RUN_ID")
            if isinstance(one, TensorBoardCallback) and one.logging_dir is None and job:
                # The job's, not one for each process that comes to write it.
                one.logging_dir = str(Path(owner.args.output_dir) / "runs" / job)

    def _filter(self, callback: Any) -> None:
        written, write = Written(), callback.on_log
        self._written.append(written)

        def on_log(args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> Any:
            writer = getattr(callback, "tb_writer", None)
            if self._from is not None and writer is not None:
                take_back(writer, self._from)
                self._from = None
            line = state.global_step, frozenset(logs or {})
            if written.is_new(line, self._committed()):
                return write(args, state, control, logs=logs, **more)
            return None

        callback.on_log = on_log

    def go_back(self, step: int, *, joins: bool) -> None:
        """The job goes on after a step; `joins`: others have trained before this process."""
        if joins or self._from is not None:
            self._from = step + 1 if step else 0
        for written in self._written:
            written.go_back(step)
