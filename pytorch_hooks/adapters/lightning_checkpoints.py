"""Lightning's ModelCheckpoint through a fault: a file of the step that was cut off does not stand in the way.

A callback that has gone back knows nothing of that file, and would leave it as it is for ever: it saves
beside a file that it does not know, as "last-v1.ckpt".
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint


class Checkpoints:
    """Which files there are at a step in the folders of a Trainer's ModelCheckpoints; rank 0 knows.

    A file that is there after a fault, and was not at the step, is written over where a callback wants its
    name. What is there as the training begins, or as another job goes on with it, is never.
    """

    def __init__(self, trainer: Any) -> None:
        """Begin, once callbacks are set up."""
        self._callbacks = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]
        self._job = os.environ.get("TORCHELASTIC_RUN_ID")
        self._is_global_zero = bool(trainer.is_global_zero)
        self._known = self._there()
        self._cut_off: set[str] = set()
        for one in self._callbacks:
            self._watch(one)

    def _watch(self, callback: Any) -> None:
        is_there = callback.file_exists

        def file_exists(filepath: Any, trainer: Any) -> bool:
            found: bool = is_there(filepath, trainer)
            if found:
                # All ranks are to do the same.
                found = not trainer.strategy.reduce_boolean_decision(
                    str(filepath) in self._cut_off, all=False
                )
            if not found:
                self.written(filepath)
            return found

        callback.file_exists = file_exists

    def written(self, filepath: Any) -> None:
        """A file is there from now on."""
        self._known.add(str(filepath))
        self._cut_off.discard(str(filepath))

    def removed(self, filepath: Any) -> None:
        """A file is not there any more."""
        self._known.discard(str(filepath))

    def state_dict(self) -> dict[str, Any]:
        """Return what there is, and for whom."""
        return {"job": self._job, "files": sorted(self._known) if self._is_global_zero else None}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go back to it: what else there is has been cut off, if the job is the same one."""
        there, files = self._there(), saved["files"]
        is_told = self._is_global_zero and files is not None and saved["job"] == self._job is not None
        self._known = set(files) if is_told else there
        self._cut_off = there - self._known

    def _there(self) -> set[str]:
        """Return the checkpoints in the callbacks' folders, as the callbacks call them."""
        found: set[str] = set()
        for folder in {str(one.dirpath) for one in self._callbacks if one.dirpath and self._is_global_zero}:
            files = get_filesystem(folder)
            if files.isdir(folder):
                names = [PurePosixPath(path).name for path in files.ls(folder, detail=False)]
                # It may be no path of this machine's.
                found |= {os.path.join(folder, name) for name in names}  # noqa: PTH118
        return found
