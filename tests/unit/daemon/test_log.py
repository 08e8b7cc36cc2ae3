"""Lines of log: text that drives no terminal, and JSON with the rows that they tell of."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from ckptless.daemon.protocol import log
from ckptless.daemon.protocol.records import FaultRecord

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


def test_text_is_as_ever() -> None:
    with logging_as(verbose=True) as out:
        logging.getLogger("x").debug("a\nb", extra=log.about(FAULT))
    (line,) = out.getvalue().splitlines()
    assert log.LOG_PREFIX.match(line)
    assert "FaultRecord" not in line
