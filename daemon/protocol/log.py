"""Logging of the daemon, agent and launcher: one line per event on standard error."""

import logging
import re
import sys

from ckptless.daemon.protocol.limits import one_line

# What each line begins with, see `configure`.
LOG_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \S+ [A-Z]+ ")


class OneLine(logging.Formatter):
    """Spells out what would end a line or move a terminal's cursor: what is logged may be anybody's text."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's own name
        """The line; a traceback is not part of it."""
        return one_line(super().formatMessage(record))


def configure(name: str, *, verbose: bool = False, level: str = "info") -> None:
    """Log to standard error from `level` on (`verbose`: all), each line with time, `name` and level."""
    form = f"%(asctime)s.%(msecs)03d {name} %(levelname)s %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(form, "%H:%M:%S"))
    logging.basicConfig(level=logging.DEBUG if verbose else level.upper(), handlers=[handler])
