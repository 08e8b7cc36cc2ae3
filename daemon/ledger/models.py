"""The ledger's tables: one per kind of record, a column per field.

`migrations` makes them in a file; these definitions are what queries are written with. Tuples and dicts are
JSON text.
"""

import json
from typing import Any

import msgspec
from sqlalchemy import Column, Dialect, Float, Integer, MetaData, Table, Text
from sqlalchemy.types import TypeDecorator

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


_metadata = MetaData()

jobs = Table(
    "jobs",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("command", JsonText),
    Column("world_size", Integer),
    Column("nodes", Integer),
    Column("spares", Integer),
    Column("state", Text),
    Column("started_s", Float),
    Column("ended_s", Float),
    Column("exit_code", Integer),
    Column("reason", Text),
)

nodes = Table(
    "nodes",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("node", Integer, primary_key=True),
    Column("name", Text),
    Column("address", Text),
    Column("state", Text),
    Column("daemon_pid", Integer),
    Column("agent_pid", Integer),
    Column("updated_s", Float),
)

slots = Table(
    "slots",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("node", Integer, primary_key=True),
    Column("slot", Integer, primary_key=True),
    Column("rank", Integer),
    Column("generation", Integer),
    Column("pid", Integer),
    Column("phase", Text),
    Column("step", Integer),
    Column("loss", FloatText),
    Column("updated_s", Float),
    Column("every", Integer),
    Column("share", Float),
)

holdings = Table(
    "holdings",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("node", Integer, primary_key=True),
    Column("tensors", JsonText),
    Column("records", JsonText),
    Column("nbytes", Integer),
    Column("seq", Integer),
    Column("updated_s", Float),
    Column("rings", JsonText),
)

generations = Table(
    "generations",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("places", JsonText),
    Column("restore_step", Integer),
    Column("rung", Text),
    Column("faults", JsonText),
    Column("leader", Integer),
    Column("agreed_s", Float),
)

faults = Table(
    "faults",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("fault", Text, primary_key=True),
    Column("kind", Text),
    Column("node", Integer),
    Column("slot", Integer),
    Column("rank", Integer),
    Column("generation", Integer),
    Column("detail", Text),
    Column("seen_s", Float),
    Column("source", Text),
)

recoveries = Table(
    "recoveries",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("rung", Text),
    Column("faults", JsonText),
    Column("restore_step", Integer),
    Column("started_s", Float),
    Column("phases", JsonText),
    Column("outcome", Text),
)

# `row` numbers events in the order this ledger learned of them: what a follower goes on from.
events = Table(
    "events",
    _metadata,
    Column("row", Integer, primary_key=True),
    Column("job", Text),
    Column("event", Text),
    Column("node", Integer),
    Column("at_s", Float),
    Column("level", Text),
    Column("kind", Text),
    Column("generation", Integer),
    Column("text", Text),
    Column("about", JsonText),
)

# No record: it is this daemon's own, and no other ledger's business.
votes = Table(
    "votes",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("identity", Text),
    Column("state", Text),
    Column("digest", Text),
)

# Nor this: each daemon has asked for itself whose the job is. `launch` is JobSpec.launch.
owners = Table(
    "owners",
    _metadata,
    Column("job", Text, primary_key=True),
    Column("uid", Integer),
    Column("launch", Text),
)

TABLES: dict[type[Record], Table] = {
    JobRecord: jobs,
    NodeRecord: nodes,
    SlotRecord: slots,
    HoldingRecord: holdings,
    GenerationRecord: generations,
    FaultRecord: faults,
    RecoveryRecord: recoveries,
    EventRecord: events,
}
