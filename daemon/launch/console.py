"""The launcher's console: the agents' output as it comes, and what a rank that failed printed last."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ckptless.daemon.protocol.log import QUOTED
from ckptless.daemon.protocol.messages import Outcome

logger = logging.getLogger(__name__)

READ_NBYTES = 1 << 16
# What one file may add at a time; a rank that floods its output must not keep the launcher from its work.
MAX_READS = 16
TAIL_NBYTES = 64 * 1024
LINES = 12
LINE_LIMIT = 400
PREFIX = re.compile(r"^\[rank\d+\]: ?")
TRACEBACK = "Traceback (most recent call last):"


class Follower:
    """Owned by the launcher's event loop; reads are short, from files that other nodes append to."""

    def __init__(self, files: Sequence[Path], sink: BinaryIO) -> None:
        self._at: dict[Path, int] = dict.fromkeys(files, 0)
        self._part: dict[Path, bytes] = dict.fromkeys(files, b"")
        self._sink = sink

    def add(self, path: Path) -> None:
        """Follow another file, too."""
        self._at.setdefault(path, 0)
        self._part.setdefault(path, b"")

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


def tell_end(job: str, outcome: Outcome, log: Path | None, elsewhere: str) -> int:
    """Say how the job has ended, and why a rank of it failed, by its log; return the exit code."""
    level = logging.INFO if outcome.exit_code == 0 else logging.ERROR
    logger.log(level, "job %s %s: %s", job, outcome.state, outcome.reason)
    if outcome.exit_code != 0:
        last_words(log, outcome.rank, elsewhere)
    return outcome.exit_code


def last_words(log: Path | None, rank: int | None, elsewhere: str) -> None:
    """Print why the rank failed, by its log, and the one file to read: `elsewhere` where there is no such."""
    try:
        lines = told(log_end(log)) if log is not None else None
    except OSError as error:
        logger.warning("the log of rank %s cannot be read: %s", rank, error)
        lines = None
    if lines is None:
        logger.error("what the ranks printed is in %s", elsewhere)
        return
    if lines:
        logger.error("the last that rank %s printed:", rank)
        for line in lines:
            logger.error("%s", line, extra={QUOTED: True})
    logger.error("the whole log of rank %s: %s", rank, log)


def told(lines: list[str]) -> list[str]:
    """Return those of a log's last lines that say why: a traceback's, if it ends with one, else the last."""
    # torch puts the rank in front of what nobody has caught.
    lines = [PREFIX.sub("", line) for line in lines]
    begin = max((n for n, line in enumerate(lines) if line.strip() == TRACEBACK), default=None)
    if begin is not None:
        end = next((n for n in range(begin + 1, len(lines)) if lines[n][:1].strip()), len(lines))
        # One that is older than what came after it says nothing about the end.
        if len(lines) - end <= LINES // 2:
            lines = lines[begin : end + LINES // 2]
    return [_bounded(line) for line in lines if line.strip()][-LINES:]


def log_end(log: Path) -> list[str]:
    """The last lines of a log. Raises OSError."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_NBYTES))
        return file.read().decode(errors="replace").rstrip().splitlines()


def _bounded(line: str) -> str:
    """Without control characters, and not without end: it goes to a terminal."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return clean if len(clean) <= LINE_LIMIT else clean[:LINE_LIMIT] + "..."
