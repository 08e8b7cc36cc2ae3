"""Shows what is appended to files, line by line: the agents' output on the launcher's console."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

READ_NBYTES = 1 << 16
# What one file may add at a time; a rank that floods its output must not keep the launcher from its work.
MAX_READS = 16


class Follower:
    """Owned by the launcher's event loop; reads are short, from files that other nodes append to."""

    def __init__(self, files: Sequence[Path], sink: BinaryIO) -> None:
        self._at: dict[Path, int] = dict.fromkeys(files, 0)
        self._part: dict[Path, bytes] = dict.fromkeys(files, b"")
        self._sink = sink

    def pass_on(self, *, last: bool = False) -> None:
        """Show whole new lines; at the `last` time unfinished ones, too."""
        for path in self._at:
            text = self._part[path] + self._news(path)
            while last and (more := self._news(path)):
                text += more
            end = len(text) if last else text.rfind(b"\n") + 1
            self._part[path] = text[end:]
            if end:
                self._sink.write(text[:end])
        self._sink.flush()

    def _news(self, path: Path) -> bytes:
        try:
            if path.stat().st_size <= self._at[path]:
                return b""
            with path.open("rb") as file:
                file.seek(self._at[path])
                found = file.read(READ_NBYTES * MAX_READS)
        except OSError:
            return b""  # not made yet, or not visible here yet
        self._at[path] += len(found)
        return found
