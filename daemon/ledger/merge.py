"""One picture from many ledgers: every node of a local run writes its own, a killed one's included."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from ckptless.daemon.ledger.paths import ledger_files
from ckptless.daemon.ledger.precedence import Freshness, key, precedence
from ckptless.daemon.protocol.errors import LedgerError
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

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Problem:
    """A ledger that could not be read, and why, in one sentence that names it."""

    path: Path
    why: str


@dataclass(frozen=True)
class Snapshot:
    """The recorded things, each once; jobs, faults and events by time, the rest by key.

    `sources` are the ledgers that were read, `problems` those that could not be.
    """

    jobs: tuple[JobRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    slots: tuple[SlotRecord, ...] = ()
    holdings: tuple[HoldingRecord, ...] = ()
    generations: tuple[GenerationRecord, ...] = ()
    faults: tuple[FaultRecord, ...] = ()
    recoveries: tuple[RecoveryRecord, ...] = ()
    events: tuple[EventRecord, ...] = ()
    sources: tuple[Path, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def generation(self) -> GenerationRecord | None:
        """The newest generation, in the snapshot of one job."""
        return self.generations[-1] if self.generations else None

    @property
    def lost(self) -> set[int]:
        """Nodes that are lost, in the snapshot of one job."""
        return {node.node for node in self.nodes if node.state == "lost"}

    def of_job(self, job: str) -> "Snapshot":
        """Only what is about this job."""
        rows = (field.name for field in fields(self) if field.name not in ("sources", "problems"))
        return replace(self, **{name: tuple(r for r in getattr(self, name) if r.job == job) for name in rows})


def read_all(state_dir: Path, *, events: bool | Collection[str] = True) -> Snapshot:
    """Read and merge every ledger of a state directory: its own `ledger.db` and each `*/ledger.db`.

    Each is read as of one moment. None there, or none readable: an empty snapshot without `sources`.
    `events=False` leaves the events unread; or give the kinds that are wanted.
    """
    from ckptless.daemon.ledger.store import Ledger  # SQLAlchemy: slow to load, and only files need it

    ledgers: list[tuple[Record, ...]] = []
    sources: list[Path] = []
    problems: list[Problem] = []
    for path in ledger_files(state_dir):
        try:
            with Ledger.open_readonly(path) as ledger:
                ledgers.append(ledger.records(events=events))
        except LedgerError as error:
            problems.append(Problem(path, str(error)))
        else:
            sources.append(path)
    return merge(ledgers, sources=tuple(sources), problems=tuple(problems))


def merge(
    ledgers: Sequence[Sequence[Record]], *, sources: tuple[Path, ...] = (), problems: tuple[Problem, ...] = ()
) -> Snapshot:
    """Merge ledgers by their records' keys. Pure; neither the order nor repeats of ledgers matter."""
    best: dict[tuple[Any, ...], tuple[tuple[Any, ...], Record]] = {}
    for ledger in ledgers:
        freshness = _freshness(ledger)
        for record in ledger:
            what = (type(record), *key(record))
            weight = precedence(record, freshness.get(record.job, (0, 0.0)))
            if what not in best or best[what][0] < weight:
                best[what] = (weight, record)
    kept = _settled([record for _, record in best.values()])
    return Snapshot(
        jobs=_sorted(kept, JobRecord, lambda r: (r.started_s, r.job)),
        nodes=_sorted(kept, NodeRecord, key),
        slots=_sorted(kept, SlotRecord, key),
        holdings=_sorted(kept, HoldingRecord, key),
        generations=_sorted(kept, GenerationRecord, key),
        faults=_sorted(kept, FaultRecord, lambda r: (r.seen_s, r.job, r.fault)),
        recoveries=_sorted(kept, RecoveryRecord, key),
        events=_sorted(kept, EventRecord, lambda r: (r.at_s, r.job, r.event)),
        sources=sources,
        problems=problems,
    )


def _settled(records: list[Record]) -> list[Record]:
    """A recovery whose leader died over it was not told of any more; a newer generation says how it ended."""
    newest: dict[str, int] = {}
    for record in records:
        if isinstance(record, GenerationRecord):
            newest[record.job] = max(newest.get(record.job, 0), record.generation)
    return [
        structs.replace(record, outcome="superseded")
        if isinstance(record, RecoveryRecord)
        and record.outcome is None
        and record.generation < newest.get(record.job, 0)
        else record
        for record in records
    ]


def _sorted(records: Iterable[Record], kind: type[R], order: Callable[[R], Any]) -> tuple[R, ...]:
    return tuple(sorted((record for record in records if isinstance(record, kind)), key=order))


def _freshness(ledger: Sequence[Record]) -> dict[str, Freshness]:
    """Per job. Events do not count: a snapshot read without them must choose the same."""
    newest: dict[str, Freshness] = {}
    for record in ledger:
        generation, time_s = newest.get(record.job, (0, 0.0))
        match record:
            case GenerationRecord():
                newest[record.job] = (max(generation, record.generation), max(time_s, record.agreed_s))
            case NodeRecord() | SlotRecord():
                newest[record.job] = (generation, max(time_s, record.updated_s))
            case _:
                pass
    return newest
