"""Of a rank that failed, the launcher prints what says why."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ckptless.daemon.launch.console import LINES, last_words, told

RAISED = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in train',
    "    step()",
    "ValueError: no such",
    "thing",
]


def test_a_traceback_at_the_end() -> None:
    assert told(["step 1", *RAISED, "a last word"]) == [*RAISED, "a last word"]


def test_of_several_the_last_one() -> None:
    chain = [*RAISED, "", "During handling of the above exception, another exception occurred:", "", *RAISED]
    assert told(["x", *chain]) == RAISED


def test_as_torch_prints_what_nobody_has_caught() -> None:
    assert told([f"[rank3]: {line}" for line in RAISED]) == RAISED


def test_one_of_long_ago_does_not_say_why_it_was_killed() -> None:
    after = [f"step {n}" for n in range(40)]
    assert told([*RAISED, *after]) == after[-LINES:]


def test_a_deep_one_is_cut_to_its_end() -> None:
    deep = [RAISED[0], *(f'  File "{n}"' for n in range(100)), *RAISED[3:]]
    assert told(deep)[-2:] == RAISED[3:]
    assert len(told(deep)) == LINES


def test_what_it_printed_does_not_drive_the_terminal() -> None:
    (line,) = told(["\x1b[2J" + "x" * 9999])
    assert line.startswith("\\x1b[2Jxxx")
    assert len(line) < 1000


def test_what_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "rank-00003.log"
    log.write_bytes(b"\xff" * (1 << 20) + b"\n" + "\n".join(RAISED).encode())
    with caplog.at_level(logging.ERROR):
        last_words(log, 3, "elsewhere")
        first, *printed, where = (record.getMessage() for record in caplog.records)
        assert first == "the last that rank 3 printed:"
        assert printed[-5:] == RAISED
        assert where == f"the whole log of rank 3: {log}"
        caplog.clear()
        last_words(tmp_path / "none", 3, "/logs")
        last_words(None, None, "/logs")
        assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
            "what the ranks printed is in /logs"
        ] * 2
