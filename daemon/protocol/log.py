"""Logging of the daemon, agent and launcher: one line per event on standard error, as text or as JSON.

Or the daemon's as entries of systemd's journal, with the fields of the ledger's row that each tells of.
"""

import json
import logging
import re
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import msgspec

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import one_line

LogFormat: TypeAlias = Literal["text", "json", "journal"]

JOURNAL = "/run/systemd/journal/socket"
# The journal takes its time where its disk is busy; nobody here waits for longer.
JOURNAL_DEADLINE_S = 1.0
# Priorities of syslog(3), by logging's levels.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}

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


class Journal(logging.Handler):
    """Sends entries to systemd's journal, by its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).

    An entry that tells of a row of the ledger has its plain values as CKPTLESS_JOB, CKPTLESS_FAULT and so on;
    of a list one field for each. What the journal does not take goes to standard error.
    """

    def __init__(self, who: str, path: str = JOURNAL) -> None:
        super().__init__()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trial:
                trial.connect(path)
        except OSError as error:
            why = f"{path} takes nothing ({error.strerror})"
            raise UsageError(f"daemon.log_format is journal, and {why}: say text or json") from error
        self._who, self._path = who, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(JOURNAL_DEADLINE_S)

    def emit(self, record: logging.LogRecord) -> None:
        """Send it."""
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
            fields = [
                ("MESSAGE", text),
                ("PRIORITY", str(_PRIORITIES.get(record.levelname, 6))),
                ("SYSLOG_IDENTIFIER", "ckptlessd"),
                ("CKPTLESS_WHO", self._who),
                *_fields_of(getattr(record, ROW, None)),
            ]
            # Not connected: the journal may have started anew.
            self._socket.sendto(b"".join(_field(name, value) for name, value in fields), self._path)
        except OSError:
            self.handleError(record)

    def close(self) -> None:
        """End it."""
        self._socket.close()
        super().close()


def _fields_of(row: msgspec.Struct | None) -> Iterator[tuple[str, str]]:
    """The plain values of a row, as (name, value)."""
    for name, value in msgspec.structs.asdict(row).items() if row is not None else ():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, str | int | float):
                yield f"CKPTLESS_{name.upper()}", str(one)


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)


# The attribute of a line of log that has the row of the ledger that it tells of.
ROW = "ledger_row"


def about(row: msgspec.Struct) -> dict[str, msgspec.Struct]:
    """Return what to give a logger as `extra`, so that a line of JSON has this row of the ledger, too."""
    return {ROW: row}


def configure(
    name: str, *, verbose: bool = False, level: str = "info", log_format: LogFormat = "text"
) -> None:
    """Log to standard error from `level` on (`verbose`: all), each line with time, `name` and level.

    Raises UsageError where the journal is asked for, and there is none.
    """
    form = f"%(asctime)s.%(msecs)03d {name} %(levelname)s %(message)s"
    handler: logging.Handler
    if log_format == "journal":
        handler = Journal(name)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLine(name) if log_format == "json" else OneLine(form, "%H:%M:%S"))
    logging.basicConfig(level=logging.DEBUG if verbose else level.upper(), handlers=[handler])
