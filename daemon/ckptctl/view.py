"""Reads the ledgers for a command: one snapshot, and in it the job that was asked for."""

from collections import Counter
from collections.abc import Collection

import click

from ckptless.daemon.api.errors import LedgerError, UsageError
from ckptless.daemon.api.records import (
    REFUSALS,
    VOTE_AGAIN,
    VOTE_LOST,
    EventRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    RecoveryRecord,
    SlotRecord,
)
from ckptless.daemon.ckptctl.options import Asked
from ckptless.daemon.ledger.merge import Snapshot, read_all


class NoSuchJobError(UsageError):
    """The ledgers can be read, but the job is in none of them."""

    exit_code = 4


def snapshot(asked: Asked, *, events: bool | Collection[str] = False) -> Snapshot:
    """What the ledgers hold. Those that cannot be read are told on stderr; LedgerError if that is all."""
    found = read_all(asked.state_dir, events=events)
    if not found.sources:
        if found.problems:
            raise LedgerError("; ".join(problem.why for problem in found.problems))
        raise LedgerError(f"there is no ledger in {asked.state_dir}: give the right --state-dir")
    for problem in found.problems:
        click.echo(f"ckptctl: warning: {problem.why}", err=True)
    return found


def job_of(asked: Asked, *, events: bool | Collection[str] = False) -> tuple[JobRecord, Snapshot]:
    """The job asked for, or the newest, and all that is recorded of it. Raises NoSuchJobError."""
    found = snapshot(asked, events=events)
    wanted = [job for job in found.jobs if asked.job is None or job.job == asked.job]
    if not wanted:
        missing = "any job" if asked.job is None else f"a job {asked.job}"
        raise NoSuchJobError(f"no ledger in {asked.state_dir} knows of {missing}: see `ckptctl jobs`")
    job = wanted[-1]
    return job, found.of_job(job.job)


def refused(found: Snapshot) -> dict[str, int]:
    """How often something of an older generation or an older leader was refused, by kind of event."""
    return dict(sorted(Counter(event.kind for event in found.events if event.kind in REFUSALS).items()))


def voteless(found: Snapshot) -> tuple[str, ...]:
    """Of each node that cannot vote, why: the last that it has said of that."""
    last: dict[int, EventRecord] = {}
    for event in found.events:
        known = last.get(event.node)
        if event.kind in (VOTE_LOST, VOTE_AGAIN) and (known is None or event.at_s >= known.at_s):
            last[event.node] = event
    return tuple(event.text for _, event in sorted(last.items()) if event.kind == VOTE_LOST)


def spares_left(
    nodes: tuple[NodeRecord, ...], slots: tuple[SlotRecord, ...], generation: GenerationRecord | None
) -> int:
    """How many slots could still take a rank: none in the newest generation, and not on a lost node."""
    lost = {node.node for node in nodes if node.state == "lost"}
    return sum(slot.node not in lost and rank_of(slot, generation) == "spare" for slot in slots)


def rank_of(slot: SlotRecord, generation: GenerationRecord | None) -> int | str:
    """The slot's rank, "spare", or "-" for a slot whose rank now lives elsewhere.

    The agreed generation is asked before the slot: nobody updates the record of a slot that was lost.
    """
    if generation is not None and slot.generation <= generation.generation:
        place = (slot.node, slot.slot)
        if place in generation.places:
            return generation.places.index(place)
        return "spare" if slot.rank is None else "-"
    return "spare" if slot.rank is None else slot.rank


def total_s(recovery: RecoveryRecord) -> float:
    """How long the recovery took, as far as it came."""
    return sum(recovery.phases.values())
