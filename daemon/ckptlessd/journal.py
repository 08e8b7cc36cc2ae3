"""Entries of systemd's journal, with the fields of the ledger's row that each tells of.

By its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).
"""

import logging
import socket
from collections.abc import Iterator

import msgspec

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.log import ROW

JOURNAL = "/run/systemd/journal/socket"
# The journal takes its time where its disk is busy. No line may hold up the event loop for as long as others
# take for silence.
DEADLINE_S = 0.1
# Priorities of syslog(3), by logging's levels.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


class Journal(logging.Handler):
    """Sends entries to the journal. Raises UsageError where there is none.

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
        self._socket.settimeout(DEADLINE_S)

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
