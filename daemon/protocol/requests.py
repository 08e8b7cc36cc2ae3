"""The messages of `ckptctl` and a daemon: what is recorded of a job, and what its owner asks of it."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.limits import (
    OF_RANKS,
    Clipped,
    NodeCount,
    NodeNumber,
    Protocol,
    Text,
)
from ckptless.daemon.protocol.messages import Message
from ckptless.daemon.protocol.model import DrillKind, Value
from ckptless.daemon.protocol.records import Record

MAX_NAME = 256
MAX_REASON = 200
MAX_KIND = 64
MAX_KINDS = 16
# Of a drill: how long a rank may be paused, and its step be waited for.
MAX_PAUSE_S = 3600.0
MAX_WAIT_S = 24 * 3600.0

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


EvictionSource: TypeAlias = Literal["operator", "health"]


class Evict(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: take a node out of a job that runs, whatever its state is.

    `job` is a run, or the number of a Slurm job with one run. `node` is its name, or its number in the job.
    `force`: also where its ranks have no spare to go to, so that the job ends. `give_back`: Slurm gets it.
    `planned`: its ranks move first, with its state.
    """

    protocol: Protocol
    job: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    node: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    source: EvictionSource
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    force: bool = False
    give_back: bool = False
    planned: bool = False


class Evicted(Clipped, Message, frozen=True, kw_only=True):
    """Answer to Evict: what has come of it, in one sentence, and the node's number where it is known.

    "already": it was lost before. "elsewhere": this daemon cannot say, another one of the job can.
    "unknown": there is no such job here, or none that the asker may touch.
    """

    verdict: Literal["accepted", "already", "refused", "elsewhere", "unknown"]
    text: Text
    node: NodeNumber | None = None


class DrillJob(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: do this to the job once `step` is done, which may take `deadline_s`.

    `job` is a run, or the number of a Slurm job with one. `target` is a rank, or of kill-agent a node's
    name or its number in the job. `for_s`: of a pause. `force`: also where the job would end over it.
    """

    protocol: Protocol
    job: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    kind: DrillKind
    target: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    step: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0
    for_s: Annotated[float, Meta(ge=0, le=MAX_PAUSE_S)] = 0.0
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] = 600.0
    force: bool = False


class Drilled(Clipped, Message, frozen=True, kw_only=True):
    """Answer to DrillJob: what has come of it, in one sentence. The verdicts are those of `Evicted`."""

    verdict: Literal["accepted", "refused", "elsewhere", "unknown"]
    text: Text


class ResizeJob(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: train on so many nodes from now on; None: on as many as there are.

    `job` is a run, or the number of a Slurm job with one. `give_back`: Slurm gets what is left over.
    """

    protocol: Protocol
    job: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    nodes: NodeCount | None
    give_back: bool = False


class Resized(Clipped, Message, frozen=True, kw_only=True):
    """Answer to ResizeJob: what has come of it, in one sentence. The verdicts are those of `Evicted`."""

    verdict: Literal["accepted", "already", "refused", "elsewhere", "unknown"]
    text: Text
