"""The ledger: what goes in comes out, once, and what holds when two records disagree."""

import math
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptless.daemon.ledger import migrations, models
from ckptless.daemon.ledger.merge import merge, read_all
from ckptless.daemon.ledger.paths import default_state_dir, ledger_files
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol.errors import DamagedLedgerError, LedgerError, UsageError
from ckptless.daemon.protocol.messages import PROTOCOL
from ckptless.daemon.protocol.model import ReaderState, RingState, StreamState
from ckptless.daemon.protocol.records import (
    EventRecord,
    FaultRecord,
    GenerationRecord,
    HoldingRecord,
    JobRecord,
    NodeRecord,
    Record,
    RecoveryRecord,
    SlotRecord,
)
from ckptless.daemon.protocol.requests import Read, RowCursor

JOB = JobRecord(
    job="7",
    command=("train.py", "--lr", "é\n"),
    world_size=2,
    nodes=2,
    spares=1,
    state="running",
    started_s=1.5,
)
NODE = NodeRecord(
    job="7", node=0, name="n0", address="127.0.0.2:1", state="up", daemon_pid=None, agent_pid=3, updated_s=5.0
)
SLOT = SlotRecord(
    job="7",
    node=0,
    slot=1,
    rank=None,
    generation=1,
    pid=9,
    phase="ready",
    step=None,
    loss=None,
    updated_s=5.0,
    every=4,
    share=0.0078125,
)
HOLDING = HoldingRecord(
    job="7",
    node=0,
    tensors=((0, (5, 6), 2048), (2, (), 0)),
    records=((0, 0, (5, 6), 20), (3, 2, (6,), 10)),
    nbytes=4096,
    seq=17,
    updated_s=5.0,
    rings=(
        RingState(
            loader="batches",
            manifest="ab" * 16,
            nbytes=10,
            budget_nbytes=100,
            prefetch=8,
            made=3,
            given=2,
            streams=(StreamState(stream=0, ready=2, ahead=1),),
            readers=(ReaderState(slot=0, stream=0, taken=1, waits=1, waited_s=0.5, share=0.25),),
            producer=70,
        ),
    ),
)
GENERATION = GenerationRecord(
    job="7",
    generation=2,
    places=((0, 0), (1, 0)),
    restore_step=7,
    rung="spare",
    faults=("f1",),
    leader=0,
    agreed_s=3.0,
)
FAULT = FaultRecord(
    fault="f1",
    job="7",
    kind="died",
    node=1,
    slot=0,
    rank=1,
    generation=1,
    detail="SIGKILL",
    seen_s=2.0,
    source="process",
)
RECOVERY = RecoveryRecord(
    job="7",
    generation=2,
    rung="spare",
    faults=("f1",),
    restore_step=7,
    started_s=2.0,
    phases={"detect": 0.1, "first step": 0.2},
    outcome=None,
)
EVENT = EventRecord(
    event="e1", job="7", node=0, at_s=2.0, level="warning", kind="fault", generation=1, text="rank 1 died"
)
ALL: tuple[Record, ...] = (JOB, NODE, SLOT, HOLDING, GENERATION, FAULT, RECOVERY, EVENT)


def changed(record: Any, **fields: object) -> Any:
    return msgspec.structs.replace(record, **fields)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def contents(path: Path) -> tuple[Record, ...]:
    with Ledger.open_readonly(path) as ledger:
        return ledger.records()


def test_every_kind_comes_back_as_it_went_in(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.write(ALL)
        assert ledger.rows(JobRecord) == (JOB,)
        assert ledger.rows(JobRecord, "7") == (JOB,)
        assert ledger.rows(JobRecord, "8") == ()
        assert ledger.rows(NodeRecord, "7") == (NODE,)
        assert ledger.rows(SlotRecord, "7") == (SLOT,)
        assert ledger.rows(HoldingRecord, "7") == (HOLDING,)
        assert ledger.rows(GenerationRecord, "7") == (GENERATION,)
        assert ledger.rows(FaultRecord, "7") == (FAULT,)
        assert ledger.rows(RecoveryRecord, "7") == (RECOVERY,)
        assert ledger.rows(EventRecord, "7") == (EVENT,)
        assert ledger.rows(NodeRecord, "8") == ()
        assert ledger.records() == ALL
        assert ledger.records(events=False) == ALL[:-1]


def test_writing_again_changes_nothing(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.write(ALL)
        ledger.write(ALL + ALL)
        ledger.write([])
        assert ledger.records() == ALL


@pytest.mark.parametrize("loss", [math.nan, math.inf, -0.0, 0.1 + 0.2])
def test_a_loss_is_kept_to_the_bit(path: Path, loss: float) -> None:
    with Ledger.open(path) as ledger:
        ledger.write([changed(SLOT, loss=loss)])
        kept = ledger.rows(SlotRecord, "7")[0].loss
    assert kept is not None
    assert kept.hex() == loss.hex()


@pytest.mark.parametrize("record", [NODE, SLOT])
def test_what_is_written_last_holds_also_after_a_clock_was_set_back(path: Path, record: Any) -> None:
    """One daemon writes them, in its order; its next life may begin an hour earlier."""
    set_back = changed(record, updated_s=record.updated_s - 3600.0)
    with Ledger.open(path) as ledger:
        ledger.write([record])
        ledger.write([set_back])
        assert ledger.records() == (set_back,)


def test_of_holdings_the_agents_own_count_says_what_is_newer(path: Path) -> None:
    # By a clock that is behind, and of which something that was held is gone.
    newer = changed(HOLDING, seq=18, tensors=(), updated_s=4.0)
    with Ledger.open(path) as ledger:
        ledger.write([HOLDING, newer])
        ledger.write([HOLDING])
        assert ledger.rows(HoldingRecord, "7") == (newer,)
    for ledgers in (([HOLDING], [newer]), ([newer], [HOLDING])):
        assert merge(ledgers).holdings == (newer,)


def test_a_job_that_ended_never_runs_again(path: Path) -> None:
    ended = changed(JOB, state="failed", ended_s=9.0, exit_code=1)
    with Ledger.open(path) as ledger:
        ledger.write([ended])
        ledger.write([changed(JOB, state="recovering")])
        assert ledger.rows(JobRecord, "7") == (ended,)
        stopped = changed(ended, state="stopped", reason="no spare")
        ledger.write([stopped])
        assert ledger.rows(JobRecord, "7") == (stopped,)


def test_a_job_that_runs_takes_the_newest_written(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.write([changed(JOB, state="recovering")])
        ledger.write([JOB])
        assert ledger.rows(JobRecord, "7") == (JOB,)


def test_a_recovery_takes_the_newest_written(path: Path) -> None:
    done = changed(RECOVERY, outcome="recovered", phases={"detect": 0.2})
    with Ledger.open(path) as ledger:
        ledger.write([RECOVERY])
        ledger.write([done])
        assert ledger.rows(RecoveryRecord, "7") == (done,)


def test_events_go_on_where_a_page_ended(path: Path) -> None:
    def page(after: RowCursor | None = None) -> tuple[list[str], RowCursor]:
        wanted = Read(protocol=PROTOCOL, job="7", tables=("event",), after=after)
        found = ledger.page(wanted, None, 100, 1 << 20)
        return [event.event for event in found.records if isinstance(event, EventRecord)], found.next

    with Ledger.open(path) as ledger:
        assert page()[0] == []
        ledger.write([EVENT, changed(EVENT, event="e0", at_s=0.5), changed(EVENT, job="8")])
        names, last = page()
        assert names == ["e1", "e0"]
        assert page(last) == ([], last)
        ledger.write([EVENT, changed(EVENT, event="e2")])
        assert page(last)[0] == ["e2"]


def test_one_bad_record_leaves_the_whole_batch_out(path: Path) -> None:
    with Ledger.open(path) as ledger:
        with pytest.raises(LedgerError, match=r"ledger\.db: the ledger cannot be written"):
            ledger.write([JOB, changed(EVENT, text="\ud800")])
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.write([JOB, changed(NODE, updated_s=math.nan)])
        assert ledger.records() == ()
        ledger.write([JOB])
        assert ledger.records() == (JOB,)


def test_only_decisions_wait_for_the_disk(path: Path) -> None:
    def level() -> object:
        with ledger._engine.begin() as connection:
            return connection.exec_driver_sql("PRAGMA synchronous").scalar_one()

    with Ledger.open(path) as ledger:
        for record, expected in (
            (GENERATION, 2),
            (EVENT, 1),
            (FAULT, 2),
            (SLOT, 1),
            (RECOVERY, 2),
            (NODE, 1),
        ):
            ledger.write([record])
            assert level() == expected, record


def test_another_thread_may_use_it(path: Path) -> None:
    with Ledger.open(path) as ledger:
        thread = threading.Thread(target=ledger.write, args=(ALL,))
        thread.start()
        thread.join()
        assert ledger.records() == ALL


def test_readers_see_what_is_committed_beside_a_writer(path: Path) -> None:
    with Ledger.open(path) as ledger, Ledger.open_readonly(path) as reader:
        ledger.write([JOB])
        assert reader.rows(JobRecord) == (JOB,)
        with pytest.raises(LedgerError, match="readonly"):
            reader.write([NODE])
        ledger.write([NODE])
        assert reader.rows(NodeRecord, "7") == (NODE,)


def test_two_writers_wait_for_each_other(path: Path) -> None:
    def write(start: int) -> None:
        with Ledger.open(path) as ledger:
            for number in range(start, start + 20):
                ledger.write([changed(EVENT, event=str(number))])

    threads = [threading.Thread(target=write, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(contents(path)) == 60


def test_closing_twice_is_harmless_and_leaves_one_file(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.write(ALL)
    ledger.close()
    ledger.close()
    assert os.listdir(path.parent) == ["ledger.db"]  # noqa: PTH208


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("closed", [True, False])
def test_who_may_not_write_the_folder_may_still_read(path: Path, closed: bool) -> None:
    """A user's ckptctl on root's ledger, by root's leave, beside the daemon or after it ended."""
    reader = (
        "import os, sys; from pathlib import Path; from ckptless.daemon.ledger.store import Ledger\n"
        "os.chdir(sys.argv[1]); os.setgid(65534); os.setuid(65534)\n"
        "with Ledger.open_readonly(Path('ledger.db')) as ledger: print(ledger.records()[0].job)"
    )
    ledger = Ledger.open(path)
    ledger.write(ALL)
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600  # by itself it is nobody else's
        file.chmod(0o644)
    # The name is looked up from the root: let the other user pass through pytest's private folders.
    folders = [folder for folder in path.parents if folder.name.startswith(("pytest-", "test_"))]
    for folder in folders:
        folder.chmod(0o755)
    try:
        if closed:
            ledger.close()
        command = [sys.executable, "-c", reader, str(path.parent)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        ledger.close()
        for folder in folders:
            folder.chmod(0o700)
    assert (ran.returncode, ran.stdout) == (0, "7\n"), ran.stderr


# The schema


def test_the_file_has_what_the_queries_expect(path: Path) -> None:
    Ledger.open(path).close()
    file = sqlite3.connect(path)
    try:
        for record, table in models.TABLES.items():
            in_file = [row[1] for row in file.execute(f"PRAGMA table_info({table.name})")]
            assert in_file == [column.name for column in table.c]
            assert [name for name in in_file if name != "row"] == [
                name for name in in_file if name in record.__struct_fields__
            ]
            assert set(record.__struct_fields__) <= set(in_file)
        assert file.execute("PRAGMA user_version").fetchone() == (migrations.VERSION,)
        assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    finally:
        file.close()


def test_a_newer_file_is_refused(path: Path) -> None:
    Ledger.open(path).close()
    set_version(path, 99)
    for opening in (Ledger.open, Ledger.open_readonly):
        with pytest.raises(LedgerError, match=r"ledger\.db: the ledger is of version 99, newer than the \d+"):
            opening(path)


def test_a_reader_does_not_migrate(path: Path) -> None:
    Ledger.open(path).close()
    set_version(path, 0)
    with pytest.raises(LedgerError, match="older"):
        Ledger.open_readonly(path)


def test_a_file_that_no_release_has_written_is_damaged(path: Path) -> None:
    Ledger.open(path).close()
    set_version(path, migrations.VERSION - 1)
    older = f"of version {migrations.VERSION - 1}, which no release has written"
    with pytest.raises(DamagedLedgerError, match=older):
        Ledger.open(path)


def test_what_may_be_unknown_may_be_null(path: Path) -> None:
    """And nothing else: a column follows from its field."""
    Ledger.open(path).close()
    file = sqlite3.connect(path)
    try:
        unset = {
            (table.name, row[1])
            for table in models.TABLES.values()
            for row in file.execute(f"PRAGMA table_info({table.name})")
            if not row[3] and not row[5]
        }
    finally:
        file.close()
    assert unset >= {("jobs", "ended_s"), ("slots", "rank"), ("slots", "loss"), ("faults", "source")}
    assert not unset & {("jobs", "command"), ("events", "text"), ("events", "about"), ("holdings", "rings")}


def set_version(path: Path, version: int) -> None:
    file = sqlite3.connect(path)
    try:
        file.execute(f"PRAGMA user_version = {version}")
    finally:
        file.close()


# Not a ledger


def test_what_cannot_be_opened_is_one_sentence(path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.db: there is no ledger$"):
        Ledger.open_readonly(path)
    with pytest.raises(LedgerError, match="No such file or directory"):
        Ledger.open(path / "nowhere" / "ledger.db")
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    for opening in (Ledger.open, Ledger.open_readonly):
        with pytest.raises(LedgerError, match="file is not a database"):
            opening(path)


def test_a_row_that_is_not_of_its_type_is_an_error(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.write([JOB])
        with ledger._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE jobs SET state = 'asleep'")
        with pytest.raises(LedgerError, match="Invalid enum value 'asleep'"):
            ledger.rows(JobRecord)


# Merging


def test_merging_two_nodes(tmp_path: Path) -> None:
    for node, records in enumerate(
        (
            [JOB, NODE, changed(SLOT, updated_s=6.0, step=4), RECOVERY, EVENT],
            [changed(JOB, state="done", ended_s=8.0), changed(NODE, updated_s=4.0), SLOT, GENERATION, EVENT],
        )
    ):
        (tmp_path / f"node-{node}").mkdir()
        with Ledger.open(tmp_path / f"node-{node}" / "ledger.db") as ledger:
            ledger.write(records)
    found = read_all(tmp_path)
    assert found.problems == ()
    assert found.sources == ledger_files(tmp_path)
    assert len(found.sources) == 2
    assert [job.state for job in found.jobs] == ["done"]
    assert found.nodes == (NODE,)
    assert [slot.step for slot in found.slots] == [4]
    assert (found.generations, found.recoveries, found.events) == ((GENERATION,), (RECOVERY,), (EVENT,))
    assert read_all(tmp_path, events=False) == changed_snapshot(found)
    assert found.of_job("7") == found
    assert found.of_job("8").jobs == ()


def changed_snapshot(found: Any) -> Any:
    return type(found)(**{**vars(found), "events": ()})


def test_a_damaged_ledger_is_a_problem_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "node-1").mkdir()
    (tmp_path / "node-1" / "ledger.db").write_bytes(b"rubbish" * 1000)
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.write([JOB])
        found = read_all(tmp_path)
    assert found.jobs == (JOB,)
    assert [problem.path for problem in found.problems] == [tmp_path / "node-1" / "ledger.db"]
    assert "not a database" in found.problems[0].why


def test_nothing_there_is_an_empty_snapshot(tmp_path: Path) -> None:
    assert read_all(tmp_path / "nowhere").sources == ()


def test_a_job_that_goes_on_is_taken_from_the_ledger_that_knows_most() -> None:
    stale = [changed(JOB, state="recovering"), NODE]
    fresh = [JOB, GENERATION, changed(NODE, updated_s=4.0)]
    assert merge([stale, fresh]).jobs == merge([fresh, stale]).jobs == (JOB,)


def test_a_recovery_with_an_outcome_wins_then_the_one_that_came_furthest() -> None:
    further = changed(RECOVERY, phases={"detect": 0.1, "stop": 0.1, "leave": 0.1})
    ended = changed(RECOVERY, outcome="recovered", phases={"detect": 0.1})
    assert merge([[further], [RECOVERY]]).recoveries == (further,)
    assert merge([[ended], [further], [RECOVERY]]).recoveries == (ended,)


def test_events_are_in_the_order_of_time() -> None:
    early = changed(EVENT, event="e9", at_s=0.1)
    assert merge([[EVENT], [EVENT, early]]).events == (early, EVENT)


# Paths


def test_default_state_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/var/x")
    assert default_state_dir() == Path("/var/x/ckptless/latest")
    monkeypatch.setenv("HOME", "/home/u")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert default_state_dir() == Path("/home/u/.local/state/ckptless/latest")

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UsageError, match="--state-dir"):
        default_state_dir()
