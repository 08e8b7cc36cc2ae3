"""The ledger's tables, derived from the records: a table for each kind, a column for each field.

Tuples, dicts and structs are JSON text.
"""

import json
from typing import Any

import msgspec
from msgspec import inspect
from sqlalchemy import (
    Column,
    Dialect,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeDecorator, TypeEngine

from ckptless.daemon.ledger.precedence import KEYS
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


class JsonText(TypeDecorator[Any]):
    """A tuple, dict or struct, as JSON, or None. Comes back as a list or dict."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        """Python to SQLite."""
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":"), allow_nan=False)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """SQLite to Python."""
        return json.loads(value)


class FloatText(TypeDecorator[float]):
    """A float that may be NaN, which SQLite would keep as NULL: a diverged loss is not an unknown one."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> str | None:
        """Python to SQLite: `repr` is exact."""
        return None if value is None else repr(float(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        """SQLite to Python."""
        return None if value is None else float(value)


METADATA = MetaData()


def _columns(kind: type[Record]) -> list[Column[Any]]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return [_column(field.name, field.type) for field in info.fields]


def _column(name: str, of: inspect.Type) -> Column[Any]:
    """Return the column of a field. What may be None may be NULL, but for JSON, which has its own null."""
    types = of.types if isinstance(of, inspect.UnionType) else (of,)
    (kind,) = (one for one in types if not isinstance(one, inspect.NoneType))
    as_sql = _as_sql(kind)
    return Column(name, as_sql, nullable=len(types) > 1 and not isinstance(as_sql, JsonText))


def _as_sql(of: inspect.Type) -> TypeEngine[Any]:
    match of:
        case inspect.IntType():
            return Integer()
        case inspect.StrType() | inspect.LiteralType():
            return Text()
        case inspect.FloatType():
            # Only bounds keep a NaN out.
            return FloatText() if of.ge is None else Float()
        case _:
            return JsonText()


def _table(name: str, kind: type[Record]) -> Table:
    return Table(name, METADATA, *_columns(kind), PrimaryKeyConstraint(*KEYS[kind]))


jobs = _table("jobs", JobRecord)
generations = _table("generations", GenerationRecord)

# `row` numbers events in the order this ledger learned of them: what a follower goes on from. No number is
# used twice, so it misses nothing after rows were removed. The index is for reading one job's events.
events = Table(
    "events",
    METADATA,
    Column("row", Integer, primary_key=True),
    *_columns(EventRecord),
    UniqueConstraint(*KEYS[EventRecord]),
    Index("events_by_job", "job"),
    sqlite_autoincrement=True,
)

# No record: it is this daemon's own, and no other ledger's business. `state` is a decree.Durable as
# JSON, `digest` is over the rest of the row: SQLite has no checksums, and a flipped bit is a broken promise.
# `identity` is told to the job's agent, which tells it back: a daemon without the row knows that it lost one.
votes = Table(
    "votes",
    METADATA,
    Column("job", Text, primary_key=True),
    Column("identity", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("digest", Text, nullable=False),
)

# Nor this: each daemon has asked for itself whose the job is, by Slurm's word when its agent came.
# `launch` is that of the JobSpec.
owners = Table(
    "owners",
    METADATA,
    Column("job", Text, primary_key=True),
    Column("uid", Integer, nullable=False),
    Column("launch", Text, nullable=False),
)

# Nor this: what was not well with this node, whatever jobs it had. `record` is a VerdictRecord as JSON,
# `boot` the kernel's boot_id, as most of what is wrong with a node a boot mends.
verdicts = Table(
    "verdicts",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("boot", Text, nullable=False),
    Column("begun_s", Float, nullable=False),
    Column("ended_s", Float, nullable=True),
    Column("record", Text, nullable=False),
)

TABLES: dict[type[Record], Table] = {
    JobRecord: jobs,
    NodeRecord: _table("nodes", NodeRecord),
    SlotRecord: _table("slots", SlotRecord),
    HoldingRecord: _table("holdings", HoldingRecord),
    GenerationRecord: generations,
    FaultRecord: _table("faults", FaultRecord),
    RecoveryRecord: _table("recoveries", RecoveryRecord),
    EventRecord: events,
}
