"""Decides which of two records about the same thing holds: the one rule for merging ledgers, pure."""

from typing import Any, TypeAlias

from ckptless.daemon.protocol.records import (
    BY_SLURM,
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

# Ids of faults and events are unique within a job; one ledger holds many jobs.
KEYS: dict[type[Record], tuple[str, ...]] = {
    JobRecord: ("job",),
    NodeRecord: ("job", "node"),
    SlotRecord: ("job", "node", "slot"),
    HoldingRecord: ("job", "node"),
    GenerationRecord: ("job", "generation"),
    FaultRecord: ("job", "fault"),
    RecoveryRecord: ("job", "generation"),
    EventRecord: ("job", "event"),
}

ENDED = ("done", "failed", "stopped")

# How much a ledger knows of a job: its newest generation, then the newest time in it. (0, 0.0): nothing.
Freshness: TypeAlias = tuple[int, float]


def key(record: Record) -> tuple[Any, ...]:
    """Return what the record is about. Of two records of one type and key one is kept."""
    return tuple(getattr(record, name) for name in KEYS[type(record)])


def precedence(record: Record, freshness: Freshness = (0, 0.0)) -> tuple[Any, ...]:
    """A sort key over the records of one key: the greatest holds.

    `freshness` is that of the ledger the record comes from. It decides only between records of a job that
    goes on: these carry no time of their own. The last part is the whole record's text, so that the order
    in which ledgers are read never matters.
    """
    text = repr(record)
    match record:
        case JobRecord():
            if record.state in ENDED:
                # A node that its user stops may know no better than that; and Slurm knows least.
                rank = 0 if (record.reason or "").startswith(BY_SLURM) else 1 + (record.state != "stopped")
                return (True, (rank, 0.0), record.ended_s or 0.0, text)
            # A ledger whose daemon missed the beginning knows less than any other.
            return (False, record.state != "forming", freshness, record.started_s, text)
        case NodeRecord() | SlotRecord():
            return (record.updated_s, text)
        case HoldingRecord():
            return (record.seq, record.updated_s, text)
        case GenerationRecord():
            return (record.agreed_s, text)
        case RecoveryRecord():
            return (record.outcome is not None, len(record.phases), text)
        case FaultRecord() | EventRecord():
            return (text,)
