"""Folders that Accelerate numbers itself, by `save_state` with `automatic_checkpoint_naming`.

Which one is the next belongs to the step. A save that is made again after a fault finds the folder of the one
that was cut off, or that no commit came after: it takes its place. What the job found there when it began is
nobody's to remove, and Accelerate refuses to write over it as ever.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

NAMED = re.compile(r"checkpoint_(\d+)")


class Saves:
    """Those of one Accelerator; its state is part of where the loop is."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._config: Any = accelerator.project_configuration
        self._found = sorted(self._numbers())
        # Whether folders may be there that what was restored does not know.
        self._again = False
        self._save = accelerator.save_state
        accelerator.save_state = self._save_state

    def state_dict(self) -> dict[str, Any]:
        """Return what the next one is, and which ones are older than the job."""
        return {"next": self._config.iteration, "found": self._found}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go there."""
        self._config.iteration, self._found = saved["next"], saved["found"]
        self._again = True

    def _save_state(self, *args: Any, **words: Any) -> Any:
        """As Accelerate's; called by all ranks."""
        if self._config.automatic_checkpoint_naming:
            if self._again and self._accelerator.is_local_main_process:
                for number, folder in self._numbers().items():
                    if number >= self._config.iteration and number not in self._found:
                        # A node may share the folder with others, which do the same now.
                        shutil.rmtree(folder, ignore_errors=True)
            self._again = False
            # All of them look whether it is there.
            self._accelerator.wait_for_everyone()
        return self._save(*args, **words)

    def _numbers(self) -> dict[int, Path]:
        """Return the folders that are there, by number."""
        if not self._config.automatic_checkpoint_naming or self._config.project_dir is None:
            return {}
        home = Path(self._config.project_dir) / "checkpoints"
        found = {NAMED.fullmatch(one.name): one for one in (home.iterdir() if home.is_dir() else ())}
        return {int(name[1]): folder for name, folder in found.items() if name is not None}
