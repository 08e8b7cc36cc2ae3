"""Folders for the sockets of multiprocessing: one for each training process, removed when that is dead.

Python makes them where they are first needed (`/tmp/pymp-...`), in loader workers too, and removes them at a
process's regular end only, which few of ours come to.
"""

import shutil
from pathlib import Path

# A Unix socket's path has 107 bytes; Python's names in there are shorter than this.
NAME_NBYTES = 40
MOST_NBYTES = 107


class Scratch:
    """The folders of one agent, beside its sockets (`socket_folder`): that goes after a SIGKILL, too."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._count = 0

    def make(self) -> Path | None:
        """A new one; None where there is no place for it, and Python's own way has to do."""
        try:
            folder = self._root / str(self._count)
            if len(bytes(folder)) + NAME_NBYTES > MOST_NBYTES:
                return None
            self._count += 1
            folder.mkdir(mode=0o700, parents=True)
        except OSError:
            return None
        return folder

    @staticmethod
    def remove(folder: Path | None) -> None:
        """Remove one."""
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all."""
        self.remove(self._root)
