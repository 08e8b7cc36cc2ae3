"""The ledger: records in, records out, one SQLite file.

Blocking. A ledger may be used from any thread, by one at a time: a daemon gives it a thread of its own.
Everything raised is LedgerError, one sentence that names the file.
"""

import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Engine, Insert, Row, Select, not_, or_, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError, StatementError

from ckptless.daemon.api.errors import LedgerError
from ckptless.daemon.api.records import (
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
from ckptless.daemon.control.decree import Durable
from ckptless.daemon.ledger import models
from ckptless.daemon.ledger.engine import durable as durable_commit
from ckptless.daemon.ledger.engine import reading_engine, writing_engine
from ckptless.daemon.ledger.migrations import migrate, require_current
from ckptless.daemon.ledger.precedence import ENDED, KEYS

R = TypeVar("R", bound=Record)

# Lost with the node's power, these could let two worlds come to be, or the story of a recovery lose its end.
_DECISIONS = (GenerationRecord, FaultRecord, RecoveryRecord)

_ORDER: dict[type[Any], tuple[str, ...]] = {
    **KEYS,
    JobRecord: ("started_s", "job"),
    FaultRecord: ("job", "seen_s", "fault"),
    EventRecord: ("row",),
}


class EventPage(NamedTuple):
    """Events in the order this ledger learned of them, and where to go on: `events(job, after=last)`."""

    records: tuple[EventRecord, ...]
    last: int


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

        By key: an older `updated_s` (of holdings: `seq`) never replaces a newer one, a job that ended never
        runs again, an event stays as first told; anything else is replaced. A batch with a generation, fault
        or recovery in it is on the disk when this returns; another one may be lost with the node's power,
        never with the process.
        """
        batches: dict[type[Record], list[dict[str, Any]]] = {}
        for record in records:
            batches.setdefault(type(record), []).append(msgspec.structs.asdict(record))
        if not batches:
            return
        with _sentences(self.path, "written"), self._engine.connect() as connection:
            durable_commit(connection, full=not batches.keys().isdisjoint(_DECISIONS))
            with connection.begin():
                for kind, rows in batches.items():
                    connection.execute(_UPSERTS[kind], rows)

    def save_vote(self, job: str, identity: str, durable: Durable) -> None:
        """Keep what this daemon has promised and accepted for a job; on the disk when this returns."""
        state = msgspec.json.encode(durable).decode()
        with _sentences(self.path, "written"), self._engine.connect() as connection:
            durable_commit(connection, full=True)
            with connection.begin():
                row = {"job": job, "identity": identity, "state": state}
                connection.execute(_SAVE_VOTE, row)

    def vote(self, job: str) -> tuple[str, Durable] | None:
        """What `save_vote` kept last, (identity, durable)."""
        table = models.votes
        with self._reading() as connection:
            row = connection.execute(select(table).where(table.c.job == job)).one_or_none()
            return None if row is None else (row.identity, msgspec.json.decode(row.state, type=Durable))

    def jobs(self) -> tuple[JobRecord, ...]:
        """Every job, the newest last."""
        return self._read(JobRecord)

    def close_jobs(self, close: Callable[[JobRecord], JobRecord | None]) -> tuple[JobRecord, ...]:
        """Replace those rows of jobs that have no end yet for which `close` gives one; the new ones."""
        is_open = _SELECTS[JobRecord].where(not_(_ended(models.TABLES[JobRecord].c.state)))
        with self._reading() as connection:
            rows = tuple(_rows(connection, JobRecord, is_open))
        closed = tuple(found for found in map(close, rows) if found is not None)
        self.write(closed)
        return closed

    def job(self, job: str) -> JobRecord | None:
        """The job of this id, if there is one."""
        return next(iter(self._read(JobRecord, job)), None)

    def nodes(self, job: str) -> tuple[NodeRecord, ...]:
        """The job's nodes, by number."""
        return self._read(NodeRecord, job)

    def slots(self, job: str) -> tuple[SlotRecord, ...]:
        """The job's slots, by node and number."""
        return self._read(SlotRecord, job)

    def holdings(self, job: str) -> tuple[HoldingRecord, ...]:
        """What the job's nodes hold, by node."""
        return self._read(HoldingRecord, job)

    def generations(self, job: str) -> tuple[GenerationRecord, ...]:
        """The job's generations, the newest last."""
        return self._read(GenerationRecord, job)

    def latest_generation(self, job: str) -> GenerationRecord | None:
        """The job's newest generation, if one was agreed."""
        table = models.generations
        newest = _by_job(GenerationRecord, job).order_by(None).order_by(table.c.generation.desc()).limit(1)
        with self._reading() as connection:
            return next(_rows(connection, GenerationRecord, newest), None)

    def faults(self, job: str) -> tuple[FaultRecord, ...]:
        """The job's faults, the newest last."""
        return self._read(FaultRecord, job)

    def recoveries(self, job: str) -> tuple[RecoveryRecord, ...]:
        """The job's recoveries, the newest last."""
        return self._read(RecoveryRecord, job)

    def events(self, job: str, after: int | None = None) -> EventPage:
        """The job's events; with `after`, an earlier page's `last`, only those recorded since."""
        row = models.events.c.row
        last = after or 0
        with self._reading() as connection:
            found = connection.execute(_by_job(EventRecord, job).add_columns(row).where(row > last)).all()
            records = tuple(_record(EventRecord, fields) for fields in found)
        return EventPage(records, found[-1].row if found else last)

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

    def _read(self, kind: type[R], job: str | None = None) -> tuple[R, ...]:
        with self._reading() as connection:
            return tuple(_rows(connection, kind, _SELECTS[kind] if job is None else _by_job(kind, job)))

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _sentences(self.path, "read"), self._engine.begin() as connection:
            yield connection


def _rows(connection: Connection, kind: type[R], query: Select[Any]) -> Iterator[R]:
    return (_record(kind, row) for row in connection.execute(query))


def _record(kind: type[R], row: Row[Any]) -> R:
    # Checked against the types: a file that something else has changed is not taken at its word.
    return msgspec.convert(dict(zip(kind.__struct_fields__, row, strict=False)), kind)


def _by_job(kind: type[Any], job: str) -> Select[Any]:
    return _SELECTS[kind].where(models.TABLES[kind].c.job == job)


def _select(kind: type[Any]) -> Select[Any]:
    columns = models.TABLES[kind].c
    return select(*(columns[name] for name in kind.__struct_fields__)).order_by(
        *(columns[name] for name in _ORDER[kind])
    )


def _upsert(kind: type[Any]) -> Insert:
    table, key = models.TABLES[kind], KEYS[kind]
    insert = sqlite.insert(table)
    if kind is EventRecord:
        return insert.on_conflict_do_nothing(index_elements=key)
    told = insert.excluded
    condition = None
    if kind in (NodeRecord, SlotRecord):
        condition = told.updated_s >= table.c.updated_s
    elif kind is HoldingRecord:
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


def _save_vote() -> Insert:
    insert = sqlite.insert(models.votes)
    told = insert.excluded
    return insert.on_conflict_do_update(
        index_elements=("job",), set_={"identity": told.identity, "state": told.state}
    )


_SAVE_VOTE = _save_vote()
_SELECTS: dict[type[Any], Select[Any]] = {kind: _select(kind) for kind in models.TABLES}
_UPSERTS: dict[type[Any], Insert] = {kind: _upsert(kind) for kind in models.TABLES}


@contextmanager
def _sentences(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except LedgerError as error:
        raise LedgerError(f"{path}: {error}") from error
    except StatementError as error:  # its own text is the SQL and a web address; the cause is SQLite's
        raise LedgerError(f"{path}: the ledger cannot be {done}: {error.orig}") from error
    except (SQLAlchemyError, sqlite3.Error, msgspec.DecodeError, ValueError, OverflowError) as error:
        raise LedgerError(f"{path}: the ledger cannot be {done}: {error}") from error
