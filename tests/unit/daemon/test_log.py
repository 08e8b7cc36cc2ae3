"""Lines of log: text that drives no terminal, and JSON with the rows that they tell of."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.ckptlessd.journal import Journal
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.records import FaultRecord, RecoveryRecord

FAULT = FaultRecord(
    fault="g1.t1.1",
    job="4711",
    kind="died",
    node=1,
    slot=0,
    rank=1,
    generation=1,
    detail="was ended by SIGKILL",
    seen_s=12.5,
    source="process",
)


@contextmanager
def logging_as(**options: Any) -> Iterator[io.StringIO]:
    """What a process logs that is configured so; pytest's own handlers are set aside meanwhile."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        log.configure("ckptlessd[node01]", **options)
        (handler,) = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        stream = io.StringIO()
        handler.setStream(stream)
        yield stream
    finally:
        root.handlers[:] = before
        root.setLevel(level)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The end at which the journal listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(str(tmp_path / "socket"))
        one.settimeout(10)
        yield one


def alone(handler: logging.Handler) -> logging.Logger:
    """A logger that has only this handler."""
    logger = logging.getLogger(f"ckptless.{id(handler)}")
    logger.propagate, logger.handlers = False, [handler]
    logger.setLevel("INFO")
    return logger


def entry(data: bytes) -> list[tuple[str, str]]:
    """The fields of an entry, as systemd.io/JOURNAL_NATIVE_PROTOCOL has them."""
    found = []
    while data:
        line, _, data = data.partition(b"\n")
        name, is_short, value = line.partition(b"=")
        if not is_short:
            nbytes = int.from_bytes(data[:8], "little")
            value, end, data = data[8 : 8 + nbytes], data[8 + nbytes : 9 + nbytes], data[9 + nbytes :]
            assert end == b"\n"
        found.append((name.decode(), value.decode()))
    return found


def test_entries_of_the_journal(journal: socket.socket) -> None:
    handler = Journal("ckptlessd[node01]", journal.getsockname())
    logger = alone(handler)
    recovery = RecoveryRecord(
        job="4711",
        generation=2,
        rung="process",
        faults=("g1.t1.1", "g1.t1.2"),
        restore_step=None,
        started_s=13.0,
        phases={},
        outcome=None,
    )
    logger.warning("job %s: fault", "4711", extra=log.about(FAULT))
    logger.info("two\nlines = \udcff")
    logger.error("recovered", extra=log.about(recovery))
    first, second, third = (entry(journal.recv(1 << 16)) for _ in range(3))
    fields = dict(first)
    assert fields["MESSAGE"] == "job 4711: fault"
    assert fields["PRIORITY"] == "4"
    assert fields["CKPTLESS_WHO"] == "ckptlessd[node01]"
    assert (fields["CKPTLESS_JOB"], fields["CKPTLESS_FAULT"], fields["CKPTLESS_RANK"]) == (
        "4711",
        "g1.t1.1",
        "1",
    )
    assert dict(second)["MESSAGE"] == "two\nlines = \\udcff"
    assert [value for name, value in third if name == "CKPTLESS_FAULTS"] == ["g1.t1.1", "g1.t1.2"]
    assert "CKPTLESS_RESTORE_STEP" not in dict(third), "nothing is no value"
    for name, _ in (*first, *second, *third):
        assert re.fullmatch("[A-Z][A-Z0-9_]{0,63}", name)
    handler.close()


def test_where_there_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"log_format is journal, and .* takes nothing"):
        Journal("n", str(tmp_path / "none"))


def test_what_the_journal_does_not_take_is_told_on_standard_error(
    journal: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = Journal("n", journal.getsockname())
    Path(journal.getsockname()).unlink()
    logger = alone(handler)
    logger.warning("its words")
    assert "its words" in capsys.readouterr().err
    handler.close()


def test_a_line_of_json_has_what_it_tells_of() -> None:
    with logging_as(log_format="json") as out:
        logging.getLogger("x").warning("job %s: fault %s", "4711", FAULT.fault, extra=log.about(FAULT))
        logging.getLogger("x").info("two\nlines \x1b[2J \udcff")
        logging.getLogger("x").debug("not told")
    assert "\x1b" not in out.getvalue()
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["who"], first["level"], first["text"]) == (
        "ckptlessd[node01]",
        "warning",
        "job 4711: fault g1.t1.1",
    )
    assert first["record"]["fault"] == "g1.t1.1"
    assert first["record"]["type"] == "fault"
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert first["time"].endswith("Z")
    assert "\n" in second["text"]
    assert "record" not in second


def test_a_traceback_is_a_field_of_its_line() -> None:
    with logging_as(log_format="json") as out:
        try:
            raise ValueError("it")
        except ValueError:
            logging.getLogger("x").exception("it failed")
    (line,) = (json.loads(one) for one in out.getvalue().splitlines())
    assert line["level"] == "error"
    assert line["error"].endswith("ValueError: it")


def test_what_somebody_else_said_is_quoted() -> None:
    """As text without time and name in front, as JSON a line like others."""
    for log_format in ("text", "json"):
        with logging_as(log_format=log_format) as out:
            logging.getLogger("x").error("%s", "  its\x1b[2J words", extra={log.QUOTED: True})
        if log_format == "text":
            assert out.getvalue() == "      its\\x1b[2J words\n"
        else:
            assert json.loads(out.getvalue())["text"] == "  its\x1b[2J words"


def test_what_a_process_always_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_ALWAYS", {})
    with logging_as(log_format="json") as out:
        log.always(job="4711", faults=("g1.t1.1",))
        logging.getLogger("x").info("one")
        log.always(faults=())
        logging.getLogger("x").info("two")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["job"], first["faults"]) == ("4711", ["g1.t1.1"])
    assert (second["job"], second["faults"]) == ("4711", [])


def test_a_script_keeps_its_own_logging(capsys: pytest.CaptureFixture[str]) -> None:
    ours = logging.getLogger("ckptless")
    before = ours.handlers, ours.propagate, ours.level
    try:
        log.configure_package("rank")
        logging.getLogger("ckptless.x").info("ours")
        logging.getLogger("theirs").error("not ours")
    finally:
        ours.handlers, ours.propagate, ours.level = before
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("{")]
    assert (json.loads(line)["who"], json.loads(line)["text"]) == ("rank", "ours")


def test_text_is_as_ever() -> None:
    with logging_as(verbose=True) as out:
        logging.getLogger("x").debug("a\nb", extra=log.about(FAULT))
    (line,) = out.getvalue().splitlines()
    assert log.LOG_PREFIX.match(line)
    assert "FaultRecord" not in line
