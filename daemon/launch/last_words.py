"""What a rank that failed printed last, for whoever reads the launcher's output."""

import logging
import os
import re
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

TAIL_NBYTES = 64 * 1024
LINES = 12
LINE_LIMIT = 400
PREFIX = re.compile(r"^\[rank\d+\]: ?")
TRACEBACK = "Traceback (most recent call last):"


def last_words(log: Path | None, rank: int | None, elsewhere: str) -> None:
    """Print why the rank failed, by its log, and the one file to read: `elsewhere` where there is no such."""
    try:
        lines = told(_tail(log)) if log is not None else None
    except OSError as error:
        logger.warning("the log of rank %s cannot be read: %s", rank, error)
        lines = None
    if lines is None:
        logger.error("what the ranks printed is in %s", elsewhere)
        return
    if lines:
        logger.error("the last that rank %s printed:", rank)
        for line in lines:
            # A line of the log is one line: these are the rank's own.
            print(f"    {line}", file=sys.stderr)
    logger.error("the whole log of rank %s: %s", rank, log)


def told(lines: list[str]) -> list[str]:
    """Of a log's last lines those that say why: a traceback's, if it ends with one, else the last ones."""
    # torch puts the rank in front of what nobody has caught.
    lines = [PREFIX.sub("", line) for line in lines]
    begin = max((n for n, line in enumerate(lines) if line.strip() == TRACEBACK), default=None)
    if begin is not None:
        end = next((n for n in range(begin + 1, len(lines)) if lines[n][:1].strip()), len(lines))
        # One that is older than what came after it says nothing about the end.
        if len(lines) - end <= LINES // 2:
            lines = lines[begin : end + LINES // 2]
    return [_bounded(line) for line in lines if line.strip()][-LINES:]


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_NBYTES))
        return file.read().decode(errors="replace").splitlines()


def _bounded(line: str) -> str:
    """Without control characters, and not without end: it goes to a terminal."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return clean if len(clean) <= LINE_LIMIT else clean[:LINE_LIMIT] + "..."
