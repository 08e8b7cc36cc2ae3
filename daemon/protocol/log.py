"""Logging of the daemon, agent and launcher: one line per event on standard error, as text or as JSON."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

from ckptless.daemon.protocol.limits import one_line

LogFormat: TypeAlias = Literal["text", "json", "journal"]

# What each line begins with, see `configure`.
LOG_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \S+ [A-Z]+ ")


class OneLine(logging.Formatter):
    """Spells out what would end a line or move a terminal's cursor: what is logged may be anybody's text."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's own name
        """The line; a traceback is not part of it."""
        return one_line(super().formatMessage(record))


class JsonLine(logging.Formatter):
    """Writes a JSON object a line: time (RFC 3339, UTC), who, level, text; and what `about` gives it.

    A traceback is in `error`.
    """

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": at.replace("+00:00", "Z"),
            "who": self._who,
            "level": record.levelname.lower(),
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        row = getattr(record, ROW, None)
        if row is not None:
            line["record"] = msgspec.to_builtins(row)
        # ASCII: what is logged may be no Unicode at all.
        return json.dumps(line, default=str)


# The attribute of a line of log that has the row of the ledger that it tells of.
ROW = "ledger_row"


def about(row: msgspec.Struct) -> dict[str, msgspec.Struct]:
    """Return what to give a logger as `extra`, so that a line of JSON has this row of the ledger, too."""
    return {ROW: row}


def configure(
    name: str,
    *,
    verbose: bool = False,
    level: str = "info",
    log_format: LogFormat = "text",
    elsewhere: logging.Handler | None = None,
) -> None:
    """Log from `level` on (`verbose`: all), to standard error, each line with time, `name` and level.

    Or to `elsewhere`, a handler of one's own.
    """
    form = f"%(asctime)s.%(msecs)03d {name} %(levelname)s %(message)s"
    handler = elsewhere
    if handler is None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLine(name) if log_format == "json" else OneLine(form, "%H:%M:%S"))
    logging.basicConfig(level=logging.DEBUG if verbose else level.upper(), handlers=[handler])
