"""The ledger: records in, records out, one SQLite file.

Blocking. A ledger may be used from any thread, by one at a time: a daemon gives it a thread of its own.
Everything raised is LedgerError, one sentence that names the file; its kind says what can be done about it.
"""

import hashlib
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Insert,
    Row,
    Select,
    not_,
    or_,
    select,
    tuple_,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError, StatementError

from ckptless.daemon.ledger import models
from ckptless.daemon.ledger.engine import durable as durable_commit
from ckptless.daemon.ledger.engine import give_back, reading_engine, used_nbytes, writing_engine
from ckptless.daemon.ledger.migrations import migrate, require_current
from ckptless.daemon.ledger.precedence import ENDED, KEYS
from ckptless.daemon.protocol.errors import BadRowError, DamagedLedgerError, LedgerError
from ckptless.daemon.protocol.health import MOST_VERDICTS, VerdictRecord
from ckptless.daemon.protocol.peers.agreement import Durable
from ckptless.daemon.protocol.records import (
    EventRecord,
    FaultRecord,
    GenerationRecord,
    HoldingRecord,
    JobRecord,
    Record,
    RecoveryRecord,
)
from ckptless.daemon.protocol.requests import TABLES, Page, Read, RowCursor, Table

R = TypeVar("R", bound=Record)

# Primary result codes of SQLite, see sqlite.org/rescode.html. ERROR is a table or column that is not there.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_BAD_ROW = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG)

# So long after a job's end nobody asks any more what was promised in it.
VOTE_S = 60.0
# A vote may wait for it: so many jobs are removed for want of room in one call, and so many pages given back
# to the file system, so often.
MOST_REMOVED, VACUUM_PAGES, VACUUMS = 20, 1024, 64


class Retention(NamedTuple):
    """How long what is recorded of jobs that are over is kept (s), and how large the file may be (bytes).

    Where it would be larger, those that were over first go before their time.
    """

    keep_s: float = 90 * 86400.0
    most_nbytes: int = 1 << 30


RETENTION = Retention()

# Lost with the node's power, these could let two worlds come to be, or the rows of a recovery lose its end.
_DECISIONS = (GenerationRecord, FaultRecord, RecoveryRecord)


class Owner(NamedTuple):
    """The owner of a run's name: its user, and JobSpec.launch, as a name comes again."""

    uid: int
    launch: str


class Ledger:
    """One ledger's file, open. Close it, or use it as a context manager."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self._engine = engine

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open to write, in a folder that exists; a missing file is made, an older one is brought up."""
        return cls._open(path, writing_engine, migrate)

    @classmethod
    def open_readonly(cls, path: Path) -> Self:
        """Open to read, whether its daemon lives, has ended or was killed. Never changes what is recorded."""
        if not path.exists():
            raise LedgerError(f"{path}: there is no ledger")
        return cls._open(path, reading_engine, require_current)

    @classmethod
    def _open(
        cls, path: Path, make_engine: Callable[[Path], Engine], check: Callable[[Engine], None]
    ) -> Self:
        engine = make_engine(path)
        try:
            with _sentences(path, "opened"):
                check(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(path, engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._engine.dispose()

    def write(self, records: Sequence[Record]) -> None:
        """Record all of them or none. Writing the same again changes nothing.

        By key: holdings of an older `seq` never replace newer ones, a job that ended never runs again, an
        event stays as first told; anything else is replaced, whatever its time: clocks are set back. A batch
        with a generation, fault or recovery in it is on the disk when this returns; another one may be lost
        with the node's power, never with the process.
        """
        batches: dict[type[Record], list[dict[str, Any]]] = {}
        for record in records:
            batches.setdefault(type(record), []).append(msgspec.structs.asdict(record))
        if not batches:
            return
        with self._writing(full=not batches.keys().isdisjoint(_DECISIONS)) as connection:
            for kind, rows in batches.items():
                connection.execute(_UPSERTS[kind], rows)

    def save_vote(self, job: str, identity: str, durable: Durable) -> None:
        """Keep what this daemon has promised and accepted for a job; on the disk when this returns."""
        state = msgspec.json.encode(durable).decode()
        row = {"job": job, "identity": identity, "state": state, "digest": _digest(job, identity, state)}
        with self._writing(full=True) as connection:
            connection.execute(models.votes.insert().prefix_with("OR REPLACE"), row)

    def vote(self, job: str) -> tuple[str, Durable] | None:
        """Return what `save_vote` kept last, (identity, durable), to the bit."""
        with self._reading() as connection:
            return self._vote(connection, job)

    @staticmethod
    def _vote(connection: Connection, job: str) -> tuple[str, Durable] | None:
        table = models.votes
        row = connection.execute(select(table).where(table.c.job == job)).one_or_none()
        if row is None:
            return None
        if row.digest != _digest(job, row.identity, row.state):
            raise DamagedLedgerError(f"the vote of job {job} is not as it was written")
        return row.identity, msgspec.json.decode(row.state, type=Durable)

    def save_verdict(self, boot: str, record: VerdictRecord) -> None:
        """Keep what was found of this node's health; the same verdict again replaces it."""
        row = {
            "id": f"{record.begun_s!r} {record.probe} {record.code} {record.where}",
            "boot": boot,
            "begun_s": record.begun_s,
            "ended_s": record.ended_s,
            "record": msgspec.json.encode(record).decode(),
        }
        with self._writing(full=False) as connection:
            connection.execute(models.verdicts.insert().prefix_with("OR REPLACE"), row)

    def verdicts(self) -> tuple[tuple[str, VerdictRecord], ...]:
        """Return those that stand, and the newest others: the boot of each, and the verdict, oldest first."""
        table = models.verdicts
        newest = table.c.ended_s.is_not(None), table.c.begun_s.desc()
        with self._reading() as connection:
            rows = connection.execute(select(table).order_by(*newest).limit(MOST_VERDICTS)).all()
            found = [(row.boot, msgspec.json.decode(row.record, type=VerdictRecord)) for row in rows]
        return tuple(reversed(found))

    def own(self, job: str, owner: Owner, *, anew: bool) -> Owner | None:
        """Note whose run has this name; on the disk when this returns. Return whose it was until now.

        Numbers of jobs come again, after years or with a new cluster. All that is recorded of another run
        goes where this one begins `anew`, and nobody reads of it any more. Else nothing changes.
        """
        owners = models.owners
        with self._writing(full=True) as connection:
            query = select(owners.c.uid, owners.c.launch).where(owners.c.job == job)
            row = connection.execute(query).one_or_none()
            known = None if row is None else Owner(*row)
            if known == owner:
                return None
            if known is not None and not anew:
                return known
            if known is not None:
                for table in (*models.TABLES.values(), models.votes, owners):
                    connection.execute(table.delete().where(table.c.job == job))
            connection.execute(owners.insert().values(job=job, **owner._asdict()))
        return known

    def prune(self, now_s: float, kept: Retention = RETENTION) -> int:
        """Remove what is not kept any more; the number of jobs that went before their time, for want of room.

        The votes of jobs that have been over for VOTE_S, and all of those that are so for `kept.keep_s`.
        Pages that are free then go back to the file system. What is too much for once is for the next call.
        """
        jobs = models.jobs.c
        with self._writing(full=False) as connection:
            ended_s = models.verdicts.c.ended_s
            connection.execute(models.verdicts.delete().where(ended_s < now_s - kept.keep_s))
            over = select(jobs.job).where(_ended(jobs.state), jobs.ended_s < now_s - VOTE_S)
            connection.execute(models.votes.delete().where(models.votes.c.job.in_(over)))
            self._remove(connection, _ended(jobs.state), jobs.ended_s < now_s - kept.keep_s)
        removed = 0
        while self.used_nbytes > kept.most_nbytes and removed < MOST_REMOVED:
            first = select(jobs.job).where(_ended(jobs.state)).order_by(jobs.ended_s, jobs.job).limit(1)
            with self._writing(full=False) as connection:
                if (job := connection.execute(first).scalar()) is None:
                    break
                self._remove(connection, jobs.job == job)
            removed += 1
        with _sentences(self.path, "written"), self._engine.connect() as connection:
            give_back(connection, VACUUM_PAGES, VACUUMS)
        return removed

    @staticmethod
    def _remove(connection: Connection, *which: ColumnElement[bool]) -> None:
        """Remove all that is recorded of jobs."""
        jobs = select(models.jobs.c.job).where(*which)
        others = [table for table in models.TABLES.values() if table is not models.jobs]
        for table in (models.votes, *others, models.owners, models.jobs):
            connection.execute(table.delete().where(table.c.job.in_(jobs)))

    @property
    def used_nbytes(self) -> int:
        """Bytes of the file that are used; without what SQLite keeps beside it."""
        with _sentences(self.path, "read"), self._engine.connect() as connection:
            return used_nbytes(connection)

    def check(self) -> None:
        """Read all of it, and have SQLite look whether the file is sound. Raises LedgerError."""
        with self._reading() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if found != "ok":
                raise DamagedLedgerError(f"SQLite says: {found}")
            for kind in models.TABLES:
                for _ in _rows(connection, kind, _SELECTS[kind]):
                    pass
            for job in connection.execute(select(models.votes.c.job)).scalars().all():
                self._vote(connection, job)

    def page(self, wanted: Read, uid: int | None, rows: int, nbytes: int) -> Page:
        """Answer a Read as of one moment, with about so much at most; None for `uid` may read of all jobs."""
        found: list[Record] = []
        first = wanted.after or RowCursor(table=TABLES[0])
        left = [table for table in TABLES[TABLES.index(first.table) :] if table in wanted.tables]
        place, size = first, 0
        with self._reading() as connection:
            for table in left:
                after = first.key if table == first.table else ()
                query = _paged(table, wanted, uid, after).limit(rows - len(found) + 1)
                for row in connection.execute(query):
                    if len(found) >= rows or size >= nbytes:
                        return Page(records=tuple(found), next=place, more=True)
                    record = _record(_KINDS[table], row)
                    found.append(record)
                    size += len(_MSGPACK.encode(record))
                    place = RowCursor(table=table, key=tuple(row[-len(_page_key(table)) :]))
        return Page(records=tuple(found), next=place, more=False)

    def close_jobs(self, close: Callable[[JobRecord], JobRecord | None]) -> tuple[JobRecord, ...]:
        """Replace those rows of jobs that have no end yet for which `close` gives one; the new ones."""
        is_open = _SELECTS[JobRecord].where(not_(_ended(models.TABLES[JobRecord].c.state)))
        with self._reading() as connection:
            rows = tuple(_rows(connection, JobRecord, is_open))
        closed = tuple(found for found in map(close, rows) if found is not None)
        self.write(closed)
        return closed

    def rows(self, kind: type[R], job: str | None = None) -> tuple[R, ...]:
        """All records of a kind, or one job's, by their keys; events as this ledger learned of them."""
        query = _SELECTS[kind]
        if job is not None:
            query = query.where(query.selected_columns.job == job)
        with self._reading() as connection:
            return tuple(_rows(connection, kind, query))

    def records(self, *, events: bool | Collection[str] = True) -> tuple[Record, ...]:
        """Everything, as of one moment.

        `events=False` leaves the events out, which are most of a ledger; or only those of some kinds come.
        """
        found: list[Record] = []
        with self._reading() as connection:
            for kind in models.TABLES:
                query = _SELECTS[kind]
                if kind is EventRecord and not isinstance(events, bool):
                    query = query.where(models.events.c.kind.in_(sorted(events)))
                if events or kind is not EventRecord:
                    found.extend(_rows(connection, kind, query))
        return tuple(found)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _sentences(self.path, "read"), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _writing(self, *, full: bool) -> Iterator[Connection]:
        """One transaction; `full`: it shall outlast a power failure."""
        with _sentences(self.path, "written"), self._engine.connect() as connection:
            durable_commit(connection, full=full)
            with connection.begin():
                yield connection


def _rows(connection: Connection, kind: type[R], query: Select[Any]) -> Iterator[R]:
    return (_record(kind, row) for row in connection.execute(query))


def _record(kind: type[R], row: Row[Any]) -> R:
    # Checked against the types: a file that something else has changed is not taken at its word.
    return msgspec.convert(dict(zip(kind.__struct_fields__, row, strict=False)), kind)


def _page_key(table: Table) -> tuple[Column[Any], ...]:
    """The columns that records of one job are told in the order of; of all jobs, the job."""
    columns = models.TABLES[_KINDS[table]].c
    if table == "event":
        return (columns.row,)
    return tuple(columns[name] for name in KEYS[_KINDS[table]][1:] or ("job",))


def _paged(table: Table, wanted: Read, uid: int | None, after: Sequence[int | str]) -> Select[Any]:
    """The rows of a table that `wanted` asks for behind `after`; the key's columns come last."""
    kind, key = _KINDS[table], _page_key(table)
    columns = models.TABLES[kind].c
    query = _SELECTS[kind].order_by(None).order_by(*key).add_columns(*(c.label(f"_{c.name}") for c in key))
    if wanted.job or table != "job":
        query = query.where(columns.job == wanted.job)
    if uid is not None:
        owned = select(models.owners.c.job).where(models.owners.c.uid == uid)
        query = query.where(columns.job.in_(owned))
    if wanted.kinds and table == "event":
        query = query.where(columns.kind.in_(sorted(wanted.kinds)))
    if len(after) == len(key):
        query = query.where(tuple_(*key) > tuple_(*after))
    return query


def _select(kind: type[Any]) -> Select[Any]:
    columns = models.TABLES[kind].c
    order = ("row",) if kind is EventRecord else KEYS[kind]
    return select(*(columns[name] for name in kind.__struct_fields__)).order_by(*(columns[n] for n in order))


def _upsert(kind: type[Any]) -> Insert:
    table, key = models.TABLES[kind], KEYS[kind]
    insert = sqlite.insert(table)
    if kind is EventRecord:
        return insert.on_conflict_do_nothing(index_elements=key)
    told = insert.excluded
    condition = None
    if kind is HoldingRecord:
        condition = told.seq >= table.c.seq
    elif kind is JobRecord:
        condition = or_(not_(_ended(table.c.state)), _ended(told.state))
    return insert.on_conflict_do_update(
        index_elements=key,
        set_={name: told[name] for name in kind.__struct_fields__ if name not in key},
        where=condition,
    )


def _ended(state: ColumnElement[str]) -> ColumnElement[bool]:
    return or_(*(state == end for end in ENDED))  # in_() cannot be executed for many rows at once


_MSGPACK = msgspec.msgpack.Encoder()
_KINDS: dict[Table, type[Any]] = dict(zip(TABLES, models.TABLES, strict=True))


def _digest(job: str, identity: str, state: str) -> str:
    return hashlib.sha256(f"{job}\0{identity}\0{state}".encode()).hexdigest()


_SELECTS: dict[type[Any], Select[Any]] = {kind: _select(kind) for kind in models.TABLES}
_UPSERTS: dict[type[Any], Insert] = {kind: _upsert(kind) for kind in models.TABLES}


@contextmanager
def _sentences(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except LedgerError as error:
        raise type(error)(f"{path}: {error}") from error
    except (SQLAlchemyError, sqlite3.Error, msgspec.DecodeError, ValueError, OverflowError) as error:
        # A statement's own text is the SQL and a web address; the cause is SQLite's.
        cause = (isinstance(error, StatementError) and error.orig) or error
        raise _kind(cause, done)(f"{path}: the ledger cannot be {done}: {cause}") from error


def _kind(cause: BaseException, done: str) -> type[LedgerError]:
    """Whether it is the file, the record, or (LedgerError itself) the disk: that may pass."""
    code = getattr(cause, "sqlite_errorcode", None)
    if code is None:
        # Not SQLite's: what was read is nonsense, or what is to be written.
        return BadRowError if done == "written" else DamagedLedgerError
    if code & 0xFF in _BAD_ROW:
        return BadRowError
    return DamagedLedgerError if code & 0xFF in _DAMAGED else LedgerError
