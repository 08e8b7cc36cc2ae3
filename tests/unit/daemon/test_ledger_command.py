"""`ckptctl ledger`: records taken along and read again, damage found; and a ledger that is kept small."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ledger import store
from ckptless.daemon.ledger.merge import read_all
from ckptless.daemon.ledger.store import Ledger, Owner, Retention
from ckptless.daemon.protocol.records import EventRecord, JobRecord, NodeRecord

DAY_S = 86400.0
RUN = "0" * 32


def job(name: str, *, started_s: float = 10.0, ended_s: float | None = 20.0) -> JobRecord:
    return JobRecord(
        job=name,
        command=("train.py",),
        world_size=2,
        nodes=1,
        spares=0,
        state="running" if ended_s is None else "done",
        started_s=started_s,
        ended_s=ended_s,
        exit_code=None if ended_s is None else 0,
    )


def events(name: str, count: int, node: int = 0) -> list[EventRecord]:
    return [
        EventRecord(
            event=f"{name}.{node}.{number}",
            job=name,
            node=node,
            at_s=10.0 + number,
            level="info",
            kind="generation",
            generation=1,
            text="x" * 200,
        )
        for number in range(count)
    ]


def node(name: str, number: int) -> NodeRecord:
    return NodeRecord(
        job=name, node=number, name="n", address="", state="up", daemon_pid=1, agent_pid=2, updated_s=15.0
    )


def asked(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(ckptctl, ["ledger", *words, "--state-dir", str(folder)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two nodes' ledgers of a job, of which one has another job as well."""
    for number in range(2):
        (tmp_path / f"node-{number}").mkdir()
        with Ledger.open(tmp_path / f"node-{number}" / "ledger.db") as ledger:
            ledger.write([job("4711", started_s=11.0), node("4711", number), *events("4711", 3, number)])
            if number:
                ledger.write([job("4710"), *events("4710", 2)])
    return tmp_path


def test_a_job_is_printed_a_record_a_line(folder: Path) -> None:
    result = asked(folder, "export", "4711")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["type"] for row in rows] == ["job", "node", "node", *["event"] * 6]
    assert {row["job"] for row in rows} == {"4711"}
    # The newest, where none is named.
    assert asked(folder, "export").stdout == result.stdout
    every = asked(folder, "export", "--all").stdout.splitlines()
    assert len(every) == len(rows) + 3
    assert asked(folder, "export", "--all", "4711").exit_code == 2
    assert asked(folder, "export", "x").exit_code == 4


def test_a_ledger_that_was_written_anew_has_the_same(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "taken" / "ledger.db"
    assert "there is no folder" in asked(folder, "export", "--all", "--sqlite", str(made)).stderr
    made.parent.mkdir()
    result = asked(folder, "export", "--all", "--sqlite", str(made))
    assert (result.exit_code, result.stderr) == (0, f"wrote 12 records to {made}\n")
    before, after = read_all(folder / "node-1"), read_all(made.parent)
    assert after.of_job("4710").events == before.of_job("4710").events
    assert len(after.of_job("4711").events) == 6
    again = asked(folder, "export", "--all", "--sqlite", str(made))
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)


def test_a_sound_ledger_is_said_to_be_so(folder: Path) -> None:
    result = asked(folder, "check", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)["ledgers"]
    assert [(Path(row["ledger"]).parent.name, row["sound"]) for row in found] == [
        ("node-0", True),
        ("node-1", True),
    ]
    assert all(row["nbytes"] > 0 for row in found)
    (folder / "empty").mkdir()
    assert asked(folder / "empty", "check").exit_code == 3


def _spoil_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 3000] = b"\xff" * 3000
    path.write_bytes(bytes(data))


def _spoil_row(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE jobs SET nodes = -1")
    connection.close()


def _spoil_vote(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO votes VALUES ('4711', 'me', '{}', 'other')")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(_spoil_page, ""), (_spoil_row, "nodes"), (_spoil_vote, "is not as it was written")],
)
def test_damage_is_found_and_named(folder: Path, spoil: Any, words: str) -> None:
    spoil(folder / "node-0" / "ledger.db")
    result = asked(folder, "check")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    bad, good = result.stdout.splitlines()
    assert words in bad
    assert "sound" not in bad
    assert "node-1/ledger.db: sound" in good


def pages(path: Path) -> int:
    """Return how large the file is, or will be once what is beside it is written into it."""
    with closing(sqlite3.connect(path)) as other:
        return int(other.execute("PRAGMA page_count").fetchone()[0])


def test_jobs_that_were_over_first_make_room(tmp_path: Path) -> None:
    now_s = 100 * DAY_S
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        for number in range(20):
            name = f"over-{number:02}"
            ledger.own(name, Owner(1001, RUN), anew=True)
            ledger.write([job(name, ended_s=now_s - (20 - number) * 3600), *events(name, 500)])
        ledger.write([job("runs", started_s=0.0, ended_s=None), *events("runs", 500)])
        whole = ledger.used_nbytes
        assert ledger.prune(now_s) == 0
        assert ledger.used_nbytes == whole
        removed = ledger.prune(now_s, Retention(most_nbytes=whole // 2))
        assert 8 <= removed <= 12
        assert ledger.used_nbytes <= whole // 2
        left = {one.job for one in ledger.rows(JobRecord)}
        assert left == {"runs", *(f"over-{number:02}" for number in range(removed, 20))}
        assert len(ledger.rows(EventRecord, "over-00")) == 0
        # The room goes back to the file system.
        assert pages(tmp_path / "ledger.db") * 4096 <= whole * 0.6
        # One that runs stays, whatever is said.
        assert ledger.prune(now_s, Retention(most_nbytes=0)) == 20 - removed
        assert {one.job for one in ledger.rows(JobRecord)} == {"runs"}
        assert len(ledger.rows(EventRecord)) == 500
        ledger.check()


def test_what_is_older_than_is_kept_goes_whatever_room_there_is(tmp_path: Path) -> None:
    now_s = 100 * DAY_S
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.write([job("old", ended_s=now_s - 8 * DAY_S), job("new", ended_s=now_s - 6 * DAY_S)])
        assert ledger.prune(now_s, Retention(keep_s=7 * DAY_S)) == 0
        assert {one.job for one in ledger.rows(JobRecord)} == {"new"}


def test_room_is_given_back_in_parts_so_that_a_vote_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "VACUUM_PAGES", 8)
    monkeypatch.setattr(store, "VACUUMS", 2)
    monkeypatch.setattr(store, "MOST_REMOVED", 3)
    now_s = 100 * DAY_S
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        for number in range(9):
            ledger.write([job(f"over-{number}"), *events(f"over-{number}", 300)])
        sizes = []
        kept = Retention(keep_s=200 * DAY_S, most_nbytes=0)
        assert [ledger.prune(now_s, kept) for _ in range(4)] == [3, 3, 3, 0]
        for _ in range(200):
            ledger.prune(now_s, kept)
            sizes.append(pages(tmp_path / "ledger.db"))
        falls = [before - after for before, after in pairwise(sizes)]
        # A page of the map of pages may go with them.
        assert 8 <= max(falls) <= 2 * 8 + 2
        assert sizes[-1] < sizes[0] / 3
