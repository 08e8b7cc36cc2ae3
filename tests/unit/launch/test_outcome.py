"""How a job ended, as a file that several nodes write and people read."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import CkptlessError
from ckptless.daemon.protocol.messages import Outcome, Why
from ckptless.daemon.protocol.outcome import outcome_path, read_outcome, which_holds, write_outcome

DONE = Outcome(state="done", exit_code=0, reason="every rank ended by itself", why="done")


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    job=st.text(max_size=20),
    state=st.sampled_from(["done", "failed", "stopped"]),
    code=st.integers(-255, 255),
    reason=st.text(max_size=200),
    why=st.sampled_from(get_args(Why)),
)
def test_it_comes_back(tmp_path: Path, job: str, state: str, code: int, reason: str, why: Why) -> None:
    outcome_path(tmp_path).unlink(missing_ok=True)
    outcome = Outcome(state=state, exit_code=code, reason=reason, why=why)  # type: ignore[arg-type]
    write_outcome(tmp_path, job, outcome)
    assert read_outcome(tmp_path, job) == outcome
    assert read_outcome(tmp_path, job + "x") is None
    assert read_outcome(tmp_path, job, "a" * 32) is None


def test_people_can_read_it(tmp_path: Path) -> None:
    write_outcome(tmp_path, "4711", DONE)
    assert json.loads(outcome_path(tmp_path).read_text()) == {
        "job": "4711",
        "state": "done",
        "exit_code": 0,
        "reason": "every rank ended by itself",
        "why": "done",
        "rank": None,
        "node": None,
        "launch": "0" * 32,
    }


def test_one_without_a_word_for_scripts(tmp_path: Path) -> None:
    outcome_path(tmp_path).write_text('{"job": "7", "state": "failed", "exit_code": 4, "reason": "x"}')
    assert read_outcome(tmp_path, "7") == Outcome(state="failed", exit_code=4, reason="x")


def test_nothing_yet(tmp_path: Path) -> None:
    assert read_outcome(tmp_path, "4711") is None
    assert read_outcome(tmp_path / "no folder", "4711") is None


def test_a_later_one_replaces_it_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_outcome(tmp_path, "4711", DONE)
    failed = Outcome(state="failed", exit_code=1, reason="x")
    write_outcome(tmp_path, "4711", failed)
    assert read_outcome(tmp_path, "4711") == failed
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]


def test_a_node_that_was_stopped_alone_does_not_overrule_the_others(tmp_path: Path) -> None:
    stopped = Outcome(state="stopped", exit_code=130, reason="SIGINT from the user", why="cancelled")
    for first, then in ((stopped, DONE), (DONE, stopped)):
        outcome_path(tmp_path).unlink(missing_ok=True)
        write_outcome(tmp_path, "4711", first)
        write_outcome(tmp_path, "4711", then)
        assert read_outcome(tmp_path, "4711") == DONE
        assert which_holds((None, first, then)) is DONE
    # Of an earlier job, or damaged, it holds nothing.
    write_outcome(tmp_path, "4712", stopped)
    assert read_outcome(tmp_path, "4712") == stopped
    outcome_path(tmp_path).write_text("{")
    write_outcome(tmp_path, "4712", stopped)
    assert which_holds((None, read_outcome(tmp_path, "4712"))) == stopped
    assert which_holds(()) is None


def test_who_reads_while_it_is_written_finds_all_or_nothing(tmp_path: Path) -> None:
    long = Outcome(state="failed", exit_code=1, reason="a long story " * 5000)
    over = threading.Event()

    def write() -> None:
        try:
            for number in range(300):
                write_outcome(tmp_path, "4711", long if number % 2 else DONE)
        finally:
            over.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        found = []
        while not over.is_set():
            found.append(read_outcome(tmp_path, "4711"))
        writing.result()
    assert all(outcome in (None, DONE, long) for outcome in found)


def test_a_folder_that_is_gone_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_outcome(tmp_path / "gone", "4711", DONE)


@pytest.mark.parametrize("data", [b"", b"{", b"null", b'{"job": "4711"}', b"\xff"])
def test_a_damaged_file_is_an_error_of_the_tree(tmp_path: Path, data: bytes) -> None:
    outcome_path(tmp_path).write_bytes(data)
    with pytest.raises(CkptlessError):
        read_outcome(tmp_path, "4711")
