"""Logging of all of this package's programs: one line per event on standard error, as text or as JSON."""

import json
import logging
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

from ckptless.daemon.protocol.limits import one_line

LogFormat: TypeAlias = Literal["text", "json", "journal"]
RunLogFormat: TypeAlias = Literal["text", "json"]

# What each line begins with, see `configure`.
LOG_PREFIX = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} \S+ [A-Z]+ ")


class OneLine(logging.Formatter):
    """Spells out what would end a line or move a terminal's cursor: what is logged may be anybody's text."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's own name
        """The line; a traceback is not part of it."""
        quoted = hasattr(record, QUOTED)
        return one_line(f"    {record.message}" if quoted else super().formatMessage(record))


class JsonLine(logging.Formatter):
    """Writes a JSON object a line: time (RFC 3339, UTC), who, level, text; what `about` and `always` give it.

    A traceback is in `error`.
    """

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": at.replace("+00:00", "Z"),
            "who": self._who,
            "level": record.levelname.lower(),
            "text": record.getMessage(),
        }
        line |= _ALWAYS
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        row = getattr(record, ROW, None)
        if row is not None:
            line["record"] = msgspec.to_builtins(row)
        # ASCII: what is logged may be no Unicode at all.
        return json.dumps(line, default=str)


# The attribute of a line of log that has the row of the ledger that it tells of.
ROW = "ledger_row"
# That of a line that is somebody else's: as text it has no time and no name in front.
QUOTED = "quoted"
# This process' own: what all its lines of JSON say.
_ALWAYS: dict[str, object] = {}


def always(**fields: object) -> None:
    """Have every line of JSON of this process say this, too, from now on."""
    _ALWAYS.update(fields)


def about(row: msgspec.Struct) -> dict[str, msgspec.Struct]:
    """Return what to give a logger as `extra`, so that a line of JSON has this row of the ledger, too."""
    return {ROW: row}


def after(faults: Sequence[str]) -> str:
    """Return what to end a sentence with of what follows from these faults."""
    return f" (fault{'s' if len(faults) > 1 else ''} {', '.join(faults)})" if faults else ""


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


def configure_package(name: str) -> None:
    """Have this package's loggers write JSON to standard error; other logging here is the user's own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine(name))
    ours = logging.getLogger("ckptless")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.INFO)
