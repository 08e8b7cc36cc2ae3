"""The messages of `ckptctl` and a daemon where somebody reads what is recorded of a job."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.limits import OF_RANKS, Protocol
from ckptless.daemon.protocol.messages import Message
from ckptless.daemon.protocol.model import Value
from ckptless.daemon.protocol.records import Record

MAX_NAME = 256
MAX_KIND = 64
MAX_KINDS = 16

# The tags of the records, in the order in which they are told.
Table: TypeAlias = Literal["job", "node", "slot", "holding", "generation", "fault", "recovery", "event"]
TABLES: tuple[Table, ...] = ("job", "node", "slot", "holding", "generation", "fault", "recovery", "event")

KeyPart: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)] | Annotated[str, Meta(max_length=MAX_NAME)]


class RowCursor(Value, frozen=True, kw_only=True):
    """A place between two records: behind the one of `table` with this `key`, or, without one, before all."""

    table: Table
    key: Annotated[tuple[KeyPart, ...], Meta(max_length=2)] = ()


class Read(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: tell me what is recorded of `job`, a run's name; of "" only the asker's jobs.

    `tables` are told in the order of TABLES, from `after` on; of events only those of `kinds`, if any are
    named.
    """

    protocol: Protocol
    job: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    tables: Annotated[tuple[Table, ...], Meta(min_length=1, max_length=len(TABLES))]
    kinds: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=MAX_KIND)], ...], Meta(max_length=MAX_KINDS)
    ] = ()
    after: RowCursor | None = None


class Page(Message, frozen=True, kw_only=True):
    """Answer to Read: records, and where to go on; `more`: some are left. Of others' jobs there are none."""

    records: Annotated[tuple[Record, ...], OF_RANKS]
    next: RowCursor
    more: bool
