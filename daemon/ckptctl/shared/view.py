"""Reads, for a command, the job that was asked for."""

from collections import Counter
from collections.abc import Callable, Collection
from itertools import groupby
from typing import NamedTuple

import click

from ckptless.daemon.ckptctl.shared.ask import NoSuchJobError
from ckptless.daemon.ckptctl.shared.options import Asked
from ckptless.daemon.ckptctl.shared.source import LedgerSource, sources
from ckptless.daemon.ckptlessd.planning.event_lines import returned_text
from ckptless.daemon.ckptlessd.planning.faults import SECONDARY
from ckptless.daemon.ledger.merge import Snapshot
from ckptless.daemon.ledger.precedence import ENDED
from ckptless.daemon.protocol.records import (
    DRILL,
    REFUSALS,
    VOTE_AGAIN,
    VOTE_LOST,
    EventRecord,
    FaultRecord,
    GenerationRecord,
    JobRecord,
    RecoveryRecord,
    SlotRecord,
)


class Found(NamedTuple):
    """A job, all that is recorded of it, and where."""

    job: JobRecord
    snapshot: Snapshot
    source: LedgerSource


def all_jobs(asked: Asked) -> dict[str, tuple[JobRecord, LedgerSource]]:
    """Every job that the asker may see, or those that were asked for, by name, the newest last."""
    places = sources(asked, events=False)
    found = {job.job: (job, source) for source in places for job in source.jobs.jobs}
    wanted = [one for one in found.values() if asked.job is None or _is(one[0], asked.job)]
    if asked.job is not None and not wanted:
        raise _none(f"job {asked.job}", places)
    return {one[0].job: one for one in sorted(wanted, key=lambda one: _age(one[0]))}


def job_of(asked: Asked, *, events: bool | Collection[str] = False) -> Found:
    """The job asked for, or the newest, and all that is recorded of it. Raises NoSuchJobError."""
    places = sources(asked, events)
    known = [(job, source) for source in places for job in source.jobs.jobs]
    job, source = _choose(known, asked.job, places)
    found = source.job(job.job)
    # As all of it together says: the list of jobs is older, or was put together of less.
    job = next((one for one in found.jobs), job)
    return Found(job, found, source)


def _none(which: str, places: list[LedgerSource]) -> NoSuchJobError:
    names = " nor in ".join(place.name for place in places)
    return NoSuchJobError(f"there is no {which} in {names}: see `ckptctl jobs`")


def _choose(
    known: list[tuple[JobRecord, LedgerSource]], wanted: str | None, places: list[LedgerSource]
) -> tuple[JobRecord, LedgerSource]:
    """The run of that name, else the newest run of the Slurm job of that number, else the newest of all."""
    right = [one for one in known if wanted is None or _is(one[0], wanted)]
    if not right:
        raise _none("job at all" if wanted is None else f"job {wanted}", places)
    newest = max(right, key=lambda one: _age(one[0]))
    exact = [one for one in right if one[0].job == wanted]
    if exact and exact[0][0].job != newest[0].job:
        click.echo(f"ckptctl: job {wanted} has a newer run: {newest[0].job}", err=True)
    return exact[0] if exact else newest


def _is(job: JobRecord, wanted: str) -> bool:
    return wanted in (job.job, job.job.partition(".")[0])


def _age(job: JobRecord) -> tuple[float, str]:
    return job.started_s, job.job


def refused(found: Snapshot) -> dict[str, int]:
    """The number of refusals of an older generation or leader, by kind of event."""
    return dict(sorted(Counter(event.kind for event in found.events if event.kind in REFUSALS).items()))


class FaultGroup(NamedTuple):
    """A fault, and the ranks that only noticed it: their collectives failed with it."""

    fault: FaultRecord
    noticed: tuple[int, ...]


def causes(found: Snapshot) -> tuple[FaultGroup, ...]:
    """The causes, oldest first. Of faults that follow from others one is told where no cause is known."""
    told: list[FaultGroup] = []
    for _, group in groupby(sorted(found.faults, key=_when), key=lambda fault: fault.generation):
        faults = list(group)
        deep = [fault for fault in faults if fault.kind not in SECONDARY] or faults[:1]
        noticed = {fault.rank for fault in faults if fault.kind in SECONDARY and fault not in deep}
        ranks = tuple(sorted(rank for rank in noticed - {f.rank for f in deep} if rank is not None))
        told += [FaultGroup(fault, ranks if fault is deep[0] else ()) for fault in deep]
    return tuple(told)


def _when(fault: FaultRecord) -> tuple[int, float, str]:
    return fault.generation, fault.seen_s, fault.fault


def returned_early(job: JobRecord, found: Snapshot) -> str | None:
    """Ranks whose training function has returned while others still train, as a sentence."""
    generation = found.generation
    if generation is None or job.state in ENDED:
        return None
    slots = {(slot.node, slot.slot): slot for slot in found.slots if slot.generation == generation.generation}
    ranks = {rank: slots[place] for rank, place in enumerate(generation.places) if place in slots}
    done = {rank: slot for rank, slot in ranks.items() if slot.phase == "finished"}
    others = [rank for rank, slot in ranks.items() if slot.phase == "restored"]
    if not done or not others:
        return None
    return returned_text(sorted(done), others, max((s.step or 0 for s in done.values()), default=None))


def voteless(found: Snapshot) -> tuple[str, ...]:
    """The latest reason of each node that cannot vote."""
    last: dict[int, EventRecord] = {}
    for event in found.events:
        known = last.get(event.node)
        if event.kind in (VOTE_LOST, VOTE_AGAIN) and (known is None or event.at_s >= known.at_s):
            last[event.node] = event
    return tuple(event.text for _, event in sorted(last.items()) if event.kind == VOTE_LOST)


def last_drill(found: Snapshot) -> EventRecord | None:
    """The latest word on a drill."""
    told = [event for event in found.events if event.kind == DRILL]
    return max(told, key=lambda event: event.at_s, default=None)


def spares_left(found: Snapshot) -> int:
    """The number of slots that could still take a rank: in no generation now, and not on a lost node."""
    lost, rank_of = found.lost, ranks_in(found.generation)
    return sum(slot.node not in lost and rank_of(slot) == "spare" for slot in found.slots)


def ranks_in(generation: GenerationRecord | None) -> Callable[[SlotRecord], int | str]:
    """Return what tells a slot's rank, "spare", or "-" for a slot whose rank now lives elsewhere.

    The agreed generation is asked before the slot: nobody updates the record of a slot that was lost.
    """
    places = {} if generation is None else {place: rank for rank, place in enumerate(generation.places)}

    def rank_of(slot: SlotRecord) -> int | str:
        if generation is not None and slot.generation <= generation.generation:
            rank = places.get((slot.node, slot.slot))
            if rank is not None:
                return rank
            return "spare" if slot.rank is None else "-"
        return "spare" if slot.rank is None else slot.rank

    return rank_of


def total_s(recovery: RecoveryRecord) -> float:
    """The duration of the recovery, as far as it came."""
    return sum(recovery.phases.values())
